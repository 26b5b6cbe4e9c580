from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest

from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import TransferError
from dask_p2p.interprocess.messenger import Message
from dask_p2p.transports.footprint import ByteBudget
from dask_p2p.transports.packed import ucx as ucx_module
from dask_p2p.transports.packed.stream import Outgoing
from dask_p2p.transports.packed.ucx import UcxOptions, UcxTransport
from tests.support import BOUND_S, tune, with_section
from tests.transports.loopback import wait_until
from tests.transports.packed.conformance import PackedConformance
from tests.usage import usage

TRANSPORT = UcxTransport


def resting(loop):
    """Tasks of an event loop that have UCX rest now and then."""
    tasks = asyncio.all_tasks(loop.loop)
    return [task for task in tasks if task.get_coro().__qualname__ == "UcxTransport._rest"]


class TestUcx(PackedConformance):
    def test_ucx_rests_when_there_is_nothing_to_do(self, setup, block, monkeypatch):
        tune(monkeypatch, ucx_rest_s=0.05)
        key, array = block
        for _ in range(2):
            self.read(setup, key, array, ((0, 1), (0, 1)))
            for transport in (setup.reader, setup.serving):
                messenger = transport.messenger()
                wait_until(lambda messenger=messenger: messenger.rest(3600))

    def test_after_it_is_closed_nothing_is_started(self, setup, loop, monkeypatch):
        monkeypatch.setattr(ucx_module, "Messenger", None)  # which cannot be called
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
            with pytest.raises(TransferError, match="the worker is closing"):
                transport.messenger()

    def test_no_thread_and_no_timer_is_left(self, setup, loop, block):
        key, array = block
        self.read(setup, key, array, ((0, 1), (0, 1)))
        assert len(resting(loop)) == 2
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
        wait_until(lambda: not resting(loop))
        wait_until(lambda: not [t for t in threading.enumerate() if "p2p-ucx-send" in t.name])

    def test_closing_waits_for_what_is_being_started(self, setup, loop, monkeypatch):
        starting, go_on = threading.Event(), threading.Event()
        closed = []

        def start(device):
            starting.set()
            assert go_on.wait(BOUND_S)
            return SimpleNamespace(
                close=lambda: closed.append(True), under_way=0, rest=lambda idle_s: False
            )

        monkeypatch.setattr(ucx_module, "Messenger", start)
        with ThreadPoolExecutor(1) as threads:
            started = threads.submit(setup.reader.messenger)
            assert starting.wait(BOUND_S)
            closing = asyncio.run_coroutine_threadsafe(setup.reader.close(), loop.loop)
            wait_until(lambda: setup.reader.is_closed)
            time.sleep(0.1)  # for it to get to where it waits
            go_on.set()
            started.result(BOUND_S)
            closing.result(BOUND_S)
        assert closed == [True]
        wait_until(lambda: not resting(loop))  # nobody looks after it any more

    def test_a_holder_that_may_not_send_unencrypted(self, setup, block):
        key, array = block
        setup.host.encrypted_only = True
        with pytest.raises(TransferError, match="requires encryption"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_a_reader_that_nobody_reaches(self, setup, loop, block):
        key, _ = block
        request = {
            "blocks": [(key, (6, 10))],
            "parts": [(0, ((0, 1), (0, 10)))],
            "dtype": "float64 <f8",
            "item_bytes": 8,
            "where": ([1], "nobody", 0),
            "wait_s": 60.0,
        }
        reply = loop.run(setup.host.handlers["p2p_ucx_read"](**request))
        assert reply["status"] == "error"
        assert "nobody" in reply["message"]
        assert usage(setup.serving)["messages"] == 0

    def test_a_reader_without_an_address(self, setup, block):
        async def fail():
            return {"status": "error", "message": "UCX has not started"}

        setup.reader.worker.handlers["p2p_ucx_peer"] = fail
        key, array = block
        with pytest.raises(TransferError, match="could not send its UCX address: UCX has not"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_a_message_that_never_comes(self, setup, block):
        async def lie(**kwargs):
            return {"status": "ok", "parts": [{"status": "ok"}]}

        setup.host.handlers["p2p_ucx_read"] = lie
        key, array = block
        with pytest.raises(TransferError, match=r"block .* did not arrive: no message within"):
            self.read(setup, key, array, ((0, 1), (0, 1)), request_timeout_s=0.2)

    def test_a_holder_that_stops_in_the_middle(self, setup, block):
        """What comes is good; what does not ends with the holder's reason, long before time."""
        key, array = block
        take, packed = setup.serving.buffers["numpy"].take, []

        def fail_at_third(shape, dtype):
            packed.append(shape)
            if len(packed) == 3:
                raise MemoryError("no room")
            return take(shape, dtype)

        setup.serving.buffers["numpy"].take = fail_at_third
        remote = self.rows(setup, key, array, host_part_bytes=128)
        for i in range(2):
            np.testing.assert_array_equal(remote.request().result(BOUND_S), array[i : i + 1])
        with pytest.raises(TransferError, match="no room"):
            remote.request().result(BOUND_S)
        remote.close()
        wait_until(lambda: usage(setup.reader)["messages"] == 0)

    def rows(self, setup, key, array, **parts):
        rows = [((i, i + 1), (0, array.shape[1])) for i in range(array.shape[0])]
        sections = with_section(self.options, UcxOptions, **parts).sections
        return self.open(setup, key, array, *rows, sections=sections)

    def test_nothing_is_waited_for_where_a_row_ends_in_an_empty_region(self, setup):
        array = np.arange(400, dtype="u1").reshape(2, 200)
        setup.put("block", array)
        sections = with_section(self.options, UcxOptions, host_part_bytes=200).sections
        boxes = [((0, 1), (0, 200)), ((1, 2), (0, 200)), ((2, 2), (0, 200))]
        remote = self.open(setup, "block", array, *boxes, sections=sections, request_timeout_s=20.0)
        for (rows, _), region in zip(boxes, [remote.request() for _ in boxes], strict=True):
            np.testing.assert_array_equal(region.result(BOUND_S), array[slice(*rows)])
        remote.close()

    def test_a_message_is_packed_while_those_before_are_sent(self, setup, monkeypatch):
        array = np.arange(4 * 2**14).reshape(4, 2**14)  # rows that UCX does not send at once
        setup.put("block", array)
        packed, packing, result = [], Outgoing.pack, Message.result

        def pack(target, *args):
            packing(target, *args)
            packed.append(target)

        def wait(message, timeout_s):
            wait_until(lambda: len(packed) >= 3)
            result(message, timeout_s)

        monkeypatch.setattr(Outgoing, "pack", pack)
        monkeypatch.setattr(Message, "result", wait)
        remote = self.rows(setup, "block", array, host_part_bytes=2**17)
        requests = [remote.request(), remote.request()]
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.result(BOUND_S), array[i : i + 1])
        remote.close()

    def test_memory_is_given_back_when_nothing_is_copied_there_any_more(self, setup, monkeypatch):
        array = np.arange(2 * 2**14).reshape(2, 2**14)
        setup.put("block", array)
        make_room, pack, waited = Outgoing.begin, Outgoing.pack, []

        def packed(target, *args):
            pack(target, *args)
            memory = ref(target.memory(NUMPY))
            target.wait_until_packed = lambda: waited.append(memory() is not None)

        def begin(target, asked, reserved):
            if waiting:
                raise TransferError("no more")
            waiting.append(target)
            make_room(target, asked, reserved)

        waiting = []
        monkeypatch.setattr(Outgoing, "pack", packed)
        monkeypatch.setattr(Outgoing, "begin", begin)
        remote = self.rows(setup, "block", array, host_part_bytes=2**17)
        with pytest.raises(TransferError, match="no more"):
            remote.request().result(BOUND_S)
        remote.close()
        assert waited == [True]

    def test_messages_come_where_there_is_room_for_one_alone(self, setup):
        array = np.arange(4 * 2**14).reshape(4, 2**14)
        setup.put("block", array)
        setup.serving.packed = ByteBudget(2**17)
        remote = self.rows(setup, "block", array, host_part_bytes=2**17)
        requests = [remote.request() for _ in range(4)]
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.result(BOUND_S), array[i : i + 1])
        remote.close()
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)
        assert setup.host.calls.count("p2p_ucx_read") == 1

    def test_a_worker_that_left_and_came_back(self, setup, block):
        key, array = block
        asked = setup.reader.worker.calls
        for times in (1, 2):
            self.read(setup, key, array, ((0, 1), (0, 10)))
            assert len(setup.serving.messenger().endpoints) == 1
            for transport, other in ((setup.reader, "holder"), (setup.serving, "reader")):
                transport.worker.loop.call_soon_threadsafe(transport.on_worker_left, other)
            wait_until(lambda: setup.serving.messenger().endpoints == {})
            assert asked.count("p2p_ucx_peer") == times, "its address is another one, perhaps"
