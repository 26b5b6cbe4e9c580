from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import SourceElements, blocks_of_layers, peak_bytes, sizes_of
from tests.fusing.support import read_arrays, smooth
from tests.support import tune


def read(n):
    return np.ones((n, n))


def of_blocks(x):
    """Sizes of the blocks of an array."""
    sizes = sizes_of(read_arrays(x)[1].tasks)
    return {sizes[key] for key in sizes if key[0] == x.name}


CREATED = {
    "ones": lambda: da.ones((64, 64), chunks=16),
    "full": lambda: da.full((64, 64), 3.0, chunks=16),
    "random": lambda: da.random.default_rng(0).random((64, 64), chunks=16),
    "old random": lambda: da.random.RandomState(0).normal(size=(64, 64), chunks=16),
    "memory": lambda: da.from_array(np.ones((64, 64)), chunks=16),
}


@pytest.mark.parametrize("kind", [*CREATED][:-1])
def test_created_blocks(kind):
    assert of_blocks(CREATED[kind]()) == {16 * 16 * 8}


def test_assembled_blocks():
    x = da.from_array(np.ones((64, 64), "f4"), chunks=(8, 64))
    assert of_blocks(dask_p2p.transpose(x)) == {64 * 8 * 4}
    assert of_blocks(dask_p2p.transpose(x) + 1) == {64 * 8 * 4}


def test_sizes_of_inputs():
    x = da.from_delayed(dask.delayed(read)(8), (8, 8), float)
    tasks = read_arrays(x + 1)[1].tasks
    (given,) = tasks.inputs
    assert sizes_of(tasks, {given: 512})[(x + 1).name, 0, 0] == 512
    assert (x + 1).name not in {key[0] for key in sizes_of(tasks)}, "the size is not known"


def declared_sizes(x):
    """Sizes of all values, by name of the array, as the arrays declare them."""
    tasks = read_arrays(x)[1].tasks
    found = {}
    for key, size in sizes_of(tasks, {}, blocks_of_layers(x.__dask_graph__().layers)).items():
        name = key[0] if isinstance(key, tuple) else key
        found.setdefault(name, set()).add(size)
    return found, tasks


def expanded(block):
    return np.repeat(block, 9, axis=0)


def vector():
    return da.random.default_rng(0).random(64, chunks=16)


#: Arrays whose blocks are larger than their inputs, or made without a shape: in items.
DECLARED = {
    "arange": (lambda: da.arange(64, chunks=16, dtype=float) + 1, 16),
    "outer difference": (lambda: vector()[:, None] - vector()[None, :], 16 * 16),
    "outer product": (lambda: da.outer(vector(), vector()), 16 * 16),
    "repeated": (
        lambda: vector().map_blocks(expanded, chunks=((144,) * 4,), dtype=float) + 1,
        9 * 16,
    ),
    "concatenated": (lambda: vector().rechunk(64, method="tasks") + 1, 64),
    "of functions": (lambda: da.from_delayed(dask.delayed(read)(8), (8, 8), float) + 1, 8 * 8),
    "of small items": (lambda: vector() > 0.5, 16 / 8),
    "reduced": (lambda: da.ones((64, 32), chunks=16).mean(axis=0, keepdims=True), 16),
}


@pytest.mark.parametrize("kind", DECLARED)
def test_declared_sizes(kind):
    made, items = DECLARED[kind]
    x = made()
    assert declared_sizes(x)[0][x.name] == {int(items * 8)}


def test_inputs_have_the_declared_sizes_of_blocks():
    x = da.from_delayed(dask.delayed(read)(8), (8, 8), float)
    found, tasks = declared_sizes(x + 1)
    (given,) = tasks.inputs
    assert found[given] == {8 * 8 * 8}
    x = da.map_blocks(read, 8, chunks=((8, 8), (8,)), dtype=float)
    assert declared_sizes(x + 1)[0][x.name] == {8 * 8 * 8}


def test_reductions_begin_with_small_blocks():
    """Dask declares these as if they were not reduced."""
    found, _ = declared_sizes(da.ones((64, 64), chunks=16).sum(axis=0))
    assert sorted(size for sizes in found.values() for size in sizes) == [128, 128, 2048]


def test_unknown_chunk_sizes():
    x = vector()
    found, _ = declared_sizes(x[x > 0.5] + 1)
    assert found[(x[x > 0.5] + 1).name] == {16 * 8}, "that of the largest input"


def test_values_of_fused_tasks_are_unknown():
    (x,) = dask.optimize((vector()[:, None] - vector()[None, :]).sum(axis=0).rechunk(64))
    found, _ = declared_sizes(x)
    assert x.name in found
    assert not any(name.startswith("sum-") for name in found), found


@pytest.mark.parametrize("size", [1, 3])
def test_the_peak_of_a_program(size):
    block_bytes = 16 * 64 * 8
    x = da.ones((64 * 8, 64), chunks=(16, 64))
    tasks = read_arrays((x + 1).sum())[1].tasks
    sizes = sizes_of(tasks)
    blocks = 32 if size == 1 else 11
    for program in programs_of(tasks, size, sizes):
        # Depth first: a block is reduced before the next one is made. The size of a sum is not
        # known, and so that of a block is assumed.
        assert 2 * block_bytes <= peak_bytes(program, sizes) <= (blocks + 4) * block_bytes


def test_the_peak_of_an_exchange():
    x = da.ones((64, 64), chunks=(8, 64))
    y = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=float)
    tasks = read_arrays(y)[1].tasks
    sizes = sizes_of(tasks)
    (program,) = programs_of(tasks, 1, sizes)
    assert peak_bytes(program, sizes) >= 8 * 8 * 64 * 8


@pytest.mark.parametrize(("lent_read_bytes", "copies"), [(2**20, 2), (1, 0)])
def test_regions_in_messages(monkeypatch, lent_read_bytes, copies):
    """One is sent and one is received, unless they are large enough to be read in place."""
    tune(monkeypatch, lent_read_bytes=lent_read_bytes, read_bytes=1)
    tasks = read_arrays(dask_p2p.transpose(da.ones((64, 64), chunks=(32, 64))))[1].tasks
    sizes, elements = sizes_of(tasks), SourceElements()
    for program in programs_of(tasks, 2, sizes):
        copies_bytes = peak_bytes(program, sizes, elements) - peak_bytes(program, sizes)
        assert copies_bytes == copies * 32 * 32 * 8


def test_reductions_are_smaller_than_their_inputs():
    x = da.ones((64, 64), chunks=16)
    sizes = sizes_of(read_arrays(x.sum(axis=0))[1].tasks)
    of_sums = [size for key, size in sizes.items() if "sum" in key[0]]
    assert max(of_sums) < 16 * 16 * 8 / 8


def test_elements_of_equal_plans_are_computed_once_and_each_plan_is_hashed_once():
    hashed, computed = [], []

    class Plan:
        def __eq__(self, other):
            return True

        def __hash__(self):
            hashed.append(self)
            return 1

        def source_elements(self, index):
            computed.append(index)
            return index

    plans, elements = [Plan(), Plan()], SourceElements()
    found = [elements.of(plan, index) for plan in plans for index in ((0,), (1,), (0,))]
    assert found == [(0,), (1,), (0,)] * 2
    assert (len(hashed), computed) == (2, [(0,), (1,)])
