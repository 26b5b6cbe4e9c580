from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from tests.fusing.support import read_arrays


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


def test_futures(client):
    x = client.persist(da.ones((8, 8), chunks=4))
    scaled = x.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    y = x + scaled
    graph, read = read_arrays(y)
    assert names(read.tasks.inputs) == {x.name, scaled.name}
    assert names(read.tasks.nodes) == {y.name}
    assert all(read.kept[key] is graph[key] for key in read.tasks.inputs)
