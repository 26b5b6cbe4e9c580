from __future__ import annotations

import numpy as np

from dask_p2p.fusing.planning.sizes import Program
from dask_p2p.fusing.resident.replayed_calls import HandleTable

KEYS = (("u", 0, 0), ("v", 0), ("constant", 3), ("u", 1, 0))


def table(blocks=(10, 20, 30, 40)):
    outputs = ((("r", 0, 1), ("r", 2, 2)), (("total",),))
    return HandleTable(Program(KEYS, {}, (), {}, outputs, False), ("u", "v"), blocks)


def test_arguments_of_a_call():
    handles = table()
    assert handles.read([-1, -2]) == [10, 20, 30, 40]
    handles.handles[7] = {(0, 0): 1, (1, 0): 2}
    handles.handles[8] = {(0,): 3}
    assert handles.read([7, 8]) == [1, 3, 30, 2]
    assert handles.read([7, -2]) == [1, 20, 30, 2]


def test_results_of_a_call():
    handles = table()
    handles.add(4, [["a", "b"], ["c"]])
    assert handles.results == 2
    assert handles.handles[4] == {(0, 1): "a", (2, 2): "b"}
    assert handles.handles[5] == {(): "c"}
    handles.drop([4, 99])
    assert sorted(handles.handles) == [-2, -1, 5]


def test_a_state_has_all_handles():
    values = np.arange(24.0).reshape(4, 6)
    blocks = [
        *(values, values.T, values[::2, 1::2], values[:0], np.float32(2)),
        np.ma.masked_greater(values, 5),
        "text",
    ]
    before = table()
    before.handles[3] = dict(enumerate(blocks))
    state = before.state()
    after = table((1, 2, 3, 4))
    after.restore(memoryview(np.concatenate(state)))
    assert after.handles[-1] == {(0, 0): 1, (1, 0): 4}, "arguments are those of the new attempt"
    found = [after.handles[3][number] for number in range(len(blocks))]
    for got, expected in zip(found, blocks, strict=True):
        assert type(got) is type(expected)
        assert np.array_equal(got, expected)
    found[0][:] = 0  # writable, and memory of its own
    again = table()
    again.restore(memoryview(np.concatenate(state)))
    assert np.array_equal(again.handles[3][0], values)
