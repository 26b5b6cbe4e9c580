"""Connections of a section with one rank."""

from __future__ import annotations

from dask_p2p.sections.wire.one_rank import ONE_RANK


def test_exchanges_return_the_ranks_own_data():
    assert ONE_RANK.rank_and_size == (0, 1)
    assert ONE_RANK.gather("barrier()", b"own") == [b"own"]
    assert ONE_RANK.exchange("halo", {}, {}) == {}
    assert ONE_RANK.begin("halo", {}, {}, in_background=True)() == {}


def test_there_are_no_connections():
    assert ONE_RANK.is_alone
    assert not ONE_RANK.has_ended
    assert not ONE_RANK.carries(0, 2**30)
    assert ONE_RANK.received == []
