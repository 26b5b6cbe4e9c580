from __future__ import annotations

import pickle
from collections import Counter
from unittest import mock

import dask.array as da
import numpy as np
import pytest
from dask.task_spec import DataNode
from distributed.protocol.pickle import dumps
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.fusing.planning import planner
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import AssembleStep, peak_bytes
from tests.fusing.support import check_blocks, graphs, run_programs, smoothed, tasks_and_sizes


def check(tasks, programs):
    """Check that each task runs once, and that each rank counts the uses of its values."""
    runs = Counter()
    for program in programs:
        uses = Counter(key for keys in program.outputs for key in keys)
        for superstep in program.supersteps:
            uses.update(item.key for items in superstep.sends.values() for item in items)
            for step in superstep.steps:
                is_assembled = isinstance(step, AssembleStep)
                uses.update([key for _, key in step.local] if is_assembled else step.dependencies)
                runs[step.block.key if is_assembled else step.key] += 1
        assert uses == program.uses
    assert runs == Counter(k for k, node in tasks.nodes.items() if not isinstance(node, DataNode))


def test_equal_plans_are_sent_once():
    """A program has a few hundred bytes for each task."""

    x, lengths = da.from_array(np.ones((16, 16)), chunks=(4, 16)), []
    for count in (10, 110):
        tasks, sizes = tasks_and_sizes(smoothed(x, count))
        program = programs_of(tasks, 4, sizes)[0]
        assert len({id(step.block.plan) for p in program.supersteps for step in p.steps}) == 1
        lengths.append(len(dumps(program)))
        plans = {id(s.block.plan) for p in pickle.loads(dumps(program)).supersteps for s in p.steps}
        assert len(plans) == 1
    assert (lengths[1] - lengths[0]) / 100 < 800


def stencils_on_the_fly(count):
    """Return a sum, of 16 blocks of 4 MiB a rank if there are four."""
    x = da.random.default_rng(0).random((8192, 4096), chunks=(128, 4096))
    return smoothed(x, count).sum()


@pytest.mark.parametrize(("count", "most_mib"), [(1, 32), (3, 96), (10, 104)])
def test_stencils_that_are_reduced_hold_few_blocks(count, most_mib):
    tasks, sizes = tasks_and_sizes(stencils_on_the_fly(count))
    for program in programs_of(tasks, 4, sizes):
        assert peak_bytes(program, sizes) <= most_mib * 2**20


SMALL_EXCHANGES = {
    "_LARGE_EXCHANGES_BYTES": 0,
    "_EXCHANGED_BYTES": 1,
    "_PARTS": 2**40,
    "_WORTHWHILE": float("inf"),
}


@given(graphs(), st.integers(2, 4))
def test_small_exchanges_have_the_same_values(arrays, size):
    with mock.patch.multiple(planner, **SMALL_EXCHANGES):
        tasks, sizes = tasks_and_sizes(*arrays)
        check(tasks, programs_of(tasks, size, sizes))
        check_blocks(arrays, run_programs(arrays, size))


def transposed(blocks=16, size=1024):
    """Return a transpose of some MiB, whose input is as large."""
    return dask_p2p.transpose(da.ones((size, 2 * size), chunks=(size // blocks, 2 * size)))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_transpose_that_is_reduced_holds_few_blocks(workers):
    x = transposed(8 * workers, 2048)
    tasks, sizes = tasks_and_sizes((x + 1).sum(axis=0))
    for program in programs_of(tasks, workers, sizes):
        own_bytes = peak_bytes(program, sizes) - x.nbytes / workers
        assert own_bytes < x.nbytes / workers / 2


def test_messages_of_two_ranks_are_small():
    """Otherwise two ranks with four blocks of 1 MiB each would take a quarter more memory."""
    tasks, sizes = tasks_and_sizes(dask_p2p.transpose(da.ones((1024, 1024), chunks=(128, 1024))))
    for program in programs_of(tasks, 2, sizes):
        with_messages = peak_bytes(program, sizes, with_messages=True)
        copies_bytes = with_messages - peak_bytes(program, sizes)
        assert 0 < copies_bytes <= 2**20  # half of them sent, half of them received


def test_layers_that_read_each_other():
    """Their tasks stay in the order of the graph."""
    graph = {("a", 0): (np.ones, 4), ("b", 0): (np.negative, ("a", 0))}
    graph |= {("a", 1): (np.negative, ("b", 0)), ("b", 1): (np.negative, ("a", 1))}
    y = da.Array(graph, "b", ((4, 4),), dtype=float) + 1
    assert y.compute(scheduler="sync").tolist() == [0.0] * 8
    np.testing.assert_array_equal(dask_p2p.fused(y, ranks=1).compute(scheduler="sync"), 0)
