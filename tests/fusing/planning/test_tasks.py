from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask.graph_manipulation import clone

import dask_p2p
from dask_p2p.fusing.planning.tasks import keys_of, read_graph
from tests.fusing.support import check_blocks, read_arrays, run_programs


class File:
    """An array in a file, as Dask sees it."""

    shape, dtype, ndim = (8, 8), np.dtype(float), 2

    def __getitem__(self, index):
        return np.ones(self.shape)[index]


def zeros(block_info=None):
    return np.zeros(block_info[None]["chunk-shape"])


def made(n):
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
    "a delayed function": lambda: da.from_delayed(dask.delayed(made)(8), (8, 8), float),
}


@pytest.mark.parametrize("kind", IN_RANKS)
def test_arrays_of_few_numbers_are_made_by_ranks(kind):
    _, read = read_arrays(IN_RANKS[kind]() + 1)
    assert not read.kept
    assert not read.tasks.inputs


@pytest.mark.parametrize("kind", WITH_DASK)
def test_reads_and_unknown_functions_stay_with_dask(kind):
    x = WITH_DASK[kind]()
    y = dask_p2p.transpose(x + 1)
    _, read = read_arrays(y)
    assert names(read.tasks.inputs) == {x.name} or kind == "a delayed function"
    assert names(read.tasks.nodes) >= {(x + 1).name, y.name}
    assert not read.kept.keys() & read.tasks.nodes.keys()
    assert read.kept.keys() >= set(read.tasks.inputs)


def test_a_memory_map_stays_with_dask(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((8, 8)))
    x = da.from_array(np.load(tmp_path / "x.npy", mmap_mode="r"), chunks=4)
    assert names(read_arrays(x + 1)[1].tasks.inputs) == {x.name}


def test_each_task_comes_after_those_that_it_reads():
    x = da.ones((8, 8), chunks=2)
    y = dask_p2p.transpose(x).cumsum(axis=0) - x.sum()
    _, read = read_arrays(y, x + y)
    seen = set()
    for key in read.tasks.nodes:
        assert set(read.tasks.reads[key]) <= seen
        seen.add(key)


def test_only_tasks_that_outputs_need():
    x = da.ones((8, 8), chunks=2)
    _, read = read_arrays((x + 1)[:2])
    assert sum(key[0] == (x + 1).name for key in read.tasks.nodes) == 4


def test_tasks_of_older_graphs():
    graph = {("x", 0): (np.ones, 4), ("y", 0): (np.add, ("x", 0), 1), ("z", 0): ("y", 0)}
    z = da.Array(graph, "z", ((4,),), dtype=float)
    _, read = read_arrays(z * 2)
    assert names(read.tasks.nodes) == {"x", "y", "z", (z * 2).name}


def test_copies_of_tasks_have_keys_of_their_own():
    """Dask copies aliases under other keys than their own."""
    x = da.from_array(np.arange(4), chunks=-1).rechunk(2) * 2
    y = clone(x)
    arrays = [y == x]
    read = read_arrays(*arrays)[1].tasks
    assert all(node.key == key for key, node in read.nodes.items())
    check_blocks(arrays, run_programs(arrays, 2))


def test_futures(client):
    x = client.persist(da.ones((8, 8), chunks=4))
    scaled = x.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    y = x + scaled
    graph, read = read_arrays(y)
    assert names(read.tasks.inputs) == {x.name, scaled.name}
    assert names(read.tasks.nodes) == {y.name}
    assert all(read.kept[key] is graph[key] for key in read.tasks.inputs)


def halved(ctx, x):
    return x / 2


def test_sections_and_all_before_them_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = dask_p2p.spmd(halved, dask_p2p.transpose(x + 1), ranks=2)
    _, read = read_arrays(dask_p2p.transpose(y) + x)
    assert {x.name, y.name, (x + 1).name} <= names(read.kept)
    assert names(read.tasks.inputs) == {x.name, y.name}
    assert (dask_p2p.transpose(y) + x).name in names(read.tasks.nodes)


def test_shuffles_of_dask_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = x.rechunk((8, 2), method="p2p")
    graph = {k: t for layer in y.__dask_graph__().layers.values() for k, t in layer.items()}
    _, read = read_arrays(da.Array(graph, y.name, y.chunks, y.dtype) + 1)
    assert names(read.tasks.inputs) == {y.name}
    assert x.name in names(read.kept)


class Recorded(File):
    """A file that records which elements were read."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def test_dask_reads_only_the_slices_that_ranks_need():
    file = Recorded()
    x = da.from_array(file, chunks=8, inline_array=True)
    y = x[2:4, 1:][:, :5] + 1
    read = {}
    for way in (y, dask_p2p.fused(y, ranks=1)):
        file.seen.clear()
        np.testing.assert_array_equal(way.compute(scheduler="sync"), np.full((2, 5), 2.0))
        read[way.name] = list(file.seen)
    assert [*read.values()] == [[(slice(2, 4), slice(1, 8))]] * 2
    z = dask_p2p.fused(x[2:4] + x.sum(axis=0), ranks=1)  # the block has another reader
    file.seen.clear()
    assert z.compute(scheduler="sync").shape == (2, 8)
    assert len(file.seen) == 1


def test_tasks_that_the_scheduler_has_stay():
    x = da.ones((8, 8), chunks=4) + 1
    y = x * 2
    graph = y.__dask_graph__().to_dict()
    read = read_graph(graph, [keys_of(y)], known={(x.name, 0, 0)})
    assert (x.name, 0, 0) in read.kept
    assert (x.name, 0, 1) in read.tasks.nodes
    assert read.tasks.inputs == ((x.name, 0, 0),)
