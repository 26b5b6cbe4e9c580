"""All operations on CuPy blocks, in arrays of both libraries: the values are those of NumPy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import estimate, fft
from dask_p2p.engine.task import AssembleTask
from tests.gpu.support import on_host
from tests.gpu.test_fft import declared
from tests.ops.programs import INSTALLED, PROGRAMS, SECTIONS, VALUES
from tests.support import persisted, used

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(params=["dask.array", "dask_array"])
def library(request):
    return da if request.param == "dask.array" else request.getfixturevalue("dask_array")


@pytest.fixture
def x(library, client):
    import cupy

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


def exchange(y):
    tasks = y.__dask_graph__().values()
    return {task.index: task.plan for task in tasks if isinstance(task, AssembleTask)}


#: `install` does not change the package `dask_array`.
of_dask = pytest.mark.parametrize("library", ["dask.array"], indirect=True)


@of_dask
@pytest.mark.parametrize("name", INSTALLED)
def test_the_methods_of_dask(name, client, library, x):
    expected = INSTALLED[name](in_blocks(library).persist())
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install() as installation:
        y = persisted(client, INSTALLED[name](x))
    assert installation.count == 1
    check(client, y, expected)


@of_dask
def test_a_transpose_and_a_rechunk_are_one_transpose(client, x):
    """Their tasks are those of `dask_p2p.transpose`, so they move the same bytes."""
    rows = (2, -1)
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install():
        p2p_layers = exchange(x.T.rechunk(rows))
    assert len(p2p_layers) == 10
    assert p2p_layers == exchange(dask_p2p.transpose(x, chunks=rows))


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
