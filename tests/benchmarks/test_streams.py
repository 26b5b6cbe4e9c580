from __future__ import annotations

import pytest
from click import ClickException

from benchmarks import streams

pytestmark = pytest.mark.programs


def test_ways_of_dask_are_checked(client, monkeypatch):
    measured = streams.mapping(client, 1000, [2], fallback="numpy")
    ours = [streams.PINNED, streams.FIRST, streams.PAGEABLE, streams.REGISTERED]
    ours.append(f"{streams.PAGEABLE}, 2 thread(s)")
    assert {*measured} == {*ours, streams.USERS}
    for way in ours:
        assert measured[way]() > 0
    client.run(streams._fill_by, *streams._AS_IT_IS)
    wrong = streams.mapping(client, 1000, fallback="numpy")
    monkeypatch.setattr(streams.dask_p2p, "map_on_gpu", lambda function, x, **kwargs: x + 0)
    with pytest.raises(ClickException, match="values are wrong"):
        wrong[streams.PAGEABLE]()
