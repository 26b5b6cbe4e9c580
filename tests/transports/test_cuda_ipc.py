"""The bookkeeping of mappings, with a CUDA runtime that only counts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import TransferError
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.cuda_ipc import Mappings, array_at


class FakeRuntime:
    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self):
        self.open = {}  # address -> handle
        self.refused = set()  # handles
        self.in_the_way = {}  # handle -> address that must be closed first
        self._next = 4096

    def ipcOpenMemHandle(self, handle):  # noqa: N802
        if handle in self.refused or self.in_the_way.get(handle) in self.open:
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


def test_an_allocation_is_opened_once(runtime):
    mappings = Mappings()
    first = mappings.acquire("p", 1, "aa")
    again = mappings.acquire("p", 1, "aa")
    assert first is again
    assert len(runtime.open) == len(mappings) == 1


def test_processes_and_buffers_are_told_apart_though_handles_are_alike(runtime):
    mappings = Mappings()
    found = {
        id(mappings.acquire(process, buffer_id, "aa"))
        for process in ("p", "q")
        for buffer_id in (1, 2)
    }
    assert len(found) == len(runtime.open) == 4


def test_a_mapping_is_kept_while_it_is_read_and_closed_after(runtime):
    mappings = Mappings()
    read, idle = mappings.acquire("p", 1, "aa"), mappings.acquire("p", 2, "bb")
    other = mappings.acquire("q", 1, "cc")
    idle.release()
    mappings.retire("p")
    mappings.close_retired()
    assert set(runtime.open) == {read.address, other.address}
    read.release()
    assert set(runtime.open) == {other.address}
    other.release()
    assert set(runtime.open) == {other.address}, "its process is still there"
    mappings.retire(None)
    mappings.close_retired()
    assert runtime.open == {}
    assert len(mappings) == 0


def test_unused_mappings_are_bounded_the_oldest_go_first(runtime, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_MOST_OPEN", 3)
    mappings = Mappings()
    kept = mappings.acquire("p", 0, "00")
    for buffer_id in range(1, 9):
        mappings.acquire("p", buffer_id, f"{buffer_id:02x}").release()
    assert kept.address in runtime.open, "it is in use"
    assert {handle.hex() for handle in runtime.open.values()} == {"00", "06", "07", "08"}


def test_what_is_in_the_way_is_closed(runtime):
    mappings = Mappings()
    old = mappings.acquire("p", 1, "aa")
    used = mappings.acquire("p", 2, "bb")
    old.release()
    runtime.in_the_way[bytes.fromhex("cc")] = old.address
    new = mappings.acquire("p", 3, "cc")
    assert set(runtime.open) == {used.address, new.address}


def test_a_handle_that_does_not_open(runtime):
    mappings = Mappings()
    runtime.refused.add(bytes.fromhex("aa"))
    with pytest.raises(TransferError, match="cannot be mapped: cudaErrorInvalidValue"):
        mappings.acquire("p", 1, "aa")
    assert len(mappings) == 0
    runtime.refused.clear()
    assert mappings.acquire("p", 1, "aa").users == 1


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
    made = {}

    def unowned(address, size_bytes, owner, device):
        made.update(address=address, size_bytes=size_bytes)

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
    assert (made["address"], made["size_bytes"]) == (low, high - low)
    assert made["address"] + offset == first
    assert (shape, dtype, strides) == (view.shape, view.dtype, view.strides)
