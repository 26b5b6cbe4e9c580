"""Operations of Dask's own, in programs of several ranks."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p
from tests.fusing.support import check_blocks, integers, run_programs

N = 24


def position(block, block_info=None, block_id=None):
    """Return a block with its place in the array added."""
    start = block_info[0]["array-location"][0][0]
    return block + start + 100 * block_id[1]


def stars(x):
    """Overlaps without corners, of dtypes whose unread value is no float."""
    neighbours = []
    for dtype in ("i4", "?", "M8[s]"):
        whole_numbers = x.astype("i4").astype(dtype)
        neighbours.append(
            dask_p2p.map_overlap(
                np.copy, whole_numbers, depth=1, boundary="periodic", corners=False, dtype=dtype
            ).astype(float)
        )
    return da.stack(neighbours)


def assigned(x):
    y = x.copy()
    y[3:9, ::2] = 7
    y[x > 1] = -1
    return y


def by_xarray(x):
    a = xr.DataArray(x, dims=("time", "place"), coords={"time": np.arange(N) % 4})
    means = a.groupby("time").mean()
    return (a.groupby("time") - means).rolling(place=3).mean().data


OPERATIONS = {
    "stars": stars,
    "matrix product": lambda x: integers(x) @ integers(x).T,
    "einsum": lambda x: da.einsum("ij,jk->ik", integers(x), integers(x).T),
    "qr": lambda x: da.linalg.qr(x.rechunk((6, -1)))[1],
    "cholesky": lambda x: da.linalg.cholesky((x @ x.T + N * da.eye(N, chunks=8)).rechunk((8, 8))),
    "histogram": lambda x: da.histogram(x, bins=5, range=(-3, 3))[0],
    "median": lambda x: da.median(x, axis=0),
    "unique": lambda x: da.unique((x * 2).round().astype(int)),
    "standard deviation": lambda x: x.std(axis=0, keepdims=True) + x.var(),
    "cumulative sum by trees": lambda x: da.cumsum(x, axis=0, method="blelloch"),
    "reshape": lambda x: x.reshape(4, -1, N),
    "pad": lambda x: da.pad(x, 2, mode="reflect"),
    "block": lambda x: da.block([[x, x + 1], [x * 2, x]]),
    "stack": lambda x: da.stack([x, x.T], axis=1),
    "take": lambda x: x[[5, 1, 20, 1]][:, [0, 3]],
    "vectorized index": lambda x: x.vindex[[1, 9, 20], [3, 3, 0]],
    "mask": lambda x: x[x > 0],
    "masked rows": lambda x: x[x[:, 0] > 0].sum(axis=0),
    "assignment": assigned,
    "gradient": lambda x: da.gradient(x, axis=0),
    "apply along an axis": lambda x: da.apply_along_axis(np.sort, 0, x),
    "searchsorted": lambda x: da.searchsorted(da.linspace(-2, 2, 9, chunks=4), x[0]),
    "blocks with their place": lambda x: x.map_blocks(position, dtype=float),
    "overlap of Dask": lambda x: x.map_overlap(np.sort, depth=2, boundary="reflect", dtype=float),
    "sliding windows": lambda x: da.lib.stride_tricks.sliding_window_view(x, 3, axis=0).mean(-1),
    "fft": lambda x: da.fft.fft2(x.rechunk(-1)),
    "real part": lambda x: (x * 1j).conj().imag,
    "structures": lambda x: x.astype([("a", "f8"), ("b", "i4")])["b"],
    "text": lambda x: x.round(2).astype("U8"),
    "a delayed number": lambda x: x + da.from_delayed(dask.delayed(float)(3), (), float),
    "random numbers": lambda x: x + da.random.default_rng(3).normal(size=(N, N), chunks=8),
    "xarray": by_xarray,
    "tokens of one name": lambda x: da.concatenate([x[:3], x[3:]]) - x,
}

BY_BLAS = ("qr", "cholesky")  # the order of additions depends on addresses


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_dask(name, size):
    values = np.random.default_rng(0).normal(size=(N, N))
    x = da.from_array(values, chunks=(5, 9)) * 1.0
    result = OPERATIONS[name](x)
    arrays = [result, result + 1] if result.dtype.kind in "if" else [result]
    check_blocks(arrays, run_programs(arrays, size), atol=1e-9 if name in BY_BLAS else 0.0)
