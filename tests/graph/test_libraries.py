from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import UnsupportedArrayError
from tests.graph.random_programs import check_program
from tests.support import output_of

VALUES = np.arange(60.0).reshape(6, 10)


def doubled(ctx, *blocks):
    return blocks[0] * 2


#: Calls of several arrays.
CALLS = {
    "map_overlap": lambda x, y: dask_p2p.map_overlap(np.add, x, y, depth=1),
    "map_on_gpu": lambda x, y: dask_p2p.map_on_gpu(np.add, x, y, fallback="numpy"),
    "spmd": lambda x, y: dask_p2p.spmd(doubled, x, y, ranks=1),
    "iterate": lambda x, y: dask_p2p.iterate(np.add, (x, y), 0, 1),
    "constants": lambda x, y: dask_p2p.iterate(np.add, x, 0, 1, constants=(y,)),
    "constants by name": lambda x, y: dask_p2p.iterate(np.add, {"u": x}, 0, 1, constants={"v": y}),
    "fused": lambda x, y: dask_p2p.fused(x + 1, y + 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_arrays_of_one_library(call, dask_array):
    x, y = (library.from_array(VALUES, chunks=(3, 10)) for library in (da, dask_array))
    for arrays in ((x, y), (y, x)):
        with pytest.raises(UnsupportedArrayError, match="expected arrays of one library in a call"):
            CALLS[call](*arrays)


def test_frequencies_are_of_the_library_of_like(dask_array):
    x = dask_array.from_array(VALUES, chunks=3)
    frequencies = dask_p2p.fft.fftfreq(8, chunks=4, like=x)
    assert type(frequencies) is type(x)
    np.testing.assert_array_equal(frequencies.compute(), np.fft.fftfreq(8))
    assert type(dask_p2p.fft.rfftfreq(8, like=VALUES)) is da.Array


@pytest.mark.programs
def test_the_package_is_not_imported_from_here():
    program = """
import sys
import dask.array as da, dask_p2p, dask_p2p.xarray
x = da.ones((8, 8), chunks=(2, 8))
with dask_p2p.install():
    for y in (dask_p2p.transpose(x), dask_p2p.map_overlap(abs, x, 1), dask_p2p.fft.fft2(x)):
        y.compute(scheduler="sync")
assert "dask_array" not in sys.modules
"""
    output_of("-W", "error", "-c", program)


@pytest.mark.parametrize("library", ["dask_array", "dask.array", "dask.array installed"])
def test_random_programs_have_the_values_of_numpy(library, request):
    package = request.getfixturevalue("dask_array") if library == "dask_array" else da
    seeds = range(200 if package is not da else 60)
    if not library.endswith("installed"):
        for seed in seeds:
            check_program(package, seed)
        return
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install():
        for seed in seeds:
            check_program(package, seed + 1000)
