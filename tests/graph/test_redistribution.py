from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

import dask_p2p

VALUES = np.arange(64 * 48.0).reshape(64, 48)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x + 1], ids=["array", "lazy"])
def test_a_transpose_before_an_exchange_is_part_of_it(change):
    x, expected = change(da.from_array(VALUES, chunks=(8, -1))), change(VALUES).T
    results = {
        "T": dask_p2p.rechunk(x.T, (6, -1)),
        "axes": dask_p2p.rechunk(x.transpose(1, 0), (20, 20)),
        "function": dask_p2p.rechunk(da.moveaxis(x, 0, 1), (6, -1)),
        "twice": dask_p2p.rechunk(x.T.T.T, (6, -1)),
        "two axes": dask_p2p.rechunk(x.swapaxes(0, -1), (6, -1)),
    }
    for name, y in results.items():
        assert y.name.startswith("p2p-transpose-"), name
        assert len(y.dask.layers) == len(x.dask.layers) + 1, name
        np.testing.assert_array_equal(y.compute(scheduler="sync"), expected, name)
    assert dask_p2p.transpose(x.T, chunks=x.chunks).name == x.name, "nothing is left to do"
    total = dask_p2p.rechunk(x.T, (6, -1)) + x.T  # also other arrays that have the transpose
    np.testing.assert_array_equal(total.compute(scheduler="sync"), 2 * expected)
