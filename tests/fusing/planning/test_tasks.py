from __future__ import annotations

from operator import add, neg

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import convert_legacy_graph, execute_graph
from dask.graph_manipulation import clone
from dask.task_spec import Alias, Task, TaskRef

import dask_p2p
from dask_p2p.fusing.planning.tasks import keys_of, read_graph, unfused
from tests.fusing.support import check_blocks, read_arrays, run_programs


class File:
    """An array in a file, as Dask sees it."""

    shape, dtype, ndim = (8, 8), np.dtype(float), 2

    def __getitem__(self, index):
        return np.ones(self.shape)[index]


def zeros(block_info=None):
    return np.zeros(block_info[None]["chunk-shape"])


def make_block(n):
    return np.ones((n, n))


def names(keys):
    return {key[0] if isinstance(key, tuple) else key for key in keys}


IN_RANKS = {
    "memory": lambda: da.from_array(np.ones((8, 8)), chunks=4),
    "memory inside of tasks": lambda: da.from_array(np.ones((8, 8)), chunks=4, inline_array=True),
    "ones": lambda: da.ones((8, 8), chunks=4),
    "full": lambda: da.full((8, 8), 3.0, chunks=4),
    "empty": lambda: da.empty((8, 8), chunks=4),
    "eye": lambda: da.eye(8, chunks=4),
    "arange": lambda: da.arange(8, chunks=4),
    "linspace": lambda: da.linspace(0, 1, 8, chunks=4),
    "random": lambda: da.random.default_rng(0).random((8, 8), chunks=4),
    "old random": lambda: da.random.RandomState(0).normal(size=(8, 8), chunks=4),
}
WITH_DASK = {
    "a file": lambda: da.from_array(File(), chunks=4),
    "a file inside of tasks": lambda: da.from_array(File(), chunks=4, inline_array=True),
    "a function without arrays": lambda: da.map_blocks(zeros, chunks=((4, 4), (8,)), dtype=float),
    "a delayed function": lambda: da.from_delayed(dask.delayed(make_block)(8), (8, 8), float),
}


@pytest.mark.parametrize("kind", IN_RANKS)
def test_arrays_of_few_numbers_are_made_by_ranks(kind):
    _, read = read_arrays(IN_RANKS[kind]() + 1)
    assert not read.dask_tasks
    assert not read.inputs


@pytest.mark.parametrize("kind", WITH_DASK)
def test_reads_and_unknown_functions_stay_with_dask(kind):
    x = WITH_DASK[kind]()
    y = dask_p2p.transpose(x + 1)
    _, read = read_arrays(y)
    assert names(read.inputs) == {x.name} or kind == "a delayed function"
    assert names(read.nodes) >= {(x + 1).name, y.name}
    assert not read.dask_tasks.keys() & read.nodes.keys()
    assert read.dask_tasks.keys() >= set(read.inputs)


def test_copies_of_tasks_have_keys_of_their_own():
    """Dask copies aliases under other keys than their own."""
    x = da.from_array(np.arange(4), chunks=-1).rechunk(2) * 2
    y = clone(x)
    arrays = [y == x]
    read = read_arrays(*arrays)[1]
    assert all(node.key == key for key, node in read.nodes.items())
    check_blocks(arrays, run_programs(arrays, 2))


def halved(ctx, x):
    return x / 2


def test_sections_and_all_before_them_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = dask_p2p.spmd(halved, dask_p2p.transpose(x + 1), ranks=2)
    _, read = read_arrays(dask_p2p.transpose(y) + x)
    assert {x.name, y.name, (x + 1).name} <= names(read.dask_tasks)
    assert names(read.inputs) == {x.name, y.name}
    assert (dask_p2p.transpose(y) + x).name in names(read.nodes)


def test_shuffles_of_dask_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = x.rechunk((8, 2), method="p2p")
    graph = {k: t for layer in y.__dask_graph__().layers.values() for k, t in layer.items()}
    _, read = read_arrays(da.Array(graph, y.name, y.chunks, y.dtype) + 1)
    assert names(read.inputs) == {y.name}
    assert x.name in names(read.dask_tasks)


class Recorded(File):
    """A file that records which elements were read."""

    def __init__(self):
        self.read_indices = []

    def __getitem__(self, index):
        self.read_indices.append(index)
        return super().__getitem__(index)


def test_dask_reads_only_the_slices_that_ranks_need():
    file = Recorded()
    x = da.from_array(file, chunks=8, inline_array=True)
    y = x[2:4, 1:][:, :5] + 1
    read = {}
    for way in (y, dask_p2p.fused(y, ranks=1)):
        file.read_indices.clear()
        np.testing.assert_array_equal(way.compute(scheduler="sync"), np.full((2, 5), 2.0))
        read[way.name] = list(file.read_indices)
    assert [*read.values()] == [[(slice(2, 4), slice(1, 8))]] * 2
    z = x[2:4] + x.sum(axis=0)  # the block has another reader
    assert names(read_arrays(z)[1].inputs) == {x.name}
    z = dask_p2p.fused(z, ranks=1)
    file.read_indices.clear()
    assert z.compute(scheduler="sync").shape == (2, 8)
    assert len(file.read_indices) == 1


def test_tasks_that_the_scheduler_has_stay():
    x = da.ones((8, 8), chunks=4) + 1
    y = x * 2
    graph = y.__dask_graph__().to_dict()
    read = read_graph(graph, [keys_of(y)], known_keys={(x.name, 0, 0)})
    assert (x.name, 0, 0) in read.dask_tasks
    assert (x.name, 0, 1) in read.nodes
    assert read.inputs == ((x.name, 0, 0),)


def fused(key):
    """A task that Dask has fused from two, under a key."""
    first = Task(("a", 0), add, TaskRef(("x", 0)), 1)
    return Task.fuse(first, Task(("b", 0), neg, TaskRef(("a", 0))), key=key)


@pytest.mark.parametrize("key", [("b", 0), ("c", 0)])
def test_the_parts_take_the_place_of_a_fused_task(key):
    graph = {("x", 0): Task(("x", 0), int, 4), key: fused(key)}
    nodes = unfused(graph)
    assert {*nodes} == {("x", 0), ("a", 0), key}
    assert nodes["a", 0].func is add
    assert nodes[key].func is neg
    assert run_of(nodes, key) == run_of(graph, key) == -5


def test_a_part_with_the_key_of_another_task():
    """An alias of an expression's name for the fused task would be an alias of itself."""
    graph = {("x", 0): Task(("x", 0), int, 4), ("c", 0): fused(("c", 0))}
    for key in (("a", 0), ("b", 0)):
        named = {**graph, key: Alias(key, ("c", 0))}
        nodes = unfused(named)
        assert nodes[key] is named[key]
        assert run_of(nodes, key) == -5


def run_of(graph, key):
    return execute_graph(convert_legacy_graph(dict(graph)), keys=[key])[key]
