"""Arrays and views that every kernel is tried with."""

from contextlib import suppress

import numpy as np
from hypothesis import strategies as st

cupy = None  # where tests marked `gpu` are collected, but do not run
with suppress(ImportError):
    import cupy as cupy

POISON = 0xA5

DTYPES = [
    np.dtype(name)
    for name in (
        "?", "i1", "u1", "i2", ">i2", "f2", "i4", "f4", ">f4", "i8", "f8", ">f8", "c8", "c16",
        "datetime64[ns]", "timedelta64[s]", "S3", "U2", "V5",
    )
] + [
    np.dtype([("a", "i1"), ("b", ">f4")]),
    np.dtype([("a", "i2"), ("b", "f8", (2, 3))], align=True),
]  # fmt: skip


def random_bits(shape, dtype, seed=0) -> np.ndarray:
    """Random bits: NaNs with payloads, signed zeros and all."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=int))
    if dtype.kind == "O":
        items = np.empty(size, object)
        items[:] = [object() for _ in range(size)]
        return items.reshape(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, size, "u1").view(dtype).reshape(shape)
    if dtype.kind == "U":  # random bits are no code points
        return rng.integers(1, 0x3000, (size, dtype.itemsize // 4), "u4").view(dtype).reshape(shape)
    return rng.integers(0, 256, size * dtype.itemsize, "u1").view(dtype).reshape(shape)


def bits(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@st.composite
def permutations(draw, max_side=6, max_ndim=5, min_side=0):
    """A shape and a permutation of its axes."""
    shape = draw(st.lists(st.integers(min_side, max_side), max_size=max_ndim))
    return tuple(shape), tuple(draw(st.permutations(range(len(shape)))))


@st.composite
def boxes(draw, shape, max_margin=3):
    """A block's shape, and the slices that cut a region of `shape` out of it, steps and all."""
    outer, slices = [], []
    for extent in shape:
        before, after = draw(st.integers(0, max_margin)), draw(st.integers(0, max_margin))
        step = draw(st.sampled_from([1, 1, 1, 2, -1, -2]))
        span = max(0, (extent - 1) * abs(step) + 1) if extent else 0
        outer.append(before + span + after)
        if extent == 0:
            slices.append(slice(before, before))
        elif step > 0:
            slices.append(slice(before, before + span, step))
        else:
            stop = before - 1
            slices.append(slice(before + span - 1, None if stop < 0 else stop, step))
    return tuple(outer), tuple(slices)


def mixed_sum(data):
    """Return the checksum of a GPU's bytes, by its definition."""
    words = np.zeros(-(-data.size // 8), "<u8")
    words.view("u1")[: data.size] = data
    words += np.arange(1, words.size + 1, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
    return int((words ^ words >> np.uint64(31)).sum(dtype="u8"))
