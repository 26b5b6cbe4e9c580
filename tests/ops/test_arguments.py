from __future__ import annotations

import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest

import dask_p2p
from dask_p2p.backends.cupy import CUPY
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.ops import arguments
from dask_p2p.ops.arguments import check_array


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, -3), (0, 1, 2), ("a", 0), 5, (0.5, 1)])
def test_wrong_axes(axes):
    with pytest.raises(InputError, match=r"expected a permutation of the 2 axes.*got axes="):
        dask_p2p.transpose(da.ones((2, 3)), axes)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (((1, 1), (9,)), "do not add up"),
        (((2, 2), (-1, 3)), "do not add up"),
        (((4, -1), (2,)), "must not be negative"),
        (((1.5, 1.5), (2,)), "differ from the shape"),
        ((3,), "same length"),
        ({5: 1}, "5 is not an axis"),
        ({"x": 3}, "'x' is not an axis: axes are numbered from 0 to 1"),
        ("enormous", "Could not interpret 'enormous'"),
        (0, "0 is not a valid size"),
        ((0, 3), "0 is not a valid size"),
        ({1: 0}, "0 is not a valid size"),
        ((-2, 3), "-2 is not a valid size: pass 1 or more, or -1 for all"),
        (2.5, "only contain integers"),
        (object(), "no len"),
        ({0: object()}, "unsupported operand"),
        (b"12", "byte"),
        ((float("nan"), 2), "unknown"),
        (10**30, ""),
        (print, ""),
    ],
)
def test_wrong_chunks(chunks, reason):
    with pytest.raises(InputError) as caught:
        dask_p2p.transpose(da.ones((2, 3)), chunks=chunks)
    message = str(caught.value)
    assert (
        "expected chunks for an array of shape (3, 2), as dask.array.rechunk takes them" in message
    )
    assert f"got chunks={chunks!r}: " in message
    assert reason in message


@pytest.mark.parametrize("chunks", [0, (0, 2), {0: 0}, -1])
def test_an_axis_without_elements_may_have_blocks_of_none(chunks):
    shape = (0, 0) if chunks == 0 else (3, 0)
    assert dask_p2p.transpose(da.ones(shape), chunks=chunks).shape == shape[::-1]


def test_unknown_chunks():
    x = da.ones((8, 3), chunks=(2, 3))
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        dask_p2p.transpose(x[x[:, 0] > 0])


def stranger(module, *names):
    """An object of a class of another package, and of the classes that it inherits from."""
    kind = object
    for name in reversed(names):
        kind = type(
            name, (kind,), {"__module__": module, "__dask_graph__": dict, "chunks": ((1,),)}
        )
    return kind()


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        (np.ones((2, 2)), "from_array(x, chunks=...)"),
        ([[1]], "from_array(x, chunks=...)"),
        (None, "from_array(x, chunks=...)"),
        (dask.delayed(np.ones)(3), "from_delayed(x, shape=..., dtype=...)"),
        (dask.delayed(np.ones(3)), "from_delayed(x, shape=..., dtype=...)"),
        (dask.bag.from_sequence([1, 2]), "from_delayed of each of x.to_delayed()"),
        (dask.bag.from_sequence([1, 2]).sum(), "from_delayed(x.to_delayed(), "),
        (stranger("xarray.core.dataarray", "DataArray"), "Pass x.data"),
        (stranger("xarray.core.dataset", "Dataset"), "x[name].data"),
        (stranger("pint", "Quantity"), "Pass x.magnitude"),
        (
            stranger("dask.dataframe.dask_expr._collection", "Series", "FrameBase"),
            "x.to_dask_array(lengths=True)",
        ),
    ],
)
@pytest.mark.parametrize("operation", [dask_p2p.transpose, dask_p2p.estimate])
def test_what_is_no_dask_array(x, remedy, operation):
    with pytest.raises(UnsupportedArrayError) as caught:
        operation(x)
    kind = type(x)
    assert f"expected a Dask array, got {kind.__module__}.{kind.__qualname__}." in str(caught.value)
    assert remedy in str(caught.value)


def test_objects_on_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(arguments, "backend_for", lambda meta: CUPY)
    x = da.from_array(np.array([None, 1], dtype=object), chunks=1)
    with pytest.raises(UnsupportedArrayError, match="expected a dtype that GPU memory can hold"):
        check_array(x)


class Sparse:
    """What Dask takes for an array."""

    dtype, ndim, shape = np.dtype("f8"), 1, (0,)

    def __array_function__(self, *args):
        return self

    def __getitem__(self, place):
        return self


def test_a_sparse_meta_is_refused():
    x = da.ones(2, chunks=2).map_blocks(lambda block: block, dtype="f8", meta=Sparse())
    with pytest.raises(UnsupportedArrayError, match="Sparse"):
        check_array(x)
