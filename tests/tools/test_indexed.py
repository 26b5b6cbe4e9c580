from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p.cli.cluster import count_wrong, indexed_array, modulus

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4"]


def wrong_count(y, shape, axes=(1, 0), **kwargs):
    return int(count_wrong(y, shape, axes, **kwargs).compute(scheduler="sync"))


@pytest.mark.parametrize("dtype", [*DTYPES, "longdouble"])
def test_values(dtype):
    shape = (300, 7, 5)
    x = indexed_array(shape, ((100, 150, 50), 4, 5), dtype)
    actual = x.compute(scheduler="sync")
    linear = np.arange(np.prod(shape)).reshape(shape)
    assert actual.dtype == np.dtype(dtype) == x.dtype
    assert x.chunks == ((100, 150, 50), (4, 3), (5,))
    np.testing.assert_array_equal(actual, (linear % modulus(dtype)).astype(dtype))


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "V4"])
def test_dtypes_without_such_values(dtype):
    with pytest.raises(ValueError, match="expected a boolean, integer, float or complex dtype"):
        indexed_array((4, 4), 2, dtype).compute(scheduler="sync")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3), (3, 4, 5)])
def test_nothing_is_wrong(shape):
    axes = tuple(reversed(range(len(shape))))
    y = indexed_array(shape, 2 if shape else (), "f4").transpose(axes)
    assert wrong_count(y, shape, axes) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element(dtype):
    x = indexed_array((40, 30), (10, 30), dtype).compute(scheduler="sync")
    y = x.T.copy()
    y[17, 3] = not y[17, 3] if dtype == "?" else y[17, 3] + 1
    assert wrong_count(da.from_array(y, chunks=(10, 40)), (40, 30)) == 1


def test_another_dtype_or_shape():
    y = indexed_array((4, 6), (2, 6), "i4").T
    assert wrong_count(y, (4, 6), dtype="i4") == 0
    assert wrong_count(y, (4, 6), dtype="i8") == 24  # the values are equal
    for lie in (lambda block: block.astype("f8"), lambda block: block[:-1]):
        assert wrong_count(y.map_blocks(lie, dtype="i4", chunks=y.chunks), (4, 6)) == 24


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    y = indexed_array((64, 48), (16, 48), "f4", kind="cupy").T
    assert isinstance(y.blocks[0, 0].compute(scheduler="sync"), cupy.ndarray)
    assert wrong_count(y, (64, 48), kind="cupy") == 0
    assert wrong_count(y + 1, (64, 48), kind="cupy") == 64 * 48
