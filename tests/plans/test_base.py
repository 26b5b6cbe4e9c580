from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.plans import BlockPlan, Piece, stage_order


@given(st.integers(1, 4), st.integers(1, 4))
def test_at_each_stage_every_holder_of_several_hosts_serves_one_reader(hosts, workers):
    addresses = [f"host{host}:{number}" for host in range(hosts) for number in range(workers)]
    orders = [stage_order(addresses, reader, host_of) for reader in addresses]
    for reader, order in zip(addresses, orders, strict=True):
        assert order[0] == reader
        assert sorted(order) == addresses
        assert {host_of(holder) for holder in order[:workers]} == {host_of(reader)}
        # Once it has left its host, it goes to another one at each stage.
        for first in range(workers, len(order), max(1, hosts - 1)):
            stage_hosts = [host_of(holder) for holder in order[first : first + hosts - 1]]
            assert len(set(stage_hosts)) == len(stage_hosts)
    for stage in zip(*orders, strict=True):
        assert len(set(stage)) == len(addresses)


def host_of(address):
    return address.split(":")[0]


def test_a_reader_without_blocks_starts_behind_its_index():
    assert stage_order(["a", "c", "e"], "d") == ["e", "a", "c"]
    assert stage_order(["a", "c", "e"], "z") == ["a", "c", "e"]


def test_a_part_of_a_piece_fills_a_part_of_its_destination():
    piece = Piece(0, ((2, 6), (10, 13)), ((0, 3), (4, 8)))
    plan = BlockPlan((3, 8), (1, 0), ((0, 0),), ((6, 13),), (piece,))
    assert plan.destination(piece, piece.src) == piece.dst
    assert plan.destination(piece, ((3, 5), (11, 12))) == ((1, 2), (5, 7))
