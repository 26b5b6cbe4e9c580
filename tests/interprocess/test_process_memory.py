"""Memory of other processes: who can read it, how, and when they end."""

import mmap
import os
import threading
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.transports.process_memory import (
    Peer,
    Processes,
    RemoteArray,
    obstacle,
    own_name,
    own_token,
    read,
    read_into,
    runs_of,
    separation,
)
from tests.support import BOUND_S, output_of, tune
from tests.transports.loopback import wait_until


def read_view(view):
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    memory = np.empty(int(np.prod(runs.shape)) * view.itemsize, np.uint8)
    return np.broadcast_to(read(os.getpid(), runs, view.dtype, memory), view.shape)


@st.composite
def views(draw):
    """Regions of arrays of any memory layout: permuted, stepped, reversed, repeated."""
    dtype = draw(st.sampled_from(["u1", "f4", ">i8", "c16", "M8[ns]", "S3", "i2,f8"]))
    extents = draw(st.lists(st.integers(1, 9), max_size=4))
    base_array = np.zeros(extents, dtype)
    base_array.reshape(-1).view("u1")[:] = np.arange(base_array.nbytes) % 251
    view = base_array.transpose(draw(st.permutations(range(base_array.ndim))))
    for axis in range(view.ndim):
        step = draw(st.sampled_from([1, 1, 2, -1, -3]))
        view = view[(slice(None),) * axis + (slice(None, None, step),)]
        if draw(st.integers(0, 4)) == 0:
            first = view[(slice(None),) * axis + (slice(0, 1),)]
            view = np.broadcast_to(first, view.shape)
    return view


@given(views(), st.data())
def test_a_region_is_copied_to_where_it_belongs(view, data):
    """Or nowhere, if it lies there in another order."""
    margins = [data.draw(st.integers(0, 2)) for _ in view.shape]
    target_array = np.zeros(
        [n + 2 * m for n, m in zip(view.shape, margins, strict=True)], view.dtype
    )
    target_array.reshape(-1).view("u1")[:] = 77
    inner = tuple(slice(m, m + n) for n, m in zip(view.shape, margins, strict=True))
    expected = target_array.copy()
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_p2p.transports.process_memory.MOST_RUNS", data.draw(st.integers(1, 5)))
        tune(patch, process_run_bytes=1)
        is_done = read_into(os.getpid(), runs, target_array[(*inner, ...)])
    if is_done:
        expected[inner] = view
    elif view.flags.c_contiguous and not any(margins) and view.nbytes:
        pytest.fail("one run is copied to one")
    assert target_array.tobytes() == expected.tobytes()


def test_short_runs_are_not_copied_one_by_one():
    view = np.arange(64.0).reshape(8, 8)
    runs = runs_of(view.ctypes.data, view.shape, view.strides, view.itemsize)
    base_array = np.zeros((8, 10))
    assert not read_into(os.getpid(), runs, base_array[:, :8])
    assert not base_array.any()


def test_a_region_that_is_nowhere():
    runs = runs_of(8, (64,), (8,), 8)  # of no process
    with pytest.raises(OSError, match="address"):
        read_into(os.getpid(), runs, np.zeros(64))
    with os.fdopen(os.memfd_create("pages"), "r+b") as file:
        file.truncate(2 * mmap.PAGESIZE)
        array = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        file.truncate(mmap.PAGESIZE)
        with pytest.raises(OSError, match="address"):
            read_view(array)


def test_items_without_bytes():
    assert read_view(np.empty((3, 2), "V0")).shape == (3, 2)


def test_a_token_proves_which_process_is_read():
    address, token = own_token()
    assert (address, token) == own_token()
    assert obstacle(os.getpid(), address, token) is None
    wrong_token = bytes(byte ^ 1 for byte in token)
    assert obstacle(os.getpid(), address, wrong_token).code == "other-process"
    assert obstacle(os.getpid(), 8, token).code == "forbidden"
    assert obstacle(os.getpid(), 2**70, token).code == "forbidden"


@pytest.mark.parametrize("step", [1, 2, -1])
def test_a_remote_array_is_read_directly_where_the_order_in_memory_allows_it(step):
    x = np.arange(6000.0).reshape(2, 3000)[:, ::step]
    remote_array = RemoteArray(os.getpid(), x.ctypes.data, x.shape, x.strides, x.dtype)
    sizes = []

    def memory_of(nbytes):
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    into = np.zeros(x.shape)
    assert (remote_array.read(into, memory_of) is into) == (step == 1)
    assert len(sizes) == (step != 1)
    np.testing.assert_array_equal(remote_array.read(None, memory_of), x)
    assert sizes[-1] == x.nbytes


HERE = Peer("boot", "pid:[1]", 1000, 1, "p", "/tmp/a", "aa")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"boot_id": "other"}, "other-host"),
        ({"pid_namespace": "pid:[2]"}, "other-namespace"),
        ({"user": 0}, "other-user"),
        ({"pid": 1}, "same-process"),
        ({"refusal": "its disk is full"}, "no-directory"),
    ],
)
def test_what_keeps_processes_from_reading_each_other(changes, code):
    remote = replace(HERE, pid=2)
    assert separation(HERE, remote) is None
    assert separation(HERE, replace(remote, **changes)).code == code


def test_this_process_has_one_name():
    assert own_name() == own_name()
    assert own_name().startswith(f"{os.getpid()}-")


TOGETHER = """
import time
from concurrent.futures import ThreadPoolExecutor
from dask_p2p.transports import process_memory
def random_bytes(count):
    time.sleep(0.1)  # until all threads need them
    return real(count)

real, process_memory.token_bytes = process_memory.token_bytes, random_bytes
with ThreadPoolExecutor(4) as threads:
    proofs = {*threads.map(lambda _: process_memory.own_proof(), range(4))}
print(len(proofs), all(map(process_memory.readable_pid, proofs)))
"""


def test_threads_that_begin_together_have_one_token():
    """Bytes that do not stay would be other ones when a process looks for them."""
    assert output_of("-c", TOGETHER) == "1 True\n"


def test_the_end_of_a_process_is_found_once(sleeper):
    processes, names, threads = Processes(), [], []

    def note_thread(name):
        threads.append(threading.current_thread())

    for on_end in (names.append, note_thread, names.append):
        processes.watch("sleeper", sleeper.pid, on_end)
    processes.watch("own", os.getpid(), names.append)
    assert not processes.has_ended("sleeper")
    sleeper.kill()  # nobody has waited for it yet: it is a zombie
    wait_until(lambda: names and threads, BOUND_S)
    assert processes.has_ended("sleeper")
    assert not processes.has_ended("own")
    assert (names, len(threads)) == (["sleeper"], 1)
    assert threading.current_thread() not in threads


def test_none_of_the_last_waits_for_another(sleeper):
    processes, go_on, names = Processes(), threading.Event(), []
    processes.watch("sleeper", sleeper.pid, lambda name: go_on.wait(2 * BOUND_S), last=True)
    processes.watch("sleeper", sleeper.pid, names.append, last=True)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    go_on.set()


def test_a_call_that_fails_is_logged_and_others_follow(sleeper, caplog):
    processes, names = Processes(), []
    processes.watch("sleeper", sleeper.pid, lambda name: 1 / 0)
    processes.watch("sleeper", sleeper.pid, names.append)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    assert "the end of process sleeper" in caplog.text


def test_a_process_that_has_ended_before(sleeper):
    sleeper.kill()
    sleeper.wait()
    processes, names = Processes(), []
    processes.watch("sleeper", sleeper.pid, names.append)
    assert processes.has_ended("sleeper")
    wait_until(lambda: names == ["sleeper"], BOUND_S)


def test_what_is_forgotten_is_not_called(sleeper):
    processes, names, forgotten_names = Processes(), [], []
    processes.watch("sleeper", sleeper.pid, forgotten_names.append)
    processes.watch("sleeper", sleeper.pid, names.append)
    processes.forget("sleeper", forgotten_names.append)
    processes.forget("nobody", forgotten_names.append)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    assert forgotten_names == []


def test_a_kernel_that_watches_nothing(monkeypatch):
    refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    monkeypatch.setattr(os, "pidfd_open", refuse)
    processes, names = Processes(), []
    processes.watch("other", 1, names.append)
    assert not processes.has_ended("other")
    assert names == []
