"""``ipc`` between two processes on two GPUs."""

import asyncio
import multiprocessing
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.transports.in_place import IpcTransport
from tests.support import BOUND_S
from tests.transports.conformance import Conformance
from tests.transports.loopback import EventLoop, LoopbackHost, wait_until

OPTIONS = replace(options(), retain_blocks_s=60.0)


def hold(connection, folder):
    """Be the holder: a process with a GPU of its own that does what the other end says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    # Another order, as dask-cuda's workers have.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(visible[:2]))
    import cupy

    loop = EventLoop()
    host = LoopbackHost("holder", loop.loop, {}, folder)
    transport = IpcTransport(host, OPTIONS)
    host.handlers.update(transport.handlers())
    while (order := connection.recv()) is not None:
        (order_name, args), result = order, None
        try:
            if order_name == "put":
                key, array = args
                loop.call(transport.on_released, key)
                host.blocks[key] = cupy.asarray(array, order="K")
            elif order_name == "put rows":  # all of one allocation
                for key, row in enumerate(cupy.asarray(args)):
                    loop.call(transport.on_released, key)
                    host.blocks[key] = row
            elif order_name == "give memory back":
                cupy.get_default_memory_pool().free_all_blocks()
            elif order_name == "drop":
                del host.blocks[args]
                loop.call(transport.on_released, args)
            elif order_name == "call":
                op, kwargs = args
                result = loop.run(host.handlers[op](**kwargs))
            elif order_name == "close":
                result = loop.run(transport.close())
            connection.send((True, result))
        except Exception as exc:
            connection.send((False, repr(exc)))


class RemoteHost:
    """The holder, seen from here."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=hold, args=(child_end, folder))
        self._process.start()
        self._lock = threading.Lock()
        self.calls = []

    def ask(self, order_name, args=None):
        with self._lock:
            self._connection.send((order_name, args))
            assert self._connection.poll(BOUND_S), "the holder does not answer"
            good, result = self._connection.recv()
        assert good, result
        return result

    def close(self):
        self._connection.send(None)
        self._process.join(BOUND_S)


class Host(LoopbackHost):
    async def call(self, address, op, **kwargs):
        peer = self._network[address]
        peer.calls.append(op)
        return await asyncio.to_thread(peer.ask, "call", (op, kwargs))


@pytest.fixture(scope="module")
def pair(loop, tmp_path_factory):
    network = {}
    reader_host = Host("reader", loop.loop, network, tmp_path_factory.mktemp("reader"))
    network["holder"] = RemoteHost(str(tmp_path_factory.mktemp("holder")))
    yield reader_host, network["holder"]
    network["holder"].close()
    reader_host.close()


@pytest.fixture
def setup(pair, loop, tmp_path_factory):
    reader_host, holder_host = pair
    reader = IpcTransport(reader_host, OPTIONS)
    holder_host.calls.clear()
    yield SimpleNamespace(
        reader=reader,
        holder="holder",
        kind="cupy",
        put=lambda key, array: holder_host.ask("put", (key, array)),
        drop=lambda key: holder_host.ask("drop", key),
        close_holder=lambda: holder_host.ask("close"),
        to_numpy=lambda array: array.get(),
        there=holder_host,
    )
    loop.run(reader.close())


@pytest.mark.gpu(2)
@pytest.mark.filterwarnings("default")
class TestIpc(Conformance):
    is_eager = True

    def open(self, setup, key, array, *boxes, **options):
        assert setup.reader.obstacle(setup.holder, setup.kind, np.dtype("f8")) is None
        return super().open(setup, key, array, *boxes, **options)

    # The holder is one process for all tests: this one, which ends it, comes last (see below).
    test_a_holder_that_is_closing_refuses = None

    def test_an_allocation_is_mapped_once(self, setup):
        array = np.arange(80.0).reshape(5, 4, 4)
        setup.there.ask("put rows", array)
        for i in range(5):
            region = self.read(setup, i, array[i], ((0, 4), (0, 4)))
            np.testing.assert_array_equal(region, array[i])
        assert len(setup.reader.mappings) == 1

    def test_memory_that_comes_and_goes(self, setup):
        # Each time a new allocation, perhaps at the place of one that is still mapped here.
        for i in range(100):
            array = np.full((64, 64), float(i))
            setup.put("block", array)
            region = self.read(setup, "block", array, ((0, 64), (0, 64)))
            np.testing.assert_array_equal(region, array)
            setup.drop("block")
            setup.there.ask("give memory back")

    def test_leaving_closes_mappings_that_are_not_used(self, setup, block, loop):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        in_use = remote.request().result(BOUND_S)
        loop.call(setup.reader.on_worker_left, setup.holder)
        np.testing.assert_array_equal(in_use.get(), array)  # still mapped
        assert len(setup.reader.mappings) == 1
        remote.close()
        wait_until(lambda: len(setup.reader.mappings) == 0)

    def test_zz_a_holder_that_is_closing_refuses(self, setup, block):
        Conformance.test_a_holder_that_is_closing_refuses(self, setup, block)
