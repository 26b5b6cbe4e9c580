"""All operations on CuPy blocks, in arrays of both libraries: the values are those of NumPy."""

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import estimate, fft
from tests.backends.support import cupy
from tests.gpu.support import on_host
from tests.gpu.test_operations import declared
from tests.ops.programs import PROGRAMS, SECTIONS, VALUES
from tests.support import persisted, used

pytestmark = pytest.mark.gpu(2)


@pytest.fixture
def x(library, client):
    return persisted(client, in_blocks(library).map_blocks(cupy.asarray))


def in_blocks(library):
    return library.from_array(VALUES, chunks=(6, -1))


def check(client, y, expected):
    """Compare an array of CuPy blocks with one of NumPy blocks; return its persisted blocks."""
    y = persisted(client, y)
    assert declared(y)
    assert (y.dtype, y.chunks) == (expected.dtype, expected.chunks)
    np.testing.assert_allclose(on_host(y), expected.compute(), rtol=1e-9, atol=1e-9)
    return y


@pytest.mark.parametrize("name", [*PROGRAMS, *SECTIONS])
def test_values_are_those_of_numpy(name, client, library, x):
    program = {**PROGRAMS, **SECTIONS}[name]
    y = program(x)
    assert type(y) is type(x)
    check(client, y, program(in_blocks(library)))


def test_regions_move_between_gpus(client, x):
    """Without their workers' copies of whole blocks, and without the host."""
    for program in (
        dask_p2p.transpose,
        lambda x: dask_p2p.rechunk(x, (-1, 5)),
        lambda x: fft.fft(x, axis=0),
    ):
        with dask.config.set({"p2p.transports.order": ["ipc"]}):
            y = program(x)
        result = persisted(client, y)
        assert used(client, y) == {"ipc"}
        assert declared(result)


#: `install` does not change the package `dask_array`.
of_dask = pytest.mark.parametrize("library", ["dask.array"], indirect=True)


@of_dask
@pytest.mark.parametrize("name", ["fft", "fft2", "rfft"])
def test_transforms_of_the_library(name, client, library, x):
    keywords = {"fft2": {}}.get(name, {"axis": 0})
    with dask_p2p.install() as installation:
        y = getattr(library.fft, name)(x, **keywords)
    assert installation.counts["fft"] == 1
    check(client, y, getattr(fft, name)(in_blocks(library), **keywords))


def test_estimates(client, x):
    memory = estimate(x, workers=2)
    assert memory.input_bytes == memory.output_bytes == VALUES.nbytes // 2
    assert "1 exchange" in str(fft.estimate(fft.fft(x, axis=0)))


def test_slices(client, x):
    y = dask_p2p.transpose(x)[:3]
    check(client, y, dask_p2p.transpose(da.from_array(VALUES, chunks=(6, -1)))[:3])
