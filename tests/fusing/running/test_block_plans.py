from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

from dask_p2p.fusing.running import block_plans
from dask_p2p.fusing.running.block_plans import BlockPlans
from dask_p2p.plans import block_plans as plans_of
from dask_p2p.plans.grid import GridPlan, SplitAxis, redistribution
from tests.fusing.running.test_runner import large
from tests.fusing.support import check_blocks, run_programs
from tests.support import tune

ROWS = ((2,) * 6, (12,))


def test_few_plans_are_kept(monkeypatch):
    """Those of many slabs would take more memory than the blocks."""
    tune(monkeypatch, kept_pieces=20)
    kept, plan = BlockPlans(), redistribution(ROWS, (1, 0), ROWS)
    for _ in range(2):
        for index, expected in plans_of(plan):
            block, pieces = kept.of(plan, index)
            assert block == expected
            assert [*pieces] == [*range(len(expected.sources))]
            assert 0 < kept.pieces <= 20


def test_programs_with_more_plans_than_are_kept(monkeypatch):
    tune(monkeypatch, kept_pieces=20)
    few = BlockPlans()
    for name in ("of", "_keep"):  # of all gangs
        monkeypatch.setattr(block_plans.KEPT_PLANS, name, getattr(few, name))
    arrays = large(256)
    check_blocks(arrays, run_programs(arrays, 3))
    assert 0 < few.pieces <= 20


def test_a_plan_is_made_once():
    kept, plan = BlockPlans(), redistribution(ROWS, (1, 0), ROWS)
    assert kept.of(plan, (1, 0)) is kept.of(plan, (1, 0))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept.of(plan, (2, 0)), range(100)))
    assert all(each[0] == plan.block((2, 0)) for each in found)
    assert kept.pieces == len(plan.block((1, 0)).pieces) + len(plan.block((2, 0)).pieces)


def test_no_plan_takes_the_place_of_one_that_is_gone():
    """Python gives the number of a freed object to another one."""
    kept = BlockPlans()
    for size in range(1, 40):
        plan = GridPlan((0,), (SplitAxis((size,), (size,)),))
        assert kept.of(plan, (0,))[0].shape == (size,)
        del plan
        gc.collect()
