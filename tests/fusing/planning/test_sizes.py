from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import Declared, blocks_of_expression, peak_bytes
from tests.fusing.support import tasks_and_sizes
from tests.support import tune


def read(n):
    return np.ones((n, n))


def of_blocks(x):
    """Sizes of the blocks of an array."""
    _, sizes = tasks_and_sizes(x)
    return {sizes[key] for key in sizes if key[0] == x.name}


def test_assembled_blocks():
    x = da.from_array(np.ones((64, 64), "f4"), chunks=(8, 64))
    assert of_blocks(dask_p2p.transpose(x)) == {64 * 8 * 4}
    assert of_blocks(dask_p2p.transpose(x) + 1) == {64 * 8 * 4}


def declared_sizes(x):
    """Sizes of all values, by name of the array, as the arrays declare them."""
    tasks, sizes_by_key = tasks_and_sizes(x)
    sizes = {}
    for key, size in sizes_by_key.items():
        name = key[0] if isinstance(key, tuple) else key
        sizes.setdefault(name, set()).add(size)
    return sizes, tasks


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
    expected_bytes, items = DECLARED[kind]
    x = expected_bytes()
    assert declared_sizes(x)[0][x.name] == {int(items * 8)}


def test_unknown_chunk_sizes():
    x = vector()
    sizes, _ = declared_sizes(x[x > 0.5] + 1)
    assert sizes[(x[x > 0.5] + 1).name] == {16 * 8}, "that of the largest input"


@pytest.mark.parametrize("shape", [(64,), (64, 32)])
def test_first_parts_of_cumulative_operations(shape):
    """Dask makes them from their shape alone."""
    tasks, sizes = tasks_and_sizes(da.ones(shape, chunks=16).cumsum(axis=0))
    assert max(sizes[key] for key in tasks.nodes if key[1] == "extra") == 8 * 16 ** len(shape)


@pytest.mark.parametrize(("lent_read_bytes", "copies"), [(2**20, 2), (1, 0)])
def test_regions_in_messages(monkeypatch, lent_read_bytes, copies):
    """One is sent and one is received, unless they are large enough to be read in place."""
    tune(monkeypatch, lent_read_bytes=lent_read_bytes, read_bytes=1)
    tasks, sizes = tasks_and_sizes(dask_p2p.transpose(da.ones((64, 64), chunks=(32, 64))))
    for program in programs_of(tasks, 2, sizes):
        with_messages = peak_bytes(program, sizes, with_messages=True)
        copies_bytes = with_messages - peak_bytes(program, sizes)
        assert copies_bytes == copies * 32 * 32 * 8


@pytest.mark.parametrize("merges", [False, True])
def test_blocks_of_expressions(dask_array, merges):
    """Merged operations have parts."""
    x = dask_array.ones((6, 4), chunks=(2, 4), dtype="f4")
    y = (x[:, None] - x[None]) * 2
    names = {expr._name: expr for expr in y.expr.optimize(fuse=False).walk()}
    blocks = blocks_of_expression(y.expr.optimize(fuse=merges))
    assert {name for name, expr in names.items() if hasattr(expr, "chunks")} <= {*blocks}
    assert Declared(((2,) * 3, (2,) * 3, (4,)), np.dtype("f4")) in blocks.values()
