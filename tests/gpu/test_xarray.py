"""The accessor for CuPy blocks, in arrays of both libraries: the values are those of NumPy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from tests.gpu.support import on_host
from tests.gpu.test_fft import declared
from tests.support import persisted

xr = pytest.importorskip("xarray")
from tests.xarray.programs import (  # noqa: E402
    PROGRAMS,
    SECTIONS,
    VALUES,
    as_dataset,
    build,
    variables,
)

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(params=["dask.array", "dask_array"])
def library(request):
    """A library of lazy arrays, which xarray uses too."""
    from xarray.namedarray.parallelcompat import list_chunkmanagers

    if request.param == "dask.array":
        yield da
        return
    package = request.getfixturevalue("dask_array")
    import dask_array.xarray

    managers = list_chunkmanagers()
    before = managers["dask"]
    dask_array.xarray.register()
    yield package
    managers["dask"] = before


@pytest.fixture
def arrays(client, library):
    """The same array twice: in CuPy blocks, and in NumPy's."""
    import cupy

    def lazy(values):
        return library.from_array(values, chunks=(6, -1)[: values.ndim])

    on_gpu = build(lambda values: persisted(client, lazy(values).map_blocks(cupy.asarray)))
    return on_gpu, build(lazy)


def check(actual, reference):
    import cupy

    actual, reference = variables(actual.persist()), variables(reference)
    assert actual.keys() == reference.keys()
    for name, variable in actual.items():
        expected_variable = reference[name]
        assert isinstance(variable.data._meta, cupy.ndarray), name
        assert declared(variable.data), name
        assert (variable.dims, variable.chunks) == (
            expected_variable.dims,
            expected_variable.chunks,
        )
        assert variable.dtype == expected_variable.dtype
        expected = expected_variable.compute().data
        bound = 1000 * np.finfo(variable.dtype).eps * abs(expected).max()
        np.testing.assert_allclose(on_host(variable.data), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", [*PROGRAMS, *SECTIONS])
def test_values_are_those_of_numpy(name, client, arrays):
    program = {**PROGRAMS, **SECTIONS}[name]
    actual, expected = map(program, arrays)
    check(actual, expected)


CHUNKS = {
    "chunk": lambda a: a.chunk(t=-1, x=2),
    "transpose and chunk": lambda a: a.transpose("x", "t").chunk(x=2, t=-1),
}


@pytest.mark.parametrize("library", ["dask.array"], indirect=True)
@pytest.mark.parametrize("name", CHUNKS)
def test_chunk_of_xarray(name, client, arrays):
    expected = CHUNKS[name](arrays[1]).persist()
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install() as installation:
        actual = CHUNKS[name](arrays[0]).persist()
    assert installation.count
    check(actual, expected)


def test_arrays_in_memory(client):
    cupy = pytest.importorskip("cupy")
    a, expected = build(cupy.asarray), build(np.asarray)
    check(a.p2p.fft("t").chunk(), expected.p2p.fft("t").chunk())
    turned = a.p2p.transpose("x", "t")
    assert isinstance(turned.data, cupy.ndarray)
    np.testing.assert_array_equal(turned.data.get(), VALUES.T)


def test_to_zarr(client, arrays, tmp_path):
    pytest.importorskip("zarr")
    a, expected = map(as_dataset, arrays)
    a.p2p.transpose("x", "t").p2p.to_zarr(tmp_path / "a", chunks={"x": 7}, consolidated=False)
    with xr.open_zarr(tmp_path / "a", consolidated=False) as stored:
        xr.testing.assert_allclose(stored.compute(), expected.transpose("x", "t").compute())
        assert stored.u.chunks[0] == (7, 7, 6)


def test_arrays_of_cupy_xarray(client):
    pytest.importorskip("cupy_xarray")
    a = build(lambda values: da.from_array(values, chunks=(6, -1)[: values.ndim])).as_cupy()
    assert a.cupy.is_cupy
    turned = a.p2p.transpose("x", "t").p2p.fft("t").persist()
    assert turned.cupy.is_cupy
    actual = turned.cupy.as_numpy().compute()
    expected = build(np.asarray).p2p.transpose("x", "t").p2p.fft("t")
    np.testing.assert_allclose(actual.data, expected.compute().data, rtol=1e-9, atol=1e-9)
