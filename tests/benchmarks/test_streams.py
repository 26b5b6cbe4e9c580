from __future__ import annotations

import sys

import numpy as np
import pytest
from click import ClickException
from click.testing import CliRunner

from benchmarks import streams
from benchmarks.streams import Issuer, by_kind, by_part
from tests.simulation.streams import HOST, RaceError, Stream


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    done = CliRunner().invoke(streams.main, [])
    assert done.exit_code == 1
    assert "needs a GPU, and there is none: CuPy cannot be imported" in done.output


def issued(gpu, order, count):
    values = np.arange(4 * 512.0)
    source, out = streams.pinned(values), streams.pinned(0 * values)
    gpu.do(HOST, "the producer", writes=[source])

    def doubled(a):
        made = gpu.empty(a.shape, a.dtype)
        gpu.do(gpu.current[-1].name, "the function", reads=[a], writes=[made])
        made.values[...] = 2 * a.values
        return made

    Issuer(source, out, doubled).run(order(count), count)
    gpu.do(HOST, "the reader", reads=[out])
    gpu.check()
    assert gpu.pageable_copies == 0
    np.testing.assert_array_equal(out, 2 * values)


@pytest.mark.parametrize("order", [by_part, by_kind])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_all_orders_make_the_same(gpu, order, count):
    issued(gpu, order, count)


def test_the_end_is_waited_for(gpu, monkeypatch):
    synchronize = Stream.synchronize
    monkeypatch.setattr(
        Stream, "synchronize", lambda self: self.name == "null" and synchronize(self)
    )
    with pytest.raises(RaceError):
        issued(gpu, by_kind, 4)


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
