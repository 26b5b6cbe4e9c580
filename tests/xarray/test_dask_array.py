import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import output_of

pytestmark = pytest.mark.programs(4)

FOLDER = Path(__file__).parent


@pytest.mark.skipif(find_spec("dask_array") is None, reason="needs it: pip install dask-array")
def test_the_accessor_of_arrays_of_dask_array():
    """All tests of this folder, where `dask_array` is the chunk manager of xarray."""
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    output = output_of(*arguments, "-p", "tests.xarray.dask_arrays", FOLDER, cwd=FOLDER.parents[1])
    assert int(re.search(r"(\d+) passed", output)[1]) >= 215
    assert not re.search(r"\d+ (failed|skipped)", output), output


@pytest.mark.skipif(find_spec("dask_array") is None, reason="needs it: pip install dask-array")
def test_results_are_of_dask_array():
    program = """
import numpy as np, xarray as xr, dask_array, dask_array.xarray, dask_p2p.xarray
dask_array.xarray.register()
a = xr.DataArray(np.ones((6, 8)), dims=("x", "y")).chunk(x=2)
for b in (a.p2p.transpose("y", "x"), a.p2p.fft("x"), a.p2p.chunk(x=3)):
    assert type(b.data) is dask_array.Array, type(b.data)
assert a.p2p.transpose("y", "x").isel(y=slice(3)).data.compute().shape == (3, 6)
"""
    output_of("-W", "error", "-c", program)
