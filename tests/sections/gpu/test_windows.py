"""Mapped memory of another rank. `test_halo_windows` tests windows."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from dask_p2p.errors import DeviceLostError, TransferError
from dask_p2p.sections.gpu import windows
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.transports.cuda_ipc import IpcHandle
from dask_p2p.transports.process_memory import Peer
from tests.sections.emulated import emulated_gpu
from tests.transports.loopback import wait_until


@pytest.fixture
def calls(monkeypatch):
    """The driver's calls that open and close memory."""
    runtime_calls, runtime = [], emulated_gpu(monkeypatch).cupy.cuda.runtime
    monkeypatch.setattr(
        runtime, "ipcOpenMemHandle", lambda handle: runtime_calls.append(handle.hex()) or 2**20
    )
    monkeypatch.setattr(
        runtime, "ipcCloseMemHandle", lambda address: runtime_calls.append("closed")
    )
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
            memory = PeerMemory(gpu, descriptor)
            gpu.peers.append(memory)
            waiting(monkeypatch, gpu.module.cuda.runtime, ends=False)
            sleeper.kill()

    with pytest.raises(
        DeviceLostError, match=f"an event of process {sleeper.pid}, which has ended"
    ):
        work()
