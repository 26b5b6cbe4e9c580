"""Operations on CuPy blocks, by a CuPy that refuses conversions: the values are those of NumPy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import meta_from_array

import dask_p2p
from tests.ops.programs import INSTALLED, PROGRAMS, SECTIONS, VALUES


@pytest.fixture(params=["dask.array", "dask_array"])
def library(request):
    return da if request.param == "dask.array" else request.getfixturevalue("dask_array")


@pytest.fixture
def arrays(library, strict_cupy):
    """The same array twice: in CuPy blocks, and in NumPy's."""
    x = library.from_array(VALUES, chunks=(6, -1))
    return x.map_blocks(strict_cupy.asarray), x


def check(y, host_array, cupy):
    """Compare an array of CuPy blocks with one of NumPy blocks."""
    with dask.config.set(scheduler="sync"):
        result, expected = y.compute(), host_array.compute()
    assert isinstance(meta_from_array(y), cupy.ndarray)
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == y.dtype == host_array.dtype
    assert y.chunks == host_array.chunks
    np.testing.assert_allclose(result.get(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_numpy(name, arrays, strict_cupy):
    y, host_array = map(PROGRAMS[name], arrays)
    check(y, host_array, strict_cupy)


@pytest.mark.parametrize("name", SECTIONS)
def test_results_of_sections_are_of_cupy(name, arrays, strict_cupy):
    y, host_array = map(SECTIONS[name], arrays)
    assert isinstance(y._meta, strict_cupy.ndarray)
    assert (y.dtype, y.chunks) == (host_array.dtype, host_array.chunks)


@pytest.mark.parametrize("library", ["dask.array"], indirect=True)
@pytest.mark.parametrize("name", INSTALLED)
def test_the_methods_of_dask(name, arrays, strict_cupy):
    x, on_host = arrays
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install() as used:
        y = INSTALLED[name](x).persist(scheduler="sync")
    assert used.count == 1
    check(y, INSTALLED[name](on_host), strict_cupy)
