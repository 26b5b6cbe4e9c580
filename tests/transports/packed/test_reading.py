from __future__ import annotations

from dask_p2p.transports.packed_reading import RateController


def test_late_answers_are_asked_for_in_smaller_parts_until_they_are_early():
    rate = RateController()
    rate.update(2**24, 1.0, 30.0)
    assert rate.most_bytes >= 2**24, "early ones change nothing"
    rate.update(2**24, 30.0, 30.0)
    assert rate.most_bytes == 2**22
    rate.update(2**20, 30.0, 30.0)
    assert rate.most_bytes == 2**18
    rate.update(2**18, 4.0, 30.0)
    assert rate.most_bytes == 2**18, "neither late nor early"
    rate.update(2**10, 30.0, 30.0)
    assert 2**10 < rate.most_bytes < 2**18, "there is a least size, below which nothing is quicker"
    while rate.most_bytes < 2**24:
        before_bytes = rate.most_bytes
        rate.update(before_bytes, 0.1, 30.0)
        assert rate.most_bytes == 2 * before_bytes
