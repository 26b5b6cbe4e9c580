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
from dask_p2p.fusing.planning.sizes import AssembleStep, SourceElements, peak_bytes, sizes_of
from tests.fusing.support import check_blocks, graphs, read_arrays, run_programs, smooth


def keys_of_step(step):
    """The key that a step makes, and those that it reads on its own rank."""
    if isinstance(step, AssembleStep):
        return step.block.key, [key for _, key in step.local]
    return step.key, list(step.dependencies)


def check(tasks, programs):
    """Follow all programs at the same time, with keys in place of values."""
    held = [{*program.inputs, *program.literals} for program in programs]
    left = [Counter(program.uses) for program in programs]
    done = Counter()

    def use(rank, key):
        assert key in held[rank]
        left[rank][key] -= 1
        if not left[rank][key]:
            held[rank].remove(key)

    assert len({len(program.supersteps) for program in programs}) == 1
    for number in range(len(programs[0].supersteps)):
        supersteps = [program.supersteps[number] for program in programs]
        regions = Counter()
        for reader, superstep in enumerate(supersteps):
            for owner, items in superstep.receives.items():
                assert supersteps[owner].sends[reader] == items, "both ends have the same items"
                for item in items:
                    assert item.key in held[owner]
                    if hasattr(item, "block"):
                        regions[item.block.key] += 1
                    else:
                        held[reader].add(item.key)
        for owner, superstep in enumerate(supersteps):
            for reader, items in superstep.sends.items():
                assert supersteps[reader].receives[owner] == items
                for item in items:
                    use(owner, item.key)
        for rank, superstep in enumerate(supersteps):
            for step in superstep.steps:
                key, read = keys_of_step(step)
                for each in read:
                    use(rank, each)
                if isinstance(step, AssembleStep):
                    in_all = len(tasks.nodes[key].blocks.items)
                    assert len(step.local) + regions.pop(key, 0) == in_all
                done[key] += 1
                held[rank].add(key)
        assert not regions, "regions are received in the superstep that assembles the block"
    made = {key for key, node in tasks.nodes.items() if not isinstance(node, DataNode)}
    assert done == Counter(dict.fromkeys(made, 1)), "each task runs once"
    for rank, program in enumerate(programs):
        for keys in program.outputs:
            for key in keys:
                use(rank, key)
    assert not any(held), "each value is dropped after its last use"
    wanted = Counter(key for keys in tasks.outputs for key in keys)
    assert wanted == Counter(key for p in programs for keys in p.outputs for key in keys)


@given(graphs(), st.integers(1, 5))
def test_programs_do_all_tasks_once_and_drop_all_values(arrays, size):
    _, read = read_arrays(*arrays)
    check(read.tasks, programs_of(read.tasks, size))


def chain(count, n=16):
    x = da.from_array(np.ones((n, n)), chunks=(n // 4, n))
    for _ in range(count):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
    return x


@pytest.mark.parametrize("count", [1, 7])
def test_a_chain_of_halos_has_one_exchange_each(count):
    programs = programs_of(read_arrays(chain(count))[1].tasks, 4)
    exchanges = [
        [bool(superstep.sends) for superstep in program.supersteps] for program in programs
    ]
    assert [sum(each) for each in exchanges] == [count - 1] * 4, "small inputs are literals"


def test_equal_plans_are_sent_once():
    """A program has a few hundred bytes for each task."""

    sizes = []
    for count in (10, 110):
        program = programs_of(read_arrays(chain(count))[1].tasks, 4)[0]
        assert len({id(step.block.plan) for p in program.supersteps for step in p.steps}) == 1
        sizes.append(len(dumps(program)))
        plans = {id(s.block.plan) for p in pickle.loads(dumps(program)).supersteps for s in p.steps}
        assert len(plans) == 1
    assert (sizes[1] - sizes[0]) / 100 < 800


def test_large_blocks_are_read_in_place():
    for n, expected in ((64, False), (1024, True)):
        programs = programs_of(read_arrays(chain(1, n))[1].tasks, 2)
        assert [program.reads_memory for program in programs] == [expected] * 2


def stencils_on_the_fly(count):
    """Return a sum, of 16 blocks of 4 MiB a rank if there are four."""
    x = da.random.default_rng(0).random((8192, 4096), chunks=(128, 4096))
    for _ in range(count):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=float)
    return x.sum()


@pytest.mark.parametrize(("count", "most_mib"), [(1, 32), (3, 64), (10, 104)])
def test_stencils_that_are_reduced_hold_few_blocks(count, most_mib):
    tasks = read_arrays(stencils_on_the_fly(count))[1].tasks
    sizes = sizes_of(tasks)
    for program in programs_of(tasks, 4):
        assert peak_bytes(program, sizes) <= most_mib * 2**20


@given(graphs(), st.integers(2, 4))
def test_late_tasks_have_the_same_values(arrays, size):
    always = {"_LARGE_BYTES": 0, "_FEW_EXCHANGES": 1000, "_WORTHWHILE": float("inf")}
    with mock.patch.multiple(planner, **always):
        check_blocks(arrays, run_programs(arrays, size))


SMALL_EXCHANGES = {
    "_LARGE_EXCHANGES_BYTES": 0,
    "_EXCHANGED_BYTES": 1,
    "_WORTHWHILE": float("inf"),
    "_FEWER": float("inf"),
}


@given(graphs(), st.integers(2, 4))
def test_small_exchanges_have_the_same_values(arrays, size):
    with mock.patch.multiple(planner, **SMALL_EXCHANGES):
        read = read_arrays(*arrays)[1]
        check(read.tasks, programs_of(read.tasks, size))
        check_blocks(arrays, run_programs(arrays, size))


def transposed(blocks=16, size=1024):
    """Return a transpose of some MiB, whose input is as large."""
    return dask_p2p.transpose(da.ones((size, 2 * size), chunks=(size // blocks, 2 * size)))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_transpose_that_is_reduced_holds_few_blocks(workers):
    x = transposed(8 * workers, 2048)
    tasks = read_arrays((x + 1).sum(axis=0))[1].tasks
    sizes = sizes_of(tasks)
    for program in programs_of(tasks, workers, sizes):
        own_bytes = peak_bytes(program, sizes) - x.nbytes / workers
        assert own_bytes < x.nbytes / workers / 2


def test_regions_in_messages_are_few():
    x = transposed()
    tasks = read_arrays(x)[1].tasks
    sizes, elements = sizes_of(tasks), SourceElements()
    for program in programs_of(tasks, 2, sizes):
        copies_bytes = peak_bytes(program, sizes, elements) - peak_bytes(program, sizes)
        assert copies_bytes <= 2**22


def test_messages_of_two_ranks_are_small():
    """Otherwise two ranks with four blocks of 1 MiB each would take a quarter more memory."""
    tasks = read_arrays(dask_p2p.transpose(da.ones((1024, 1024), chunks=(128, 1024))))[1].tasks
    sizes, elements = sizes_of(tasks), SourceElements()
    for program in programs_of(tasks, 2, sizes):
        copies_bytes = peak_bytes(program, sizes, elements) - peak_bytes(program, sizes)
        assert 0 < copies_bytes <= 2**20  # half of them sent, half of them received


def filtered(x):
    return dask_p2p.fft.ifftn(dask_p2p.fft.fftn(x) * 2)


def transposed_twice(x):
    return dask_p2p.transpose(dask_p2p.transpose(x) + 1) + x


@pytest.mark.parametrize(
    ("program", "columns", "is_larger"),
    [(filtered, 2048, True), (transposed_twice, 4096, False), (transposed_twice, 2048, False)],
)
def test_ranks_that_hold_much_exchange_more_at_a_time(program, columns, is_larger):
    """Each exchange takes half a millisecond. Smaller ones would save little memory."""
    x = da.ones((2048, columns), chunks=(64, columns))
    tasks = read_arrays(program(x))[1].tasks
    sizes, elements = sizes_of(tasks), SourceElements()
    programs = programs_of(tasks, 4, sizes)
    with mock.patch.multiple(planner, _FEWER=float("inf")):
        smaller = programs_of(tasks, 4, sizes)
    assert (len(programs[0].supersteps) < len(smaller[0].supersteps)) == is_larger
    for own, other in zip(programs, smaller, strict=True):
        least_bytes = peak_bytes(other, sizes, elements)
        assert peak_bytes(own, sizes, elements) * planner._WORTHWHILE <= least_bytes
