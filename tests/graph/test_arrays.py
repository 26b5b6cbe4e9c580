from __future__ import annotations

import sys

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array

import dask_p2p


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
