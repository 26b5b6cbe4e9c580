from __future__ import annotations

from dask_p2p.transports.packed_reading import Pace


def test_late_answers_are_asked_for_in_smaller_parts_until_they_are_early():
    pace = Pace()
    pace.update(2**24, 1.0, 30.0)
    assert pace.most_bytes >= 2**24, "early ones change nothing"
    pace.update(2**24, 30.0, 30.0)
    assert pace.most_bytes == 2**22
    pace.update(2**20, 30.0, 30.0)
    assert pace.most_bytes == 2**18
    pace.update(2**18, 4.0, 30.0)
    assert pace.most_bytes == 2**18, "neither late nor early"
    pace.update(2**10, 30.0, 30.0)
    assert 2**10 < pace.most_bytes < 2**18, "there is a least size, below which nothing is quicker"
    while pace.most_bytes < 2**24:
        before_bytes = pace.most_bytes
        pace.update(before_bytes, 0.1, 30.0)
        assert pace.most_bytes == 2 * before_bytes
