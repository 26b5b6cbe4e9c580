"""Gangs of CuPy arrays on a cluster whose workers are threads here, with one GPU that records."""

import gc
import threading
from math import inf
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import LocalCluster, Reschedule

from dask_p2p import iterate, spmd
from dask_p2p.errors import DeviceLostError
from dask_p2p.sections.gang import rank
from dask_p2p.sections.gpu import streams as gpu_streams
from tests.sections.emulated import kernel
from tests.sections.gangs import connection_to, connections_of
from tests.sections.iterate.test_programs import reference, star
from tests.sections.support import nothing_is_left
from tests.simulation.streams import drop_queue_slots
from tests.support import mostly_slow, noted, tune
from tests.transports.loopback import wait_until

X = np.random.default_rng(0).normal(size=(12, 10))
STAGING = "p2p.transports.ipc.staging-bytes"
shared_values = {}  # values for functions that are pickled by their names


@pytest.fixture
def gpu(gpu):
    shared_values["gpu"] = gpu
    yield gpu
    shared_values.clear()
    gc.collect()


@pytest.fixture
def cluster(gpu):
    """Workers that begin when the GPU is there, and end before it."""
    threads = {"threads_per_worker": 2, "processes": False}
    with LocalCluster(n_workers=2, **threads, dashboard_address=":0") as cluster:
        yield cluster


def up(block):
    return shared_values["gpu"].written(block)


def down(block):
    return shared_values["gpu"].read(block)


def on_star(u, out):
    kernel(shared_values["gpu"], star)(u, out=out)


def array():
    meta = shared_values["gpu"].empty((0, 0), "f8")
    return da.from_array(X, chunks=(3, 5)).map_blocks(up, dtype="f8", meta=meta)


def on_host(y):
    return y.map_blocks(down, dtype=y.dtype, meta=np.empty((0, 0))).compute()


def test_values_and_what_is_left(gpu, client, opened):
    (expected,) = reference(star, [X], 1, 7, "periodic")
    left_bytes = []
    for _ in range(3):
        result = on_host(iterate(on_star, array(), 1, 7, checkpoint_every=2))
        assert np.array_equal(result, expected)
        gpu.check()
        nothing_is_left(client)
        left_bytes.append(gpu.live_bytes)
    assert [*map(len, opened)] == [1] * 6
    assert len(set(left_bytes)) == 1, "windows, halo arrays and outputs have gone"


def fails_once(ctx, x):
    p = ctx.with_halo(x, boundary="periodic")
    for step in ctx.steps(6, ctx.state(p=p), every=2):
        ctx.update_halo(p)
        if step == 4 and ctx.rank and not shared_values.setdefault("failed", 0):
            shared_values["failed"] = 1
            connection_to(connections_of(ctx), 0).socket.close()  # as a peer's end is seen
        on_star(p.data, p.inner.copy())
        p.inner[...] = p.inner.apply(lambda values: values + 1)
    return p.inner


def test_another_attempt_goes_on_from_a_checkpoint(gpu, client, monkeypatch):
    tune(monkeypatch, window_linger_s=0.05)
    try:
        y = on_host(spmd(fails_once, array()))
    finally:
        shared_values.pop("failed", None)
    assert np.allclose(y, X + 6)
    gpu.check()
    nothing_is_left(client)


def lingers(thread):
    """Whether windows of an attempt that failed stay until this thread ends."""
    return getattr(thread, "_target", None) is gpu_streams._drop_later


def turns(ctx, x):
    """There and back, until one has failed once; what went through the host."""
    downs = noted(pytest.MonkeyPatch(), ctx.device, "to_host", ctx.device.holds)
    s, out = ctx.state(x=x), None
    for step in ctx.steps(6, s, every=2):
        out = ctx.redistribute(s.x, (0,), axes=(1, 0), out=out)
        if step == 3 and ctx.rank and shared_values.pop("to fail", 0):
            connection_to(connections_of(ctx), 0).socket.close()  # as a peer's end is seen
        ctx.redistribute(out, from_partition=(0,), axes=(1, 0), out=s.x)
        s.x[...] = s.x.apply(lambda values: 2 * values)
    return s.x, sum(downs)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("order", mostly_slow(["auto", ["comm"]], ["auto"]))
def test_redistributions(gpu, client, monkeypatch, order, fails):
    tune(monkeypatch, window_linger_s=0.05)
    left_bytes = []
    for _ in range(3):
        shared_values["to fail"] = fails
        with dask.config.set({"p2p.transports.order": order, STAGING: "384 KiB"}):
            y, downs = spmd(turns, array(), per_rank=[0], partition=(0,))
            y, downs = client.persist([y, downs])
            assert np.array_equal(on_host(y), 64 * X)
            assert all(count == 0 for count in downs.compute()) == (order == "auto")
        del y, downs
        gpu.check()
        nothing_is_left(client)
        wait_until(lambda: not any(map(lingers, threading.enumerate())))
        drop_queue_slots()
        # Workers drop blocks later than the client does.
        wait_until(lambda: not any(client.run(lambda dask_worker: [*dask_worker.data]).values()))
        # Frames of a run that failed are dropped on the event loop, perhaps after the first look.
        wait_until(lambda: live_bytes(gpu) <= min(left_bytes, default=inf))
        left_bytes.append(live_bytes(gpu))


def live_bytes(gpu):
    gc.collect()
    return gpu.live_bytes


def fails_at_first(ctx, x, error):
    """Fail on one rank, once: an error of values is that of a process that has ended."""
    if ctx.rank and not shared_values.setdefault("has failed", 0):
        shared_values["has failed"] = 1
        if isinstance(error, ValueError):
            ctx.device.has_ended = True
        raise error
    ctx.barrier()
    return x


LOST = DeviceLostError("the GPU of this process works no more")


@pytest.mark.parametrize("error", [ValueError("the residual is not a number"), LOST])
def test_ranks_come_again_after_errors_that_are_nobodys(gpu, client, monkeypatch, error):
    """Those of values that were never written, and those of a lost GPU, whose worker leaves."""
    leave = mock.Mock(side_effect=Reschedule)
    monkeypatch.setattr(rank, "reschedule_elsewhere", leave)
    assert np.array_equal(on_host(spmd(fails_at_first, array(), error=error)), X)
    leaving = [str(call.args[1]) for call in leave.call_args_list]
    assert leaving == ([str(LOST)] if error is LOST else [])
    nothing_is_left(client)


def test_a_lost_gpu_is_named_where_no_worker_can_leave(gpu, client):
    with pytest.raises(DeviceLostError, match="works no more"):
        spmd(fails_at_first, array(), error=LOST).compute()
    nothing_is_left(client)
