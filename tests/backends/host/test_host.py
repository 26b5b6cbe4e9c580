"""NumPy blocks beside other threads, pinned memory, and buffers that stay with a process."""

import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
import time

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.backends import allocator, host_memory
from dask_p2p.backends import host as host_copies
from dask_p2p.backends.host import RepeatingTimer, copy_on_host
from dask_p2p.backends.host_memory import first_touch, is_pinned, pin_in_place
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import DeviceLostError
from tests.backends.support import random_bits
from tests.clock import Timers
from tests.simulation.streams import Recorder
from tests.support import BOUND_S, noted, tune
from tests.transports.loopback import wait_until


def test_the_interpreter_goes_on_during_a_copy():
    src = random_bits((3000, 3000), "f8")
    dst = NUMPY.empty((3000, 3000), "f8")
    ticks, number = [0] * 50, 0  # during each copy, and that of the copy

    def copy():
        nonlocal number
        for number in range(len(ticks)):
            NUMPY.permute_into(dst, src, (1, 0))
            if ticks[number] > 3:  # not at the first one where other processes have the cores
                break

    copies = threading.Thread(target=copy)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # a thread that keeps the lock is not asked for it during this test
    try:
        copies.start()
        while copies.is_alive():
            ticks[number] += 1
            time.sleep(0.0005)
    finally:
        sys.setswitchinterval(interval)
    copies.join()
    assert max(ticks) > 3


@pytest.mark.parametrize("shape", [(1, 3000, 100), (700, 431), (400_000,), (3, 5), (), (0, 4)])
def test_arrays_are_copied_by_several_threads_if_they_are_large(monkeypatch, shape):
    monkeypatch.setattr(host_copies, "thread_count", lambda: 3)
    threads = noted(
        monkeypatch, host_copies, "permute_into", lambda *_: threading.current_thread().name
    )
    values = np.random.default_rng(0).random(shape)
    out = np.empty(shape[::-1]).T
    copy_on_host(out, values)
    np.testing.assert_array_equal(out, values)
    caller = {threading.current_thread().name}
    assert {*threads} <= caller if values.nbytes < 2**20 else not {*threads} & caller


MIB = 2**20


def test_an_array_anywhere_can_be_touched():
    """Also one that has been touched, and has values; and one in the middle of a page."""
    values = np.arange(2 * MIB, dtype="u8")
    first_touch(values)
    first_touch(values[1:-1])
    np.testing.assert_array_equal(values, np.arange(2 * MIB, dtype="u8"))


def test_each_page_is_touched_by_one_thread(monkeypatch):
    monkeypatch.setattr(host_memory, "thread_count", lambda: 3)
    tune(monkeypatch, first_touch_bytes=2**12)
    touched = []
    monkeypatch.setattr(host_memory, "first_touch", touched.append)
    for size, count in ((1, 1), (2**12, 1), (2**14, 3), (2**14 + 1, 3)):
        memory = np.empty(size, "u1")
        host_memory.touch_by_threads(memory)
        starts = sorted(part.ctypes.data for part in touched)
        assert starts[0] == memory.ctypes.data
        assert sum(part.nbytes for part in touched) == size
        assert len(touched) == count
        touched.clear()


INTERVAL_S = 20.0


def test_it_goes_on_until_the_function_says_no():
    timers, results, called_s = Timers(), [True, True, False, False], []

    def function():
        called_s.append(timers.clock.now_s)
        return results[len(called_s) - 1]

    began_s = timers.clock.now_s
    timer = RepeatingTimer(INTERVAL_S, function, timers.make)
    timer.start()
    timer.start()  # it goes on already
    timers.advance(10 * INTERVAL_S)
    assert called_s == [began_s + n * INTERVAL_S for n in (1, 2, 3)]
    timer.start()
    timers.advance(10 * INTERVAL_S)
    assert called_s[3:] == [began_s + 11 * INTERVAL_S]


@pytest.mark.parametrize("end", ["it is cancelled meanwhile", "the device is lost"])
def test_it_ends_while_the_function_runs(end):
    timers, calls = Timers(), []

    def function():
        calls.append(1)
        if end == "the device is lost":
            raise DeviceLostError("gone")
        timer.cancel()
        return True

    timer = RepeatingTimer(INTERVAL_S, function, timers.make)
    timer.start()
    timers.advance(5 * INTERVAL_S)
    assert calls == [1]


@pytest.fixture
def driver(monkeypatch):
    """A recorder in the place of CuPy alone: the module's own thread ends pinned memory."""
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", recorder.cupy)
    monkeypatch.setattr(host_memory, "_warned", set())
    return recorder


def test_memory_is_pinned_until_the_last_view_is_gone(driver):
    memory = np.asarray(host_memory.Pinned(10_000))
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


PRELUDE = """
import resource, runpy, sys, threading, time
import numpy as np

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

# The module alone: the package would take as long again to import.
allocator = runpy.run_path(sys.argv[1]) if sys.argv[1:] else None
"""
# Page faults of 200 calls of a ufunc, on views, in a thread that is not the first.
CALLS = """
def call():
    u, out = np.ones((130, 130)), np.ones((130, 130))[1:-1, 1:-1]
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    before = faults()
    for _ in range(200):
        np.add(u[:-2, 1:-1], u[2:, 1:-1], out=out)
    print(faults() - before)
"""
ALONE = """
if allocator:
    allocator["keep_small_buffers"]()
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""
ON_A_WORKER = """
from distributed import Client, LocalCluster
import dask_p2p

with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
    dask_p2p.register(client)
    client.submit(call).result()
"""


def number(*programs, module=None, threshold="65536"):
    """Run programs one after the other in a process; return the number that they print."""
    env = {key: value for key, value in os.environ.items() if key != "MALLOC_TRIM_THRESHOLD_"}
    if threshold is not None:
        env["MALLOC_TRIM_THRESHOLD_"] = threshold
    command = [sys.executable, "-c", "".join([PRELUDE, *programs]), *([module] if module else [])]
    process = subprocess.run(command, env=env, check=True, capture_output=True, timeout=BOUND_S)
    return int(process.stdout)


@pytest.mark.parametrize("threshold", ["65536", "much", None])
def test_no_call_of_a_ufunc_touches_new_pages(threshold):
    assert number(CALLS, ALONE, module=allocator.__file__, threshold=threshold) < 100


# Page faults of 20 temporaries of 4 MiB; it ends once the memory has returned to the system.
TEMPORARIES = """
def work():
    global pages
    x = np.ones(2**19)
    with allocator["keep_temporaries"]():
        for _ in range(3):
            y = (x + 1) * 2 - x  # several temporaries at a time
        before = faults()
        for _ in range(20):
            y = (x + 1) * 2 - x
        pages = faults() - before
        del y

before = rss()
thread = threading.Thread(target=work)
thread.start()
thread.join()
while rss() - before > 8 * 2**20:
    time.sleep(0.05)
print(pages)
"""


def test_temporaries_of_a_rank_reuse_their_pages():
    """And return them afterwards."""
    assert number(TEMPORARIES, module=allocator.__file__) < 2000


# The memory of the process over its start, once nothing is kept. The thread's heap has a free end.
OUTPUTS = """
def work():
    with allocator["keep_temporaries"]():
        for _ in range(3):
            y = [np.ones(2**18) for _ in range(20)]
            del y
    ended.set()
    is_over.wait()  # glibc gives the heap of a thread that is over to the next one

ended, is_over = threading.Event(), threading.Event()
before = rss()
thread = threading.Thread(target=work)
thread.start()
ended.wait()
while allocator["keep_temporaries"].__wrapped__.__globals__["_timer"] is not None:
    time.sleep(0.05)
print(rss() - before)
is_over.set()
thread.join()
"""


def test_the_end_of_a_heap_returns_to_the_system():
    assert number(OUTPUTS, module=allocator.__file__) < 8 * 2**20


@pytest.mark.slow
@pytest.mark.cluster
def test_nor_in_a_task():
    assert number(CALLS, ON_A_WORKER) < 100


def faults_of_steps(ctx, x):
    """Count the new pages of twenty steps of plain expressions."""
    before = 0
    for step in range(23):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        x = (x + 1) * 2 - x
    return x, float(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)


def faults_of_a_block(x):
    """Return a block like this one, with the number of new pages of twenty steps."""
    _, pages = faults_of_steps(None, x)
    return np.full_like(x, pages)


def test_temporaries_on_workers_with_nannies():
    """Of ranks, and of functions of large blocks: 10,000 with new pages for each temporary."""
    x = da.ones((2, 2**19), chunks=(1, -1))
    with LocalCluster(2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster):
        _, pages = dask_p2p.spmd(faults_of_steps, x, per_rank=[0.0])
        assert pages.max().compute() < 2000
        y = dask_p2p.map_overlap(faults_of_a_block, x, depth=1, boundary="periodic", dtype=float)
        assert y.max().compute() < 2000
