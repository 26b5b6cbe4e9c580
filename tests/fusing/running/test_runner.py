from __future__ import annotations

import weakref

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import BlockMismatchError, UnsupportedArrayError
from dask_p2p.fusing.planning.sizes import AssembledBlock, AssembleStep, Regions, Superstep
from dask_p2p.fusing.running.assembling import Assembling, kept_plans
from dask_p2p.plans import block_plans
from dask_p2p.plans.grid import redistribution
from dask_p2p.sections.exchange.device import HOST_ARRAYS, Lending
from tests.fusing.support import check_blocks, graphs, integers, run_programs, smooth
from tests.support import noted, tune


@given(graphs(), st.integers(1, 4))
def test_random_graphs_are_equal_bit_for_bit(arrays, size):
    check_blocks(arrays, run_programs(arrays, size))


def large(n=512):
    """An array of blocks that are worth reading in place."""
    x = da.random.default_rng(0).normal(size=(n, n), chunks=(n // 4, n))
    y = dask_p2p.map_overlap(smooth, x, depth=1, boundary="periodic", dtype=x.dtype)
    product = integers(dask_p2p.rechunk(y, (-1, n // 4))) @ integers(x)
    return dask_p2p.transpose(y), product, y[:, ::-1].T.copy() + y


@pytest.mark.parametrize("least_bytes", [1, 2**30])
def test_regions_are_equal_if_they_are_read_or_packed(monkeypatch, least_bytes):
    tune(monkeypatch, lent_read_bytes=least_bytes, read_bytes=1, read_run_bytes=1)
    arrays = large(64)
    check_blocks(arrays, run_programs(arrays, 3))


def in_order_of_memory(block):
    return np.asfortranarray(block) * 1.1


def test_the_order_in_memory_is_kept():
    """Rounding of sums depends on it."""
    x = da.random.default_rng(0).normal(size=(64, 48), chunks=(16, 48))
    y = x.map_blocks(in_order_of_memory, dtype=float)
    arrays = (y.rechunk((-1, 48), method="tasks").map_blocks(np.asarray, dtype=float), y + y[::-1])
    check_blocks(arrays, run_programs(arrays, 4))


@pytest.mark.parametrize(
    "dtype", ["?", "f2", "c16", "M8[s]", "U3", [("a", "i1"), ("b", "f8")], "V0"]
)
def test_values_of_all_dtypes(dtype):
    x = da.from_array(np.zeros((12, 8), dtype), chunks=(3, 8)).map_blocks(np.copy, dtype=dtype)
    arrays = dask_p2p.transpose(x), x[::-1].map_blocks(np.copy, dtype=x.dtype)
    check_blocks(arrays, run_programs(arrays, 3))


class Counted:
    """Functions that make arrays and count those that are alive."""

    def __init__(self):
        self.alive, self.most_alive = 0, 0

    def __call__(self, block):
        output = block + 1
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(output, self._dropped)
        return output

    def _dropped(self):
        self.alive -= 1


COUNTED = Counted()


def counted(block):
    """Return a new block, which `COUNTED` counts; a function that pickle sends by name."""
    return COUNTED(block)


def test_values_are_dropped_after_their_last_use():
    """Each of 20 blocks is made, read, and summed before the next one."""
    COUNTED.__init__()
    x = da.ones((20, 8), chunks=(1, 8))
    y = x.map_blocks(counted, dtype=float).map_blocks(counted, dtype=float).sum()
    check_blocks([y], run_programs([y], 1))
    assert COUNTED.alive == 0
    COUNTED.most_alive = 0
    run_programs([y], 1)
    assert COUNTED.most_alive == 2


ALIVE = []  # numbers of counted blocks at calls of `with_halo`


def with_halo(block):
    ALIVE.append(COUNTED.alive)
    return block * 1


def test_a_source_is_dropped_before_the_function_of_its_halo():
    x = da.ones((8, 8), chunks=(8, 8)).map_blocks(counted, meta=np.empty((0, 0)))
    y = dask_p2p.map_overlap(with_halo, x, depth=1, boundary="periodic", dtype=float)
    ALIVE.clear()
    run_programs([y], 1)
    assert ALIVE == [0]


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_unlike_their_declaration_are_refused(size):
    x = da.ones((8, 8), chunks=(2, 8))
    mismatched = x.map_blocks(lambda block: block[:1], dtype=float)
    with pytest.raises(BlockMismatchError, match=r"declared as float64 \(2, 8\)") as caught:
        run_programs([dask_p2p.transpose(mismatched)], size)
    assert "p2p-transpose" in caught.value.__notes__[0]
    masked = x.map_blocks(np.ma.masked_less, 2, dtype=float)
    with pytest.raises(UnsupportedArrayError, match="mask"):
        run_programs([dask_p2p.transpose(masked)], size)


@pytest.mark.parametrize("kind", [np.memmap, np.recarray])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_plain_classes(size, kind):
    x = da.from_array(np.arange(64.0).reshape(8, 8), chunks=(2, 8))
    y = dask_p2p.rechunk(x.map_blocks(lambda block: block.view(kind), dtype=float), (8, 4))
    check_blocks([y], run_programs([y], size))


def writing(block):
    block[...] = 7
    return block


def test_functions_of_map_overlap_may_overwrite_their_blocks():
    x = da.ones((8, 8), chunks=(2, 8)).map_blocks(np.copy, dtype=float)
    arrays = dask_p2p.map_overlap(writing, x, depth=0, boundary="none", dtype=float), x + 1
    check_blocks(arrays, run_programs(arrays, 1))


ROWS = (2,) * 6, (12,)
TRANSPOSE = redistribution(ROWS, (1, 0), ROWS)


def blocks_of(plan):
    return [
        AssembledBlock(("y", *index), plan, index, np.dtype(float), None)
        for index, _ in block_plans(plan)
    ]


def test_a_block_equal_to_its_source_is_not_copied():
    value = np.arange(24.0).reshape(2, 12)
    block = blocks_of(redistribution(ROWS, (0, 1), ROWS))[0]
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    assert Assembling().finish(step, {("x", 0, 0): value}) is value
    with_epilogue = AssembleStep(block._replace(epilogue=lambda out, index: out), step.local)
    copied = Assembling().finish(with_epilogue, {("x", 0, 0): value})
    assert not np.shares_memory(copied, value), "a function may overwrite it"
    np.testing.assert_array_equal(copied, value)


def test_programs_with_more_plans_than_are_kept(monkeypatch):
    """Plans of many slabs would take more memory than the blocks."""
    monkeypatch.setattr("dask_p2p.fusing.running.assembling._PLANS", kept_plans(20))
    arrays = large(256)
    check_blocks(arrays, run_programs(arrays, 3))


def test_a_source_that_differs_is_found_in_its_task(monkeypatch):
    assembling, (block, *_) = Assembling(), blocks_of(TRANSPOSE)
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    values = {("x", 0, 0): np.zeros((3, 12))}
    receives = {1: [Regions(("x", n, 0), n, block, size_bytes=32) for n in range(1, 6)]}
    assembling.begin_local(Superstep(receives=receives, steps=[step]), values)
    with pytest.raises(BlockMismatchError):
        assembling.finish(step, values)


def test_own_regions_are_copied_while_messages_arrive(monkeypatch):
    """Each once, and only into blocks that other ranks send regions of."""

    def count_pieces(lending, into, array, pieces, axes):
        return len(pieces)

    copied = noted(monkeypatch, Lending, "copy_pieces", count_pieces)
    assembling, (block, other_block, *_) = Assembling(), blocks_of(TRANSPOSE)
    sources = [np.full((2, 12), float(n)) for n in range(6)]
    steps = [
        AssembleStep(assembled_block, ((0, ("x", 0, 0)), (1, ("x", 1, 0)), (2, ("late", 2, 0))))
        for assembled_block in (block, other_block)
    ]
    receives = {1: [Regions(("x", n, 0), n, block, size_bytes=32) for n in range(3, 6)]}
    values = {("x", n, 0): sources[n] for n in range(2)}
    assembling.begin_local(Superstep(receives=receives, steps=steps), values)
    assert copied == [1, 1]
    out = assembling.begun(block, HOST_ARRAYS)
    out[:, 6:] = 9
    assembled = assembling.finish(steps[0], {**values, ("late", 2, 0): sources[2]})
    assert copied == [1] * 3
    np.testing.assert_array_equal(assembled, [[0, 0, 1, 1, 2, 2, *[9] * 6]] * 2)
