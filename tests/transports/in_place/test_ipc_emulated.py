"""``ipc`` without GPUs: what is mapped is the holder's own NumPy arrays, while they are there."""

import fcntl
import json
import os
import sys
import threading
import weakref
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.errors import BlockMismatchError, Obstacle, TransferError
from dask_p2p.transports import cuda_ipc, same_host
from dask_p2p.transports import in_place as ipc
from dask_p2p.transports.in_place import IpcTransport
from dask_p2p.transports.leases import OWNER
from dask_p2p.transports.rpc import ask_and_wait
from dask_p2p.transports.same_host import Descriptor
from tests.interprocess.test_cuda_ipc import FakeRuntime
from tests.transports.conformance import Conformance
from tests.transports.loopback import wait_until
from tests.transports.reading import open_block
from tests.usage import usage

TRANSPORT = IpcTransport
MIB = 2**20


class Device:
    """Allocations of a GPU, known by their handles."""

    def __init__(self):
        self.runtime = FakeRuntime()
        self.allocations = {}  # handle -> weak reference to the array in it
        self.fails = False

    def export(self, block):
        number = len(self.allocations)
        handle = number.to_bytes(4, "big")
        self.allocations[handle] = weakref.ref(block)
        return cuda_ipc.IpcHandle("aa", handle.hex(), number, number * MIB, MIB, 0)

    def array_at(self, address, shape, strides, dtype):
        if self.fails:
            raise RuntimeError("the device is lost")
        block = self.allocations[self.runtime.open[address]]()
        assert block is not None, "the holder has let go of what is mapped"
        assert (block.shape, block.strides, block.dtype) == (shape, strides, dtype)
        return block


@pytest.fixture
def device(monkeypatch):
    device = Device()
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=device.runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_ipc, "export", device.export)
    monkeypatch.setattr(cuda_ipc, "array_at", device.array_at)
    monkeypatch.setattr(CUPY, "empty", np.empty)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda: "aa")
    monkeypatch.setattr(cuda_ipc, "peer_obstacle", lambda gpu: None)
    monkeypatch.setattr(ipc, "wait_until_written", lambda blocks, any_stream: None)
    monkeypatch.setattr(same_host, "backend_for", lambda block: SimpleNamespace(name="cupy"))
    describe = IpcTransport.describe
    pids = {"reader": os.getpid(), "holder": os.getppid()}

    def other_process(transport):
        name = transport.worker.address
        return replace(describe(transport), pid=pids[name], process=name)

    monkeypatch.setattr(IpcTransport, "describe", other_process)
    monkeypatch.setattr(cuda_ipc, "MAPPINGS", cuda_ipc.Mappings())
    return device


@pytest.fixture
def setup(device, setup):
    """The hosts, once they have the device."""
    setup.kind, setup.device = "cupy", device
    setup.put = lambda key, array: setup.host.blocks.update({key: array.copy(order="K")})
    return setup


def nothing_is_kept(setup, key):
    """No lease and no user of a mapping."""
    setup.drop(key)
    setup.reader.mappings.retire(None)  # none is kept for the next user
    setup.reader.mappings.close_unused()
    return len(setup.serving.directory) == 0 and len(setup.reader.mappings) == 0


TOO_FAR = Obstacle("too-far", "too far apart", "Bring them together")


class TestIpcEmulated(Conformance):
    is_eager = True

    def test_a_holder_that_ended_while_it_was_read(self, setup, block):
        remote = self.open(setup, *block)
        remote.request()
        remote.confirm()
        setup.serving.directory.lock(OWNER, fcntl.F_UNLCK)  # as the kernel does for the dead
        with pytest.raises(TransferError, match=r"holder ended while block .* was read"):
            remote.confirm()
        remote.close()
        error = self.refused(setup, block, r"published and withdrew block .* 3 times")
        assert error.scope == "region"  # other blocks may still be read in this way

    @pytest.mark.parametrize("fails", [False, True])
    def test_memory_is_unmapped_before_its_lease_ends(self, setup, monkeypatch, fails):
        """The holder may free it as soon as that has ended; it ends, whatever else fails."""
        array = np.arange(90_000.0).reshape(300, 300)  # most of its allocation
        setup.put("large", array)
        opened = self.open(setup, "large", array, ((5, 6), (0, 10)))
        setup.drop("large")
        (published,) = setup.serving.directory.withdrawn
        unmap, leased = setup.device.runtime.ipcCloseMemHandle, []

        def unmap_and_look(address):
            unmap(address)
            leased.append(setup.serving.directory.is_locked(published.entry))
            if fails:
                raise RuntimeError("the device is lost")

        monkeypatch.setattr(setup.device.runtime, "ipcCloseMemHandle", unmap_and_look)
        with pytest.raises(RuntimeError, match="device is lost") if fails else nullcontext():
            opened.close()
        assert leased == [True]
        assert setup.serving.directory.expire(60) == 0

    @pytest.mark.parametrize(
        ("change", "words"),
        [({"shape": (10, 6)}, r"it is .*\(10, 6\)"), ({"dtype": "int64 <i8"}, "it is int64")],
        ids=str,
    )
    def test_a_descriptor_that_is_not_of_the_block(self, setup, block, monkeypatch, change, words):
        monkeypatch.setattr(
            Descriptor,
            "text",
            lambda published: json.dumps({**asdict(published), **change}).encode(),
        )
        self.refused(setup, block, words, BlockMismatchError)
        assert setup.device.runtime.open == {}, "nothing was mapped"
        assert nothing_is_kept(setup, block[0])

    @pytest.mark.parametrize("failing_call", ["it is not mapped", "it is not made an array"])
    def test_memory_that_cannot_be_had_leaves_nothing_behind(self, setup, block, failing_call):
        key, array = block
        if failing_call == "it is not mapped":
            setup.device.runtime.refused.add(bytes(4))
        else:
            setup.device.fails = True
        with pytest.raises((TransferError, RuntimeError), match=r"cannot be mapped|device is lost"):
            self.open(setup, key, array)
        assert nothing_is_kept(setup, key)

    def test_leaving_closes_mappings_that_are_not_used(self, setup, block, loop):
        remote = self.open(setup, *block)
        loop.call(setup.reader.on_worker_left, setup.holder)
        assert setup.reader.boot_id(setup.holder) is None, "a new worker may have its address"
        assert len(setup.device.runtime.open) == 1, "it is being read"
        remote.close()
        wait_until(lambda: setup.device.runtime.open == {})
        assert usage(setup.reader)["mapped"] == 0

    def test_nothing_is_published_before_its_values_are_there(self, setup, block, monkeypatch):
        published = []
        monkeypatch.setattr(
            ipc,
            "wait_until_written",
            lambda blocks, any_stream: published.append(len(setup.serving.directory)),
        )
        self.read(setup, *block, ((0, 6), (0, 10)))
        assert published == [0]

    @pytest.mark.parametrize("error", [OSError("full"), ValueError("closed"), TransferError("no")])
    def test_what_cannot_be_published_does_not_keep_a_task_from_its_work(
        self, setup, block, monkeypatch, error
    ):
        monkeypatch.setattr(cuda_ipc, "export", Mock(side_effect=error))
        setup.serving.publish(setup.host.blocks)
        self.refused(setup, block, f"holder could not send .*{error}")

    def test_an_event_loop_that_is_stuck(self, setup, loop):
        go_on = threading.Event()
        loop.loop.call_soon_threadsafe(go_on.wait, 60)
        with pytest.raises(TransferError, match="the worker's event loop did not respond"):
            ask_and_wait(setup.reader.worker, "holder", "p2p_ipc_peer", -9.8, "where it runs")
        go_on.set()

    def test_a_holder_that_cannot_describe_itself_is_asked_again(self, setup):
        real, reply = (
            setup.host.handlers["p2p_ipc_peer"],
            {"status": "error", "message": "no folder"},
        )
        setup.host.handlers["p2p_ipc_peer"] = AsyncMock(return_value=reply)
        obstacle = setup.reader.obstacle("holder", "cupy", np.dtype("f8"))
        assert "holder could not send its process: no folder" in obstacle.text
        setup.host.handlers["p2p_ipc_peer"] = real
        assert setup.reader.obstacle("holder", "cupy", np.dtype("f8")) is None

    def test_a_holder_that_may_not_be_mapped_is_not(self, setup, block, monkeypatch):
        monkeypatch.setattr(cuda_ipc, "peer_obstacle", lambda gpu: TOO_FAR)
        assert setup.reader.obstacle("holder", "cupy", np.dtype("f8")) == TOO_FAR
        with pytest.raises(TransferError, match="holder cannot be read in place: too far apart"):
            self.open(setup, *block)
        assert setup.device.runtime.open == {}

    def test_closing_lets_go_of_everything(self, setup, block, loop):
        key, array = block
        self.read(setup, key, array, ((0, 6), (0, 10)))
        assert usage(setup.reader)["mapped"] == usage(setup.serving)["published"] == 1
        assert setup.serving.directory.leased_bytes == array.nbytes
        loop.run(setup.reader.close())
        loop.run(setup.serving.close())
        assert setup.serving.expiring.cancelled()
        assert setup.device.runtime.open == {}
        assert usage(setup.serving)["published"] == setup.serving.directory.leased_bytes == 0


def test_a_block_that_is_spilled_to_host_memory_comes_another_way(setup, monkeypatch):
    array = np.arange(6.0)
    setup.put("block", array)
    monkeypatch.setattr(same_host, "backend_for", lambda block: NUMPY)

    def read():
        request_fields = "holder", "block", array.shape, array.dtype, "cupy"
        with closing(open_block(setup.reader, *request_fields, [((0, 6),)], options())) as remote:
            return remote.whole(setup.to_numpy, 20)

    with pytest.raises(
        TransferError, match=r"is for another transport: .* in memory of numpy arrays"
    ):
        read()
    assert usage(setup.serving) == {"published": 0, "mapped": 0}
    monkeypatch.setattr(same_host, "backend_for", lambda block: CUPY)
    np.testing.assert_array_equal(read(), array)  # Dask has brought it back
