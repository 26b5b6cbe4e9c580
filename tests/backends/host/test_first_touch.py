from __future__ import annotations

import mmap

import numpy as np
import pytest

from dask_p2p.backends import host_memory as module
from dask_p2p.backends.host_memory import first_touch, touch_by_threads
from tests.support import tune

MIB = 2**20
SMALL, POPULATE = 15, 23


@pytest.fixture
def advice(monkeypatch):
    """What the system is told, one after the other; each step takes as long as it says."""
    given, steps_s, now_s = [], [], [0.0]

    def advise(start, size_bytes, what):
        given.append((size_bytes // MIB, what))
        if what == POPULATE and steps_s:
            now_s[0] += steps_s.pop(0)
        return 0

    monkeypatch.setattr(module, "_advise", advise)
    monkeypatch.setattr(module, "perf_counter", lambda: now_s[0])
    return given, steps_s


def array(size_bytes):
    return np.frombuffer(mmap.mmap(-1, size_bytes), "u1")  # which begins at a page


def test_once_they_are_dear_the_rest_are_small(advice):
    given, steps_s = advice
    steps_s += [1e-3, 20e-3, 100e-3]
    first_touch(array(32 * MIB))
    assert given == [(4, POPULATE)] * 2 + [(24, SMALL), (24, POPULATE)]


def test_what_is_small_is_left_to_the_first_write(advice):
    given, _ = advice
    first_touch(array(3 * MIB))
    assert given == []


def test_an_array_anywhere_can_be_touched():
    """Also one that has been touched, and has values; and one in the middle of a page."""
    values = np.arange(2 * MIB, dtype="u8")
    first_touch(values)
    first_touch(values[1:-1])
    np.testing.assert_array_equal(values, np.arange(2 * MIB, dtype="u8"))


def test_an_old_system_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_advise", lambda *args: asked.append(args) or -1)
    first_touch(array(16 * MIB))
    assert len(asked) == 1


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
