from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from dask_p2p.errors import BlockMismatchError
from dask_p2p.fusing.planning.sizes import AssembledBlock, AssembleStep, Regions, Superstep
from dask_p2p.fusing.running.assembling import Assembling, kept_plans, planned
from dask_p2p.plans import block_plans
from dask_p2p.plans.grid import redistribution
from dask_p2p.plans.halo import halo_plan
from dask_p2p.sections.exchange.device import HOST_ARRAYS, HostLending
from tests.fusing.running.test_runner import large
from tests.fusing.support import check_blocks, run_programs

ROWS = (2,) * 6, (12,)
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
    for own in blocks_of(plan):
        block, pieces = planned(own)
        found = [pieces[number] for number in range(len(block.sources))]
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


def test_equal_blocks_of_several_layers_share_a_plan():
    block, *_ = blocks_of(PLANS["halo"])
    assert planned(block) is planned(block._replace(key="another"))


def test_programs_with_more_plans_than_are_kept(monkeypatch):
    """Plans of many slabs would take more memory than the blocks."""
    monkeypatch.setattr("dask_p2p.fusing.running.assembling._PLANS", kept_plans(20))
    arrays = large(256)
    check_blocks(arrays, run_programs(arrays, 3))


def test_own_regions_are_copied_while_messages_arrive(monkeypatch):
    """Each once, and only into blocks that other ranks send regions of."""
    copied = []
    original = HostLending.copy_pieces

    def noted(self, into, array, pieces, axes):
        copied.append(len(pieces))
        original(self, into, array, pieces, axes)

    monkeypatch.setattr(HostLending, "copy_pieces", noted)
    assembling, (block, other, *_) = Assembling(), blocks_of(PLANS["transpose"])
    sources = [np.full((2, 12), float(n)) for n in range(6)]
    steps = [
        AssembleStep(each, ((0, ("x", 0, 0)), (1, ("x", 1, 0)), (2, ("late", 2, 0))))
        for each in (block, other)
    ]
    receives = {1: [Regions(("x", n, 0), n, block) for n in range(3, 6)]}
    values = {("x", n, 0): sources[n] for n in range(2)}
    assembling.begin_local(Superstep(receives=receives, steps=steps), values)
    assert copied == [1, 1]
    out = assembling.begun(block, block.dtype, HOST_ARRAYS)
    out[:, 6:] = 9
    made = assembling.finish(steps[0], {**values, ("late", 2, 0): sources[2]})
    assert copied == [1] * 3
    np.testing.assert_array_equal(made, [[0, 0, 1, 1, 2, 2, *[9] * 6]] * 2)


def test_a_source_that_differs_is_found_in_its_task(monkeypatch):
    assembling, (block, *_) = Assembling(), blocks_of(PLANS["transpose"])
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    values = {("x", 0, 0): np.zeros((3, 12))}
    receives = {1: [Regions(("x", n, 0), n, block) for n in range(1, 6)]}
    assembling.begin_local(Superstep(receives=receives, steps=[step]), values)
    with pytest.raises(BlockMismatchError):
        assembling.finish(step, values)
