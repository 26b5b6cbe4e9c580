"""The accessor for CuPy blocks, in arrays of both libraries: the values are those of NumPy."""

import dask.array as da
import numpy as np
import pytest

from tests.backends.support import cupy
from tests.gpu.support import on_host
from tests.gpu.test_operations import declared
from tests.support import persisted

xr = pytest.importorskip("xarray")
from tests.xarray.programs import PROGRAMS, SECTIONS, build, variables  # noqa: E402

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

    def lazy(values):
        return library.from_array(values, chunks=(6, -1)[: values.ndim])

    on_gpu = build(lambda values: persisted(client, lazy(values).map_blocks(cupy.asarray)))
    return on_gpu, build(lazy)


def check(actual, reference):
    actual, reference = variables(actual.persist()), variables(reference)
    assert actual.keys() == reference.keys()
    for name, variable in actual.items():
        expected_variable = reference[name]
        assert isinstance(variable.data._meta, cupy.ndarray), name
        assert declared(variable.data), name
        for attribute in ("dims", "chunks", "dtype"):
            assert getattr(variable, attribute) == getattr(expected_variable, attribute)
        expected = expected_variable.compute().data
        bound = 1000 * np.finfo(variable.dtype).eps * abs(expected).max()
        np.testing.assert_allclose(on_host(variable.data), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", [*PROGRAMS, *SECTIONS])
def test_values_are_those_of_numpy(name, client, arrays):
    program = {**PROGRAMS, **SECTIONS}[name]
    actual, expected = map(program, arrays)
    check(actual, expected)
