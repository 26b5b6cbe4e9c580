from __future__ import annotations

from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
from dask.array.utils import assert_eq
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import BlockMismatchError, ChunksError, InputError

X = np.random.default_rng(0).random((12, 10))
BOUNDARIES = ["none", "periodic", "reflect", "nearest", 7.5]


def star(block):
    """Five points, periodic within the block: what lies at its rims is wrong."""
    return (
        block
        + np.roll(block, 1, 0)
        + 2 * np.roll(block, -1, 0)
        + 3 * np.roll(block, 1, 1)
        + 4 * np.roll(block, -1, 1)
    )


@pytest.mark.parametrize(
    "boundary", [*BOUNDARIES, {0: "periodic", 1: "none"}, (3, "reflect")], ids=str
)
@pytest.mark.parametrize("depth", [1, 3, (1, 2), {0: 2}, {1: 4}, 0], ids=str)
def test_values_are_those_of_dask(boundary, depth):
    x = da.from_array(X, chunks=(6, 5))
    got = dask_p2p.map_overlap(star, x, depth, boundary)
    expected = da.map_overlap(star, x, depth=depth, boundary=boundary)
    assert got.chunks == expected.chunks == x.chunks
    np.testing.assert_array_equal(got.compute(scheduler="sync"), expected.compute(scheduler="sync"))
    got.dask.validate()


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))
    chunks = []
    for length in lengths:
        inner = draw(st.lists(st.integers(1, length), max_size=3))
        chunks.append(tuple(b - a for a, b in pairwise(sorted({0, length, *inner}))))
    depth = tuple(
        (draw(st.integers(0, min(length, 4))), draw(st.integers(0, min(length, 4))))
        for length in lengths
    )
    boundary = tuple(draw(st.sampled_from(BOUNDARIES)) for _ in lengths)
    return tuple(chunks), depth, boundary


@given(cases())
def test_any_widths_and_blocks(case):
    """Also of several blocks, and other before than after: more than Dask allows."""
    chunks, depth, boundary = case
    shape = tuple(map(sum, chunks))
    x = np.random.default_rng(1).random(shape)
    around = x
    modes = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}
    for axis, (widths, kind) in enumerate(zip(depth, boundary, strict=True)):
        wide = [widths if a == axis else (0, 0) for a in range(x.ndim)]
        if kind in modes:
            around = np.pad(around, wide, mode=modes[kind])
        else:
            constant = -1 if kind == "none" else kind  # below all values
            around = np.pad(around, wide, constant_values=constant)

    def windows(block):
        """The largest value of each window that fits into the block."""
        out = np.empty_like(block)
        for at in np.ndindex(block.shape):
            window = tuple(
                slice(max(0, i - before), i + after + 1)
                for i, (before, after) in zip(at, depth, strict=True)
            )
            out[at] = block[window].max()
        return out

    inner = tuple(
        slice(before, before + length) for (before, _), length in zip(depth, shape, strict=True)
    )
    got = dask_p2p.map_overlap(windows, da.from_array(x, chunks=chunks), depth, boundary)
    np.testing.assert_array_equal(got.compute(scheduler="sync"), windows(around)[inner])


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_a_function_that_trims_by_itself(boundary):
    def inner(block):
        """The difference of the two neighbours along the first axis, where there are two."""
        return block[2:] - block[:-2] if boundary != "none" else block[: min(6, len(block))]

    x = da.from_array(X, chunks=(6, 5))
    got = dask_p2p.map_overlap(inner, x, {0: 1}, boundary, trim=False)
    expected = da.map_overlap(inner, x, depth={0: 1}, boundary=boundary, trim=False)
    assert got.chunks == expected.chunks
    np.testing.assert_array_equal(got.compute(scheduler="sync"), expected.compute(scheduler="sync"))


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_without_corners_stars_have_the_same_values(boundary):
    x = da.from_array(X, chunks=(4, 3))
    lean = dask_p2p.map_overlap(star, x, 1, boundary, corners=False)
    whole = dask_p2p.map_overlap(star, x, 1, boundary)
    np.testing.assert_array_equal(lean.compute(scheduler="sync"), whole.compute(scheduler="sync"))
    edges = [len(task.dependencies) for task in lean.dask.layers[lean.name].values()]
    assert max(edges) == 5, "a block and its four neighbours"


def test_one_layer_of_one_task_a_block():
    x = da.from_array(X, chunks=(4, 5))
    y = dask_p2p.map_overlap(star, x, 1)
    assert set(y.dask.layers) - set(x.dask.layers) == {y.name}
    assert len(y.dask.layers[y.name]) == 6


def test_dtype_and_arguments():
    x = da.from_array(X, chunks=(4, 5))
    by_call = dask_p2p.map_overlap(lambda block, above: block > above, x, 1, above=0.5)
    assert by_call.dtype == bool
    assert_eq(by_call, X > 0.5, scheduler="sync")
    assert dask_p2p.map_overlap(np.round, x, 1, dtype="f4").dtype == "f4"
    assert dask_p2p.map_overlap(np.round, x, 1, meta=np.empty((0, 0), "f4")).dtype == "f4"
    calls = []
    dask_p2p.map_overlap(calls.append, x, 1, dtype="f4")
    assert calls == [], "what is known is not found out"
    empty = da.ones((0, 3), chunks=(1, 3))
    assert dask_p2p.map_overlap(np.negative, empty, 0).compute(scheduler="sync").shape == (0, 3)


@pytest.mark.parametrize(
    ("depth", "boundary"),
    [
        (-1, "none"),
        (1.5, "none"),
        ("wide", "none"),
        ((1, 2, 3), "none"),
        ({2: 1}, "none"),
        ({"rows": 1}, "none"),
        (((1, 2, 3), 0), "none"),
        (11, "none"),
        (1, "mirror"),
        (1, ("none",)),
        (1, {5: "none"}),
        (1, [["none"], "none"]),
    ],
    ids=str,
)
def test_wrong_input(depth, boundary):
    with pytest.raises(InputError, match=r"expected .* got "):
        dask_p2p.map_overlap(star, da.from_array(X, chunks=5), depth, boundary)


def test_what_is_no_function_or_of_unknown_size():
    x = da.from_array(X, chunks=5)
    with pytest.raises(InputError, match="expected a function"):
        dask_p2p.map_overlap("star", x, 1)
    with pytest.raises(ChunksError, match="known chunk sizes"):
        dask_p2p.map_overlap(star, x[x[:, 0] > 0.5], 1)


def test_a_function_that_changes_the_shape():
    y = dask_p2p.map_overlap(lambda b: b[1:], da.from_array(X, chunks=5), 1, dtype=X.dtype)
    with pytest.raises(
        BlockMismatchError, match=r"shape \(\d, 6\) from the function .* got \(\d, 6\)"
    ):
        y.compute(scheduler="sync")
