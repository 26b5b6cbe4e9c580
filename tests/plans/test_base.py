from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.plans import stage_order

names = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=9, unique=True)


@given(names)
def test_at_each_stage_every_holder_serves_one_reader(workers):
    orders = [stage_order(workers, worker) for worker in workers]
    for worker, order in zip(workers, orders, strict=True):
        assert order[0] == worker
        assert sorted(order) == sorted(workers)
    for stage in zip(*orders, strict=True):
        assert len(set(stage)) == len(workers)


def test_a_reader_without_blocks_starts_behind_its_place():
    assert stage_order(["a", "c", "e"], "d") == ["e", "a", "c"]
    assert stage_order(["a", "c", "e"], "z") == ["a", "c", "e"]
