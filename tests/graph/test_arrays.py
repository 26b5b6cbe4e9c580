import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import meta_from_array

import dask_p2p
from dask_p2p.errors import UnsupportedArrayError
from tests.graph.random_programs import check_program
from tests.support import output_of


def test_an_output_block_depends_on_what_it_reads_only():
    x = da.ones((8, 8), chunks=(2, 8))
    y = dask_p2p.rechunk(x, (4, 8))
    assert isinstance(meta_from_array(y), np.ndarray)
    assert set(y.dask.dependencies[y.name]) == {x.name}
    layer = y.dask.layers[y.name]
    assert layer[y.name, 0, 0].dependencies == {(x.name, 0, 0), (x.name, 1, 0)}


def test_tasks_that_read_the_same_share_their_references():
    x = da.ones((6, 6), chunks=(1, 6))
    y = dask_p2p.transpose(x)
    blocks = [task.blocks for task in y.dask.layers[y.name].values()]
    assert len({id(block) for block in blocks}) == 1
    assert len({id(task.dependencies) for task in y.dask.layers[y.name].values()}) == 1
    assert blocks[0].items == tuple((x.name, i, 0) for i in range(6))


def operations(function):
    """Count the steps of Python's interpreter that a call takes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_building_is_linear_in_the_blocks_of_a_tall_array():
    first, short, tall = (da.zeros((n, 4), chunks=(1, 4)) for n in (500, 600, 1800))
    dask_p2p.transpose(first)  # reads what is read once
    steps = operations(lambda: dask_p2p.transpose(short))
    assert operations(lambda: dask_p2p.transpose(tall)) < 4 * steps


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


MATRIX = np.arange(64 * 48.0).reshape(64, 48)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x + 1], ids=["array", "lazy"])
def test_a_transpose_before_an_exchange_is_part_of_it(change):
    x, expected = change(da.from_array(MATRIX, chunks=(8, -1))), change(MATRIX).T
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
