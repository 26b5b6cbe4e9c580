"""`transpose` as users call it, on the schedulers that need no cluster."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.plans.support import chunks_of
from tests.support import indexed, layers_of


def same(y, expected):
    """Equal in values, dtype and bits."""
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    result = y.compute(scheduler="synchronous")
    assert result.dtype == expected.dtype
    assert result.tobytes() == np.ascontiguousarray(expected).tobytes()
    return result


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    axes = draw(st.none() | st.permutations(range(len(shape))))
    order = tuple(reversed(range(len(shape)))) if axes is None else tuple(axes)
    src = tuple(chunks_of(draw, n, 3) for n in shape)
    dst = draw(st.none() | st.just(tuple(chunks_of(draw, shape[a], 3) for a in order)))
    return shape, src, axes, dst


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_equals_numpy_for_any_chunks(case):
    shape, src, axes, dst = case
    x = indexed(shape)
    y = dask_p2p.transpose(da.from_array(x, chunks=src), axes, chunks=dst)
    same(y, np.transpose(x, axes))
    if dst is not None:
        assert y.chunks == dst


DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "longdouble",
    ">i2", ">f4", ">f8", ">c16", "M8[ns]", "m8[s]", "S5", "U3", "V7",
    [("a", "i1"), ("b", "f8")], [("x", ">i4"), ("y", "S3")],
]  # fmt: skip


def values(dtype, shape):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        raw &= 1
    if dtype.kind == "U":
        return rng.integers(0, 999, shape).astype(dtype)
    return raw.view(dtype).reshape(shape)  # NaNs with odd payloads and all


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(dtype):
    x = values(dtype, (7, 10))
    same(dask_p2p.transpose(da.from_array(x, chunks=(3, 4))), x.T)


def test_object_dtype():
    x = np.array([[1, "two"], [None, (4,)], [5.0, b"6"]], dtype=object)
    y = dask_p2p.transpose(da.from_array(x, chunks=(1, 2)))
    assert y.dtype == object
    assert y.compute(scheduler="synchronous").tolist() == x.T.tolist()


@pytest.mark.parametrize("name", ["sum", "mean", "argmax", "any"])
def test_results_of_reductions(name):
    """Their only block is a scalar of NumPy, no array."""
    x = indexed((6, 4))
    y = dask_p2p.transpose(getattr(da.from_array(x, chunks=2), name)())
    same(y, np.asarray(getattr(x, name)()))
    moment = da.from_array(x.astype("M8[s]"), chunks=2).max()
    same(dask_p2p.transpose(moment), np.asarray(x.astype("M8[s]").max()))


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::-1, ::2], np.ascontiguousarray])
def test_blocks_of_any_memory_layout(make):
    x = make(indexed((8, 12)))
    x.flags.writeable = False
    same(dask_p2p.transpose(da.from_array(x, chunks=(3, 5))), x.T)


@pytest.mark.parametrize("axes", [(1, 0, 2), (-1, 0, 1), (np.int64(2), 1, 0)], ids=str)
def test_axes_one_by_one(axes):
    x = da.from_array(indexed((3, 4, 2)), chunks=2)
    one_by_one = dask_p2p.transpose(x, *axes, chunks=2)
    assert one_by_one.name == dask_p2p.transpose(x, axes, chunks=2).name
    same(one_by_one, indexed((3, 4, 2)).transpose(*axes))
    assert dask_p2p.transpose(x[0, 0], 0).shape == (2,)
    same(dask_p2p.transpose(x, np.array(axes)), indexed((3, 4, 2)).transpose(*axes))
    with pytest.raises(InputError, match=r"got axes=\(1, 0\)"):
        dask_p2p.transpose(x, 1, 0)


def test_lazy_and_one_task_an_output_block():
    def fail(block):
        raise AssertionError("computed")

    x = da.ones((8, 8), chunks=(2, 8)).map_blocks(fail, dtype=float, meta=np.ones((0, 0)))
    y = dask_p2p.transpose(x)
    layer = layers_of(y)[y.name]
    assert len(layer) == 4
    assert {len(task.dependencies) for task in layer.values()} == {4}


def test_name_is_deterministic_and_differs_where_it_must():
    x = da.ones((8, 8), chunks=(2, 8))
    assert dask_p2p.transpose(x).name == dask_p2p.transpose(x).name
    assert dask_p2p.transpose(x).name != dask_p2p.transpose(x, chunks=4).name
    assert dask_p2p.transpose(x).name != dask_p2p.transpose(x + 1).name


def test_a_slice_computes_only_the_blocks_it_needs():
    x = indexed((8, 8))
    y = dask_p2p.transpose(da.from_array(x, chunks=(2, 8)))[:2]
    (optimised,) = dask.optimize(y)
    assert sum("p2p-transpose" in str(key) for key in optimised.dask) == 1
    same(y, x.T[:2])


@pytest.mark.parametrize("meta", [None, np.ones((0, 0))], ids=["declared", "not declared"])
def test_masked_blocks_are_refused_by_name(meta):
    """At the call, or at the task that gets them."""
    x = da.ones((4, 4), chunks=(2, 4)).map_blocks(np.ma.masked_array, meta=meta)
    with pytest.raises(UnsupportedArrayError, match=r"(?i)masked"):
        dask_p2p.transpose(x).compute(scheduler="synchronous")


@pytest.mark.parametrize(
    ("real", "words"),
    [
        (lambda b: b[:1], r"float64 \(2, 4\).*float64 \(1, 4\)"),
        (lambda b: b.astype("f4"), r"float64 \(2, 4\).*float32 \(2, 4\)"),
        (lambda b: b.astype(">i8"), r"float64 \(2, 4\).*>i8 \(2, 4\)"),
        (lambda b: b[0], r"float64 \(2, 4\).*float64 \(4,\)"),
    ],
)
def test_blocks_that_are_not_as_declared(real, words):
    x = da.ones((4, 4), chunks=(2, 4)).map_blocks(real, meta=np.ones((0, 0)), chunks=((2, 2), (4,)))
    with pytest.raises(BlockMismatchError, match=words):
        dask_p2p.transpose(x).compute(scheduler="synchronous")


@pytest.mark.parametrize("dtype", [">i4", [("a", ">i2"), ("b", "<f8")]], ids=str)
def test_blocks_in_another_byte_order_than_declared_are_converted(dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    x = da.from_array(values, chunks=(2, 3)).map_blocks(to_native, dtype=values.dtype)
    for y, expected in (
        (dask_p2p.transpose(x), values.T),
        (dask_p2p.rechunk(x, (4, 1)), values),
        (dask_p2p.rechunk(x, ((2, 1, 1), (3, 3))), values),
        (dask_p2p.map_overlap(np.copy, x, depth=1, boundary="periodic"), values),
    ):
        result = y.compute(scheduler="synchronous")
        assert result.dtype == y.dtype == values.dtype
        assert result.tobytes() == expected.tobytes()


def to_native(block):
    return block.astype(block.dtype.newbyteorder("="))
