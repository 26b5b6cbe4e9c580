"""The bookkeeping of mappings, with a CUDA runtime that only counts."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import TransferError
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.cuda_ipc import IpcHandle, Mappings, array_at
from dask_p2p.transports.process_memory import Peer
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

MIB = 2**20
GPU_BYTES = 2**30


class FakeRuntime:
    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self):
        self.open = {}  # address -> handle
        self.refused = set()  # handles
        self.obstacles = {}  # handle -> address that must be closed first
        self._next = 4096

    def ipcOpenMemHandle(self, handle):  # noqa: N802
        if handle in self.refused or self.obstacles.get(handle) in self.open:
            raise self.CUDARuntimeError("cudaErrorInvalidValue")
        self._next += 4096
        self.open[self._next] = handle
        return self._next

    def ipcCloseMemHandle(self, address):  # noqa: N802
        del self.open[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = FakeRuntime()
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return runtime


@pytest.fixture
def mappings(runtime):
    """They look after what is unused by a thread of their own, until they are closed."""
    mappings = Mappings()
    yield mappings
    mappings.close()


def ipc_handle(buffer_id, handle="aa", base=None, nbytes=MIB):
    """Of a block in an allocation; by default allocations do not overlap."""
    base = buffer_id * GPU_BYTES if base is None else base
    return IpcHandle("gpu", handle, buffer_id, base, nbytes, 0)


def peer(process, pid=0):
    """A process; by default the kernel knows none of this number."""
    return Peer("boot", "namespace", 0, pid, process, "folder", "gpu")


def acquire(mappings, process, *args, block_bytes=1, **fields):
    return mappings.acquire(peer(process), ipc_handle(*args, **fields), block_bytes)


def opened(runtime):
    return {handle.hex() for handle in runtime.open.values()}


@pytest.fixture
def ending(runtime, mappings, sleeper):
    """What is mapped of a process that is killed in the test; its name is used by no other test."""
    return peer(f"sleeper-{sleeper.pid}", sleeper.pid)


def test_what_is_read_of_a_process_that_has_ended_is_closed_after(
    runtime, mappings, sleeper, ending
):
    """A killed worker's nanny starts another one, which wants as much memory."""
    read, idle = (mappings.acquire(ending, ipc_handle(n, f"{n:02}"), 1) for n in (1, 2))
    q_mapping = acquire(mappings, "q", 1, "cc")
    for mapping in (idle, q_mapping):
        mappings.release(mapping)
    assert len(runtime.open) == 3, "they are kept for the next user"
    sleeper.kill()
    wait_until(lambda: set(runtime.open) == {read.address, q_mapping.address})
    mappings.release(read)
    assert set(runtime.open) == {q_mapping.address}


def test_a_process_that_ends_while_its_memory_is_mapped(
    runtime, mappings, sleeper, ending, monkeypatch
):
    """Its end is found before there is a mapping that could be closed."""
    map_it = runtime.ipcOpenMemHandle

    def map_late(handle):
        address = map_it(handle)
        sleeper.kill()
        wait_until(lambda: cuda_ipc.PROCESSES.has_ended(ending.process))
        return address

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", map_late)
    mapping = mappings.acquire(ending, ipc_handle(1), 1)
    assert set(runtime.open) == {mapping.address}
    mappings.release(mapping)
    assert runtime.open == {}


def test_nothing_is_mapped_of_a_process_that_has_ended(runtime, mappings, sleeper, ending):
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(TransferError, match=f"process {sleeper.pid} has ended"):
        mappings.acquire(ending, ipc_handle(1), 1)
    assert runtime.open == {}


def test_an_allocation_of_one_block_is_closed_with_its_last_user(runtime, mappings):
    """Else its memory would stay taken when its owner frees it with the block."""
    first = acquire(mappings, "p", 1, nbytes=MIB, block_bytes=MIB - 100)
    again = acquire(mappings, "p", 1, nbytes=MIB, block_bytes=MIB - 100)
    mappings.release(first)
    assert len(runtime.open) == 1
    mappings.release(again)
    assert runtime.open == {}
    assert len(mappings) == 0


def test_what_is_used_no_more_is_closed_by_itself(runtime, monkeypatch):
    monkeypatch.setattr("dask_p2p.transports.cuda_ipc.UNUSED_S", 0.1)
    mappings = Mappings()
    used, idle = acquire(mappings, "p", 0, "00"), acquire(mappings, "p", 1, "01")
    mappings.release(idle)
    wait_until(lambda: opened(runtime) == {"00"})
    mappings.release(used)
    wait_until(lambda: opened(runtime) == set())
    mappings.close()


def test_an_allocation_in_the_place_of_a_freed_one_is_not_read_through_the_old_mapping(
    runtime, mappings
):
    """The driver may answer with the mapping that it has: closed first, it cannot."""
    old = acquire(mappings, "p", 1, "aa", base=4096, nbytes=MIB)
    elsewhere = acquire(mappings, "q", 1, "bb", base=4096, nbytes=MIB)
    mappings.release(old)
    new = acquire(mappings, "p", 2, "aa", base=4096 + MIB - 1, nbytes=MIB)
    assert set(runtime.open) == {elsewhere.address, new.address}


def test_an_allocation_that_is_read_cannot_have_been_freed(runtime, mappings):
    acquire(mappings, "p", 1, "aa", base=4096, nbytes=MIB)
    with pytest.raises(TransferError, match="freed an allocation that is still being read"):
        acquire(mappings, "p", 2, "bb", base=4096, nbytes=MIB)
    assert opened(runtime) == {"aa"}


def test_nobody_waits_for_the_mapping_of_another_process(runtime, mappings, monkeypatch):
    """To open a handle can take seconds."""
    slow, go_on = threading.Event(), threading.Event()
    map_it = runtime.ipcOpenMemHandle

    def map_slowly(handle):
        if handle.hex() == "aa":
            slow.set()
            go_on.wait(BOUND_S)
        return map_it(handle)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", map_slowly)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(acquire, mappings, "p", 1, "aa")
        assert slow.wait(BOUND_S)
        mappings.release(acquire(mappings, "q", 1, "bb"))
        assert opened(runtime) == {"bb"}
        go_on.set()
    assert len(runtime.open) == 2, "it was opened once"


def test_what_is_in_the_way_is_closed(runtime, mappings):
    old = acquire(mappings, "p", 1, "aa")
    used = acquire(mappings, "p", 2, "bb")
    mappings.release(old)
    runtime.obstacles[bytes.fromhex("cc")] = old.address
    new = acquire(mappings, "p", 3, "cc")
    assert set(runtime.open) == {used.address, new.address}


@pytest.mark.parametrize(
    "view",
    [
        np.zeros((4, 6))[1:3, 2:5],
        np.zeros((4, 6)).T,
        np.zeros((4, 6))[::-1, ::-2],
        np.zeros((4, 6))[:, ::-1][2],
        np.zeros(()),
    ],
    ids=lambda v: f"{v.shape}-{v.strides}",
)
def test_an_array_covers_the_memory_of_its_elements(monkeypatch, view):
    borrowed = {}

    def unowned(address, size_bytes, owner, device):
        borrowed.update(address=address, size_bytes=size_bytes)

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0),
        UnownedMemory=unowned,
        MemoryPointer=lambda memory, offset: offset,
    )
    fake = SimpleNamespace(cuda=cuda, ndarray=lambda *args: args)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    first = view.__array_interface__["data"][0]
    shape, dtype, offset, strides = array_at(first, view.shape, view.strides, view.dtype)
    low, high = np.lib.array_utils.byte_bounds(view)
    assert (borrowed["address"], borrowed["size_bytes"]) == (low, high - low)
    assert borrowed["address"] + offset == first
    assert (shape, dtype, strides) == (view.shape, view.dtype, view.strides)
