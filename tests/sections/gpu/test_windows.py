"""Mapped memory of another rank, and halos through it: values, and the order of all accesses."""

import gc
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import DeviceLostError, TransferError
from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import ORDERS
from dask_p2p.sections.gpu import regions as region_windows
from dask_p2p.sections.gpu import windows
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory, PeerWindow
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.cuda_ipc import IpcHandle
from dask_p2p.transports.process_memory import Peer
from tests.sections.emulated import emulated_gpu, kernel, on_gpu, run_section, with_ucx
from tests.sections.gangs import connections_of
from tests.sections.gpu.stars import CHUNKS, X, check
from tests.sections.gpu.test_regions import PAIR, SLABS, fail_on_rank, filled, overwritten, run
from tests.sections.gpu.test_regions import there_and_back as both_ways
from tests.support import noted, pairwise, tune
from tests.transports.loopback import wait_until


@pytest.fixture
def calls(monkeypatch):
    """The driver's calls that open and close memory."""
    runtime_calls, runtime = [], emulated_gpu(monkeypatch).cupy.cuda.runtime
    runtime.ipcOpenMemHandle = lambda handle: runtime_calls.append(handle.hex()) or 2**20
    runtime.ipcCloseMemHandle = lambda address: runtime_calls.append("closed")
    return runtime_calls


def handle(number, base, offset_bytes=0):
    return IpcHandle("gpu", f"{number:02}", number, base, 1000, offset_bytes)


def test_an_allocation_is_mapped_until_another_one_has_its_address(calls):
    """CuPy's own pool returns memory to the driver when memory is short."""
    gpu = Gpu()
    memory = PeerMemory(gpu, OwnEvents(gpu, 2).descriptor(0))
    for offset_bytes in (0, 300, 0):
        assert memory.mapped(handle(1, 5000, offset_bytes), 800) == 2**20 + offset_bytes
    assert calls == ["01"]
    memory.mapped(handle(2, 5500), 800)
    assert calls == ["01", "closed", "02"]
    memory.mapped(handle(3, 9000), 800)
    assert calls == ["01", "closed", "02", "03"]
    memory.close()
    assert calls == ["01", "closed", "02", "03", "closed", "closed"]


def test_what_keeps_it_from_being_read_is_named(calls, monkeypatch):
    gpu = Gpu()
    descriptor = OwnEvents(gpu, 2).descriptor(0)
    monkeypatch.setattr(windows, "separation", lambda local_peer, peer: "they share a process")
    with pytest.raises(TransferError, match="they share a process"):
        PeerMemory(gpu, descriptor)
    monkeypatch.setattr(windows, "separation", lambda local_peer, peer: None)
    monkeypatch.setattr(windows.cuda_ipc, "peer_obstacle", lambda gpu: f"no access to {gpu}")
    with pytest.raises(TransferError, match="no access to gpu"):
        PeerMemory(gpu, descriptor)


# --- a process that ends


@pytest.fixture
def descriptor(calls, monkeypatch, sleeper):
    """The descriptor of that rank, with two events."""
    this_peer = Peer.describe_self("gpu")
    other_peer = replace(this_peer, pid=sleeper.pid, process=f"process-{sleeper.pid}")
    with monkeypatch.context() as patch:
        patch.setattr(Peer, "describe_self", lambda memory_proof: other_peer)
        return OwnEvents(Gpu(), 2).descriptor(0)


def test_memory_of_a_rank_is_closed_when_its_process_ends(calls, descriptor, sleeper):
    """And no more of it is mapped."""
    memory, later_memory = (PeerMemory(Gpu(), descriptor) for _ in range(2))
    memory.mapped(handle(1, 5000), 100)
    memory.close()
    assert calls == ["01"], "the next section need not map it"
    sleeper.kill()
    wait_until(lambda: calls == ["01", "closed"])
    wait_until(lambda: later_memory.has_ended)
    with pytest.raises(TransferError, match=f"process {sleeper.pid} has ended"):
        later_memory.mapped(handle(1, 5000), 100)
    later_memory.close()
    assert calls == ["01", "closed"]


@pytest.mark.parametrize("stream_name", ["stream", "copies", "queue"])
def test_memory_that_the_gpu_still_reads_is_closed_after_that(
    monkeypatch, calls, descriptor, sleeper, stream_name
):
    """While the rank's function runs: it may notice the end late."""
    gpu = Gpu()
    with gpu.running([]):
        memory = PeerMemory(gpu, descriptor)
        memory.mapped(handle(1, 5000), 100)
        busy = gpu.queue.reading[0] if stream_name == "queue" else getattr(gpu, stream_name)
        queried, working = [], {busy.ptr}

        def query(stream):
            queried.append(stream)
            return 600 if stream in working else 0

        monkeypatch.setattr(gpu.module.cuda.runtime, "streamQuery", query)
        sleeper.kill()
        wait_until(lambda: queried.count(busy.ptr) > 2)
        assert calls == ["01"]
        with pytest.raises(AttemptEndedError), gpu.reading:
            gpu.check_goes_on()
        working.clear()
        wait_until(lambda: calls == ["01", "closed"])
        memory.close()
        assert calls == ["01", "closed"]


def waiting(monkeypatch, runtime, ends=True):
    """Let streams wait for events of a process, until another one has recorded these.

    Return the calls that record events, and those that wait for them.
    """
    until_s = time.monotonic() + 60  # bounds the wait of a failing test
    record, wait = mock.Mock(), mock.Mock(wraps=runtime.streamWaitEvent)

    def query(stream):
        assert time.monotonic() < until_s, "the GPU waits for ever"
        return 0 if ends and record.call_count == 2 else 600

    for name, call in (("streamQuery", query), ("eventRecord", record), ("streamWaitEvent", wait)):
        monkeypatch.setattr(runtime, name, call)
    return record, wait


@pytest.mark.parametrize("has_ended", [False, True])
def test_waits_for_a_process_that_ends_end_too(monkeypatch, calls, descriptor, sleeper, has_ended):
    """Also before this process has noticed that the attempt has ended."""
    gpu = Gpu(SimpleNamespace(has_ended=has_ended, is_alone=True))
    with gpu.running([]):
        memory = PeerMemory(gpu, descriptor)
        gpu.peers.append(memory)
        gpu.closing.append(memory.close)
        memory.mapped(handle(1, 5000), 100)
        memory.wait(gpu.stream, 0)
        record, wait = waiting(monkeypatch, gpu.module.cuda.runtime)
        sleeper.kill()
        with pytest.raises(AttemptEndedError):
            gpu.wait()
        assert record.call_count == 2
        (stream,) = {call.args[1] for call in record.call_args_list}
        (probe,) = {call.args[0] for call in wait.call_args_list}
        assert len({stream, probe, gpu.stream.ptr, gpu.copies.ptr}) == 4
    wait_until(lambda: calls == ["01", "closed"])


def test_waits_that_do_not_end(monkeypatch, calls, descriptor, sleeper):
    """The worker leaves immediately: until then the memory of the dead process is in use."""
    gpu = Gpu(SimpleNamespace(has_ended=True, is_alone=True))

    def work():
        with gpu.running([]):
            gpu.peers.append(PeerMemory(gpu, descriptor))
            waiting(monkeypatch, gpu.module.cuda.runtime, ends=False)
            sleeper.kill()

    match = f"an event of process {sleeper.pid}, which has ended"
    with pytest.raises(DeviceLostError, match=match):
        work()


@pytest.mark.parametrize(
    ("beyond", "ranks", "has_windows"),
    pairwise(
        [("periodic", True), ("periodic", False), ("nearest", True), (0.5, False)],
        [1, 2, 6],
        [True, False],
    ),
)
def test_values(gpu, opened, beyond, ranks, has_windows):
    boundary, overlap = beyond
    options = {"overlap": overlap, "device": partial(Gpu, has_windows=has_windows)}
    check(gpu, 5, boundary, ranks=ranks, **options)
    assert len(opened) == (ranks if ranks > 1 else 0)
    assert all(opened) if has_windows and ranks > 1 else not any(opened)


def test_ranks_of_other_hosts_get_messages(gpu, opened, two_hosts):
    """The ranks form a square of four, and each row is on one host."""
    check(gpu, 5)
    assert sorted(opened) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("exchange", ORDERS)
def test_ranks_of_other_hosts_get_messages_by_ucx(gpu, opened, monkeypatch, exchange):
    """Messages from the GPU's memory, without a copy to the host. Small halos go through it."""
    messenger = with_ucx(gpu, monkeypatch)
    check(gpu, 5, exchange=exchange)
    assert sorted(opened) == [[0], [1], [2], [3]]
    assert len(messenger.sent) == 5 * 4
    assert not messenger.waiting


def test_windows_that_one_side_cannot_read_are_not_used(gpu, opened, monkeypatch):
    original = windows.PeerWindow.__init__

    def opens(window, device, *args):
        if connections_of(device).rank_and_size[0] == 0:
            raise cuda_ipc.TransferError("no peer access")
        original(window, device, *args)

    monkeypatch.setattr(windows.PeerWindow, "__init__", opens)
    check(gpu, 5)
    assert sorted(opened) == [[], [1, 2], [1, 3], [2, 3]]


def test_one_way_neighbours_get_messages(gpu, opened):
    """Two slots are not enough if the owner does not wait for the reader."""

    def shifted(u, out):
        out[:] = u[:-1]

    x = np.arange(12.0)
    a = on_gpu(gpu, da.from_array(x, chunks=3))
    y = iterate(kernel(gpu, shifted), a, {0: (1, 0)}, 9, boundary=0.0, ranks=4)
    (result,) = run_section(gpu, y, [x])
    assert result.tolist() == [0] * 9 + [0, 1, 2]
    assert opened == [[]] * 4


# --- several fields in one exchange


def crossed(u, v, out):
    """A stencil of two fields, with other weights at each side."""
    out.u[...] = u[1:-1, 1:-1] + 0.1 * v[:-2, 1:-1] + 0.2 * v[1:-1, 2:]
    out.v[...] = v[1:-1, 1:-1] - 0.3 * u[2:, 1:-1] - 0.4 * u[1:-1, :-2]


@pytest.mark.parametrize("chunks", [CHUNKS, ((3, 4, 5), (10,))], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"capture": True}], ids=str)
@pytest.mark.parametrize(("ranks", "has_windows"), pairwise([1, 2, 3, 6], [True, False]), ids=str)
def test_several_fields_share_a_window(gpu, opened, ranks, has_windows, options, chunks):
    inputs = [X, X[::-1] * 2]
    u, v = (on_gpu(gpu, da.from_array(x, chunks=chunks)) for x in inputs)
    y = iterate(kernel(gpu, crossed), {"u": u, "v": v}, 1, 9, ranks=ranks, **options)
    results = run_section(gpu, y["u"], inputs, device=partial(Gpu, has_windows=has_windows))
    u, v = inputs
    for _ in range(9):
        new = SimpleNamespace(u=np.empty_like(u), v=np.empty_like(v))
        crossed(np.pad(u, 1, "wrap"), np.pad(v, 1, "wrap"), new)
        u, v = new.u, new.v
    assert np.array_equal(results[0], u)
    assert np.array_equal(results[1], v)
    gc.collect()
    gpu.check()
    size = len(opened)
    assert size <= 6, "one exchange for both fields on each rank"
    assert all(opened) if has_windows and size else not any(opened)


def test_an_exchange_takes_one_message(gpu, monkeypatch):
    calls = noted(monkeypatch, Connections, "begin", lambda _, call, *args: call.split()[-1])
    counts = []
    for times in (1, 2):
        calls.clear()
        run(gpu, PAIR, partial(both_ways, gpu, times=times))
        counts.append(Counter(calls))
    assert counts[1] - counts[0] == {"packed": 2 * 2}, "of two ranks, there and back"


def test_windows_grow_and_serve_smaller_calls(gpu, monkeypatch):
    monkeypatch.setattr(region_windows, "_LEAST_SLOT_BYTES", 1)
    sizes_bytes = noted(monkeypatch, PeerWindow, "__init__", lambda *args: args[-1])

    def columns(ctx, side):
        global_array = np.arange(side * side, dtype="f8").reshape(side, side)
        local_block = filled(gpu, global_array[box_slices(ctx.box_of((0,), global_array.shape))])
        b = ctx.redistribute(local_block, (1,), (0,), shape=global_array.shape)
        overwritten(gpu, local_block, -1)
        box = box_slices(ctx.box_of((1,), global_array.shape))
        assert np.array_equal(b.get(), global_array[box])

    def several(ctx, local_block):
        for side in (4, 8, 4, 6, 16, 16, 4):
            columns(ctx, side)

    run(gpu, PAIR, several)
    assert sorted({*sizes_bytes}) == [32, 128, 512]
    assert len(sizes_bytes) == 6


def test_larger_blocks_are_read_in_place(gpu, in_place, monkeypatch):
    tune(monkeypatch, window_bytes=40 * 28 * 8)  # of the second rank
    run(gpu, PAIR, lambda ctx, local_block: ctx.redistribute(filled(gpu, local_block), (1,)))
    assert not in_place
    tune(monkeypatch, window_bytes=40 * 28 * 8 - 1)
    run(gpu, PAIR, lambda ctx, local_block: ctx.redistribute(filled(gpu, local_block), (1,)))
    assert len(in_place) == 2


@pytest.mark.parametrize("obstacle", [OwnEvents, PeerMemory])
def test_a_rank_that_shares_no_memory(gpu, in_place, monkeypatch, obstacle):
    """No rank uses windows then: all of them agree."""
    fail_on_rank(monkeypatch, obstacle, "__init__", 2)
    run(gpu, SLABS, partial(both_ways, gpu))
    assert len({*in_place}) == 4
