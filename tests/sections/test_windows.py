"""Memory of another member, as it is mapped; windows themselves are tested with rims."""

from __future__ import annotations

import pytest

from dask_p2p.errors import TransferError
from dask_p2p.interprocess.cuda_ipc import Place
from dask_p2p.sections import windows
from dask_p2p.sections.devices import Gpu
from dask_p2p.sections.windows import OwnEvents, PeerMemory
from tests.sections.emulated import emulated_gpu


@pytest.fixture
def calls(monkeypatch):
    """What the driver is asked to open and to close."""
    found, runtime = [], emulated_gpu(monkeypatch).cupy.cuda.runtime
    monkeypatch.setattr(
        runtime, "ipcOpenMemHandle", lambda handle: found.append(handle.hex()) or 2**20
    )
    monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda address: found.append("closed"))
    return found


def place(number, base, offset_bytes=0):
    return Place("gpu", f"{number:02}", number, base, 1000, offset_bytes)


def test_an_allocation_is_mapped_once(calls):
    gpu = Gpu(None)
    memory = PeerMemory(gpu, OwnEvents(gpu, 2).told(0))
    for offset_bytes in (0, 300, 0):
        assert memory.mapped(place(1, 5000, offset_bytes), 800) == 2**20 + offset_bytes
    assert calls == ["01"]
    memory.mapped(place(2, 6000), 800)
    assert calls == ["01", "02"]
    memory.close()
    assert calls == ["01", "02", "closed", "closed"]


def test_an_allocation_in_the_place_of_one_that_is_gone(calls):
    """CuPy's own pool gives memory back when there is too little of it."""
    gpu = Gpu(None)
    memory = PeerMemory(gpu, OwnEvents(gpu, 2).told(0))
    memory.mapped(place(1, 5000), 800)
    memory.mapped(place(2, 5500), 800)
    assert calls == ["01", "closed", "02"]
    memory.mapped(place(3, 9000), 800)
    assert calls == ["01", "closed", "02", "03"]
    memory.close()
    assert calls == ["01", "closed", "02", "03", "closed", "closed"]


def test_what_keeps_it_from_being_read_is_named(calls, monkeypatch):
    gpu = Gpu(None)
    told = OwnEvents(gpu, 2).told(0)
    monkeypatch.setattr(windows, "separation", lambda own, peer: "they share a process")
    with pytest.raises(TransferError, match="they share a process"):
        PeerMemory(gpu, told)
    monkeypatch.setattr(windows, "separation", lambda own, peer: None)
    monkeypatch.setattr(windows.cuda_ipc, "peer_obstacle", lambda gpu: f"no access to {gpu}")
    with pytest.raises(TransferError, match="no access to gpu"):
        PeerMemory(gpu, told)
