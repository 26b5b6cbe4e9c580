"""Captured steps: values, the order of all accesses, and no work for hosts."""

import gc
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import InputError
from dask_p2p.sections.gpu import windows
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import DeviceBarrier
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.sections.emulated import kernel, on_gpu, run_section
from tests.sections.gpu.stars import X, check
from tests.sections.iterate.test_programs import star


@pytest.mark.parametrize("steps", [1, 3, 6, 7, 10])
@pytest.mark.parametrize("ranks", [1, 4])
def test_steps(gpu, replayed, ranks, steps):
    check(gpu, steps, ranks=ranks, capture=True)
    # The first four are done one by one, and the last one has no exchange behind it. A graph is
    # tried when it is made.
    assert len(replayed) == (ranks * (1 + (steps - 5) // 2) if steps > 6 else 0)


def test_a_function_that_allocates(gpu, replayed):
    """Memory allocated in a graph stays: no other array may get it between replays."""
    arrays = []

    def run(u):
        return u.apply(lambda values: values * 2.0).apply(lambda v: (v[:-2] + v[2:]) / 2), 0.0

    def until(number):
        for _ in range(4):
            arrays.append(gpu.empty((5, 10), "f8"))
            arrays[-1][...] = 7.0

    a = on_gpu(gpu, da.from_array(X, chunks=(3, 10)))
    y = iterate(run, a, {0: 1}, 19, ranks=4, check_every=5, until=until, capture=True)
    (result,) = run_section(gpu, y, [X])
    expected = X
    for _ in range(19):
        expected = np.roll(expected, 1, 0) + np.roll(expected, -1, 0)
    np.testing.assert_allclose(result, expected)
    assert all((array.values == 7).all() for array in arrays)
    assert len(replayed) > 12
    gc.collect()
    gpu.check()


def test_checkpoints_are_made_where_they_are_due(gpu, replayed):
    """Also checkpoints within a cycle; the one at its end comes after it."""
    states = mock.Mock(**{"read_state.return_value": (0, None)})
    gang = {"checkpoints": lambda *of_rank: states}
    check(gpu, 15, checkpoint_every=5, capture=True, gang=gang)
    assert sorted(call.args[0] for call in states.save.call_args_list) == [5] * 4 + [10] * 4
    assert len(replayed) == 4 * 5  # 2 to 4, 6 to 8, 8 to 10, 10 to 12, 12 to 14


@pytest.mark.parametrize("has_windows", [True, False])
def test_ranks_that_need_messages_go_on_with_them(gpu, replayed, request, has_windows):
    if has_windows:  # but two of the four are on another host
        request.getfixturevalue("two_hosts")
    check(gpu, 9, device=partial(Gpu, has_windows=has_windows), capture=True)
    assert not replayed


def test_what_cannot_be_captured_is_named(gpu):
    def looks(u, out=None):
        if float(u.get().max()) > 0:
            out[...] = u
        return out

    a = on_gpu(gpu, da.from_array(X, chunks=(3, 10)))
    y = iterate(looks, a, 0, 9, ranks=4, capture=True)
    match = r"capture: expected a function that only enqueues work .*Capture"
    with pytest.raises(InputError, match=match):
        run_section(gpu, y, [X])


def test_memory_may_go_while_steps_are_captured(gpu, replayed):
    """The garbage collector may free memory at any time, and RMM ends captures of its stream."""
    arrays_by_thread, apply = {}, kernel(gpu, star)

    def loses(u, out):
        arrays = [gpu.empty(u.shape, u.dtype)]
        thread_arrays = arrays_by_thread.setdefault(threading.get_ident(), arrays)
        if gpu.capture is not None:
            thread_arrays.clear()
        apply(u, out=out)

    check(gpu, 9, function=loses, capture=True)
    assert len(replayed) == 12
    assert not any(arrays_by_thread.values())


@pytest.mark.parametrize("how", ["counts steps", "uses another stream"])
def test_a_function_whose_graph_does_something_else_is_named(gpu, how):
    steps, other_stream = [], gpu.stream()

    def adds(u, out):
        out[...] = u
        if how == "counts steps":
            steps.append(len(steps))
            out[...] = float(len(steps))
        else:
            captured, gpu.capture = gpu.capture, None
            gpu.do(other_stream.name, "a kernel")  # immediately, and in no graph
            out.values[...] = u.values + (captured is None)
            gpu.capture = captured

    a = on_gpu(gpu, da.from_array(X, chunks=(3, 10)))
    y = iterate(adds, a, 0, 19, ranks=1, capture=True)
    with pytest.raises(InputError, match=r"differ from its own in \d+ of 960 bytes"):
        run_section(gpu, y, [X])


def test_the_end_of_an_attempt_ends_device_barriers(gpu, monkeypatch):
    """A peer never comes. The GPU stops waiting, and later results are dropped."""
    runtime, ended = gpu.cupy.cuda.runtime, threading.Event()
    memset = runtime.memsetAsync

    runtime.memsetAsync = lambda *args: (memset(*args), ended.set())
    monkeypatch.setattr(runtime, "streamQuery", lambda stream: 0 if ended.is_set() else 600)

    connections = SimpleNamespace(has_ended=False, is_alone=True)
    device = Gpu(connections)
    threading.Timer(0.05, lambda: setattr(connections, "has_ended", True)).start()
    handle = windows.cuda_ipc.IpcHandle("", "", 1, 0, 1, 0)
    monkeypatch.setattr(windows.cuda_ipc, "export", lambda block: handle)
    with device.running([]):
        ended.set()
        window = windows.OwnWindow(device, {1: 64})
        ended.clear()
        barrier = DeviceBarrier(device, window, [])
        with pytest.raises(AttemptEndedError):  # or, after half a minute, DeviceLostError
            device.wait()
        assert int(window.counters.values[1]) > 0
        with pytest.raises(AttemptEndedError):
            device.wait()
        barrier.enqueue()
