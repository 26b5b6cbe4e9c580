from __future__ import annotations

import sys

import dask.array as da
from dask.task_spec import TaskRef

import dask_p2p


def test_tasks_share_one_reference_to_each_source_block():
    x = da.ones((6, 6), chunks=(1, 6))
    y = dask_p2p.transpose(x)
    refs = [arg for task in y.dask.layers[y.name].values() for arg in task.args[-6:]]
    assert {type(ref) for ref in refs} == {TaskRef}
    assert len({id(ref) for ref in refs}) == 6


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
    short, tall = (da.zeros((n, 4), chunks=(1, 4)) for n in (300, 900))
    dask_p2p.transpose(short)  # reads what is read once
    steps = operations(lambda: dask_p2p.transpose(short))
    assert operations(lambda: dask_p2p.transpose(tall)) < 4 * steps
