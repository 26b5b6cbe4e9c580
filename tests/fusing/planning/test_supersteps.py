from __future__ import annotations

import dask.array as da
import numpy as np

import dask_p2p
from dask_p2p.fusing.planning.owners import owners_of
from dask_p2p.fusing.planning.planner import programs_of, supersteps_of
from dask_p2p.fusing.planning.sizes import peak_bytes, sizes_of
from dask_p2p.fusing.planning.tasks import keys_of
from tests.fusing.support import read_arrays, smooth


def supersteps(size, *arrays):
    tasks = read_arrays(*arrays)[1].tasks
    return supersteps_of(tasks, owners_of(tasks, size))


def test_only_values_of_other_ranks_begin_a_superstep():
    x = da.ones((8, 8), chunks=(2, 8))
    local = (x + 1) * 2
    y = dask_p2p.transpose(local) - 1
    found = supersteps(4, y)
    assert {found[key] for key in keys_of(local)} == {0}
    assert {found[key] for key in keys_of(y)} == {1}
    assert {*supersteps(1, y).values()} == {0}


def test_branches_come_one_after_the_other():
    branches = []
    for number in range(3):
        x = da.full((8, 8), number, chunks=(2, 8), dtype=float)
        branches.append(dask_p2p.transpose(x + 1).max(axis=0))
    found = supersteps(4, da.stack(branches))
    firsts = [min(v for k, v in found.items() if k[0] == branch.name) for branch in branches]
    assert len(set(firsts)) == 3, "no branch waits for the values of another one"


def test_tasks_that_need_no_other_rank_run_before_the_exchange():
    x = da.random.default_rng(0).random((64, 8), chunks=(4, 8))
    y = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=float)
    found = supersteps(2, y + 1)
    edges = {0, 7, 8, 15}
    for z in (y, y + 1):
        assert [found[key] for key in keys_of(z)] == [int(n in edges) for n in range(16)]


def test_a_layer_is_at_most_one_layer_ahead():
    x = da.random.default_rng(0).random((64, 8), chunks=(2, 8))
    layers = [x]
    for _ in range(5):
        layers.append(
            dask_p2p.map_overlap(smooth, layers[-1], depth={0: 1}, boundary="periodic", dtype=float)
        )
    found = supersteps(2, layers[-1])
    of_layers = [{found[key] for key in keys_of(y)} for y in layers]
    assert of_layers == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}]


def test_a_stencil_that_is_reduced_holds_few_blocks():
    x = da.random.default_rng(0).random((64 * 8, 64), chunks=(8, 64))  # 32 blocks a rank
    y = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=float)
    tasks = read_arrays(y.map_blocks(np.sum, dtype=float, chunks=(1, 1), keepdims=True))[1].tasks
    sums = dict.fromkeys(tasks.outputs[0], 8)
    sizes = sizes_of(tasks) | sums
    for program in programs_of(tasks, 2, sizes):
        assert peak_bytes(program, sizes) <= 10 * x.nbytes / 64


def test_layers_that_read_each_other():
    """Their tasks stay in the order of the graph."""
    graph = {("a", 0): (np.ones, 4), ("b", 0): (np.negative, ("a", 0))}
    graph |= {("a", 1): (np.negative, ("b", 0)), ("b", 1): (np.negative, ("a", 1))}
    y = da.Array(graph, "b", ((4, 4),), dtype=float) + 1
    assert {*supersteps(1, y).values()} == {0}
    assert y.compute(scheduler="sync").tolist() == [0.0] * 8
    np.testing.assert_array_equal(dask_p2p.fused(y, ranks=1).compute(scheduler="sync"), 0)
