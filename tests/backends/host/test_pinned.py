from __future__ import annotations

import gc
import pickle
import sys

import numpy as np
import pytest

from dask_p2p.backends import host_memory as pinned
from dask_p2p.backends.host_memory import Pinned, is_pinned, pin_in_place
from tests.simulation.streams import Recorder
from tests.transports.loopback import wait_until


@pytest.fixture
def driver(monkeypatch):
    """A recorder in the place of CuPy alone: the module's own thread ends pinned memory."""
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", recorder.cupy)
    monkeypatch.setattr(pinned, "_warned", set())
    return recorder


def test_memory_is_pinned_until_the_last_view_is_gone(driver):
    memory = np.asarray(Pinned(10_000))
    assert memory.nbytes >= 10_000
    assert memory.ctypes.data % 4096 == 0, "others have no part in its pages"
    assert driver.pinned == {memory.ctypes.data: memory.nbytes}
    view = memory[8:8008].view("f8").reshape(10, 100)[::2].T
    view[...] = 7
    del memory
    gc.collect()
    assert len(driver.pinned) == 1
    assert is_pinned(view)
    assert not is_pinned(view.copy())
    copy = pickle.loads(pickle.dumps(view))
    np.testing.assert_array_equal(copy, view)
    assert not is_pinned(copy)
    del view
    wait_until(lambda: not driver.pinned)  # by a thread of its own


def test_memory_is_registered_where_it_is(driver):
    values = np.arange(1000.0)
    end = pin_in_place(values[::-2])
    ((start, size_bytes),) = driver.pinned.items()
    assert (start, size_bytes) == (values.ctypes.data + 8, 7992), "all that it reaches over"
    assert not is_pinned(values), "somebody else may end it"
    assert pin_in_place(values) is None, "it has a part that is registered already"
    end()
    assert driver.pinned == {}
