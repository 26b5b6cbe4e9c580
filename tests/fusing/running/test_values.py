"""Values of a rank, and copies of those whose memory is used elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.fusing.running.program import LiveValues


def values(**uses):
    return LiveValues(uses)


def test_values_are_dropped_after_their_last_use():
    found = values(x=2)
    found["x"] = 1
    found.use("x")
    assert found["x"] == 1
    found.use("x")
    assert not found


def test_arrays_that_only_one_task_has():
    found = values(x=1)
    found["x"] = x = np.ones(3)
    assert found.to_overwrite("x") is x


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T, lambda x: x[::-1, 1:]])
def test_arrays_with_other_uses_are_copied(view):
    found = values(x=1, y=1, z=2)
    found["x"] = x = np.arange(12.0).reshape(3, 4)
    found["y"] = y = view(x)
    found["z"] = view(x.copy())
    for key in "xyz":
        copy = found.to_overwrite(key)
        assert not np.shares_memory(copy, found[key])
        assert copy.strides == found[key].strides
        np.testing.assert_array_equal(copy, found[key])
    found.use("x")
    assert found.to_overwrite("y") is y


def test_blocks_of_dask_are_copied():
    found, block = values(x=1, y=1), np.ones((2, 3))
    found.add_inputs([("x", block)])
    assert found.to_overwrite("x") is not block
    found["y"] = block.T
    found.use("x")
    assert not np.shares_memory(found.to_overwrite("y"), block)


def test_values_that_nobody_can_overwrite():
    found = values(x=2, y=2)
    found["x"] = x = np.broadcast_to(1.0, (3, 3))
    found["y"] = y = [1]
    assert found.to_overwrite("x") is x
    assert found.to_overwrite("y") is y


def test_other_classes_of_arrays():
    found = values(x=2, y=2)
    found["x"] = x = np.ma.masked_less(np.arange(3), 1)
    found["y"] = np.array([[1], 2], dtype=object)
    copy = found.to_overwrite("x")
    copy[2] = np.ma.masked
    assert x.mask.tolist() == [True, False, False]
    assert found.to_overwrite("y") is not found["y"]


def test_arrays_that_other_ranks_read_are_copied():
    x = np.ones(3)
    found = LiveValues({"x": 1}, lambda value: value is x)
    found["x"] = x
    assert not np.shares_memory(found.to_overwrite("x"), x)
