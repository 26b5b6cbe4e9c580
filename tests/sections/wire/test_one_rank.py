"""Connections of a section with one rank."""

from __future__ import annotations

from dask_p2p.sections.wire.connections import ONE_RANK


def test_exchanges_return_the_ranks_own_data():
    assert ONE_RANK.rank_and_size == (0, 1)
    assert ONE_RANK.gather("barrier()", b"own") == [b"own"]
    assert ONE_RANK.exchange("halo", {}, {}) == {}
    assert ONE_RANK.begin("halo", {}, {}, in_background=True)() == {}
