"""The accessor for CuPy blocks, by a CuPy that refuses conversions: values are those of NumPy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

from tests.ops.programs import scaled
from tests.xarray.programs import PROGRAMS, SECTIONS, VALUES, as_dataset, build, variables


@pytest.fixture
def arrays(strict_cupy):
    """The same array twice: in CuPy blocks, and in NumPy's."""

    def lazy(values):
        return da.from_array(values, chunks=(6, -1)[: values.ndim])

    return build(lambda values: lazy(values).map_blocks(strict_cupy.asarray)), build(lazy)


@pytest.fixture
def in_memory(strict_cupy):
    """The same array twice, in memory, of CuPy and of NumPy."""
    return build(strict_cupy.asarray), build(np.asarray)


def check(result, expected, cupy):
    """Compare a result of CuPy blocks with one of NumPy blocks."""
    assert result.coords.keys() == expected.coords.keys()
    results, expected_variables = variables(result), variables(expected)
    assert results.keys() == expected_variables.keys()
    for name, variable in results.items():
        check_variable(variable, expected_variables[name], cupy)


def check_variable(variable, reference, cupy):
    assert isinstance(getattr(variable.data, "_meta", variable.data), cupy.ndarray)
    assert (variable.dims, variable.chunks) == (reference.dims, reference.chunks)
    with dask.config.set(scheduler="sync"):
        values, expected = variable.compute().data, reference.compute().data
    assert isinstance(values, cupy.ndarray)
    assert values.dtype == variable.dtype == reference.dtype
    tolerance = 1000 * np.finfo(values.dtype).eps
    np.testing.assert_allclose(values.get(), expected, 0, tolerance * abs(expected).max())


def on_host(values):
    return values.get() if hasattr(values, "get") else values


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_numpy(name, arrays, strict_cupy):
    check(*map(PROGRAMS[name], arrays), strict_cupy)


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_in_memory(name, in_memory, strict_cupy):
    check(*map(PROGRAMS[name], in_memory), strict_cupy)


@pytest.mark.parametrize("name", SECTIONS)
def test_results_of_sections_have_the_kind_of_the_fields(name, arrays, strict_cupy):
    for variable in variables(SECTIONS[name](arrays[0])).values():
        assert isinstance(variable.data._meta, strict_cupy.ndarray)


def test_a_number_in_gpu_memory_is_a_constant(arrays, strict_cupy):
    a = arrays[0].assign_coords(number=strict_cupy.asarray(3.0))
    result = a.p2p.iterate(scaled, {"t": 1}, 2, constants=("number",))
    assert isinstance(result.data._meta, strict_cupy.ndarray)


def test_coordinates_in_gpu_memory(strict_cupy):
    """These have no index: an index holds its values in host memory."""

    def with_times(values, times):
        coords = xr.Coordinates({"t": ("t", times)}, indexes={})
        return xr.DataArray(values, coords, ("t", "x"))

    times = np.arange(24.0)[::-1] / 2
    a = with_times(strict_cupy.asarray(VALUES), strict_cupy.asarray(times))
    b = with_times(VALUES, times)
    for program in (lambda a: a.p2p.fft("t"), lambda a: a.p2p.fft("t").p2p.ifft()):
        result, expected = program(a), program(b)
        check(result, expected, strict_cupy)
        for name in expected.coords:
            np.testing.assert_array_equal(on_host(result[name].data), on_host(expected[name].data))


@pytest.mark.parametrize("lazy", [True, False])
def test_to_zarr(lazy, arrays, in_memory, tmp_path):
    pytest.importorskip("zarr")
    a, host_array = arrays if lazy else in_memory
    with dask.config.set(scheduler="sync"):
        a.p2p.to_zarr(tmp_path / "array", chunks={"t": 5}, consolidated=False)
        as_dataset(a).p2p.to_zarr(tmp_path / "dataset", consolidated=False)
    with xr.open_zarr(tmp_path / "array", consolidated=False) as stored:
        xr.testing.assert_equal(stored.u.compute(), host_array.compute())
        assert stored.u.chunks[0] == (5, 5, 5, 5, 4)
    with xr.open_zarr(tmp_path / "dataset", consolidated=False) as stored:
        xr.testing.assert_equal(stored.compute(), as_dataset(host_array).compute())


def test_arrays_of_cupy_xarray(strict_cupy):
    pytest.importorskip("cupy_xarray", reason="needs it: pip install cupy-xarray")
    a = build(lambda values: values).chunk(t=6).as_cupy()
    assert a.cupy.is_cupy
    turned = a.p2p.transpose("x", "t").p2p.fft("t")
    assert turned.cupy.is_cupy
    with dask.config.set(scheduler="sync"):
        result = turned.cupy.as_numpy().compute()
    expected = build(lambda values: values).p2p.transpose("x", "t").p2p.fft("t")
    np.testing.assert_allclose(result.data, expected.compute().data)
