from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from dask_p2p.fusing import assembling
from dask_p2p.fusing.assembling import Assembling
from dask_p2p.fusing.program import AssembledBlock, AssembleStep
from dask_p2p.plans import block_plans
from dask_p2p.plans.grid import redistribution
from dask_p2p.plans.halo import halo_plan
from tests.fusing.support import check_blocks, run_programs
from tests.fusing.test_runner import large

ROWS, COLUMNS = ((2,) * 6, (12,)), ((12,), (2,) * 6)
PLANS = {
    "transpose": redistribution(ROWS, (1, 0), ROWS),
    "rechunk": redistribution(ROWS, (0, 1), ((5, 7), (4, 8))),
    "halo": halo_plan(ROWS, ((1, 2), (1, 1)), ("periodic", "reflect")),
    "star": halo_plan(ROWS, ((1, 1), (1, 1)), (0, "nearest"), has_corners=False),
}


def blocks_of(plan):
    of = np.dtype(float)
    return [AssembledBlock(("y", *index), plan, index, of, None) for index, _ in block_plans(plan)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_pieces_of_all_sources_are_those_of_the_block(plan):
    assembling = Assembling()
    for own in blocks_of(plan):
        block = assembling.plan(own)
        found = [assembling.pieces(own, number) for number in range(len(block.sources))]
        assert all(piece.source == n for n, pieces in enumerate(found) for piece in pieces)
        assert sorted(chain.from_iterable(found)) == sorted(block.pieces)


def test_a_block_equal_to_its_source_is_not_copied():
    value = np.arange(24.0).reshape(2, 12)
    block = blocks_of(redistribution(ROWS, (0, 1), ROWS))[0]
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    assert Assembling().finish(step, {("x", 0, 0): value}) is value
    own = AssembleStep(block._replace(epilogue=lambda out, index: out), step.local)
    copied = Assembling().finish(own, {("x", 0, 0): value})
    assert not np.shares_memory(copied, value), "a function may overwrite it"
    np.testing.assert_array_equal(copied, value)


def pieces_in(assembling):
    return sum(len(plan.pieces) for plan in assembling._plans.values())


def test_few_plans_are_kept(monkeypatch):
    """Those of many slabs would take more memory than the blocks."""
    monkeypatch.setattr(assembling, "_MOST_PIECES", 20)
    keeps, plan = Assembling(), PLANS["transpose"]
    for _ in range(2):
        for block in blocks_of(plan):
            assert keeps.plan(block) == plan.block(block.position)
            assert 0 < pieces_in(keeps) <= 20
    arrays = large(256)
    check_blocks(arrays, run_programs(arrays, 3))


def test_equal_blocks_of_several_layers_share_a_plan():
    keeps, (block, *_) = Assembling(), blocks_of(PLANS["halo"])
    assert keeps.plan(block) is keeps.plan(block._replace(key="another"))
