from __future__ import annotations

import numpy as np

from dask_p2p.backends import host_memory as module
from dask_p2p.backends.host_memory import first_touch, touch_by_threads
from tests.support import tune

MIB = 2**20


def test_an_array_anywhere_can_be_touched():
    """Also one that has been touched, and has values; and one in the middle of a page."""
    values = np.arange(2 * MIB, dtype="u8")
    first_touch(values)
    first_touch(values[1:-1])
    np.testing.assert_array_equal(values, np.arange(2 * MIB, dtype="u8"))


def test_each_page_is_touched_by_one_thread(monkeypatch):
    monkeypatch.setattr(module, "thread_count", lambda: 3)
    tune(monkeypatch, first_touch_bytes=2**12)
    touched = []
    monkeypatch.setattr(module, "first_touch", touched.append)
    for size, count in ((1, 1), (2**12, 1), (2**14, 3), (2**14 + 1, 3)):
        memory = np.empty(size, "u1")
        touch_by_threads(memory)
        starts = sorted(part.ctypes.data for part in touched)
        assert starts[0] == memory.ctypes.data
        assert sum(part.nbytes for part in touched) == size
        assert len(touched) == count
        touched.clear()
