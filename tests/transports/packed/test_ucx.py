import asyncio
import itertools
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock
from weakref import ref

import numpy as np
import pytest

from dask_p2p.backends import backend_named
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import TransferError
from dask_p2p.transports import ucx as ucx_module
from dask_p2p.transports.buffers import ByteBudget
from dask_p2p.transports.ucx import UcxSendBuffer, UcxTransport
from dask_p2p.transports.ucx_messenger import Message
from tests.support import BOUND_S
from tests.transports.conformance import FLOAT64, PackedConformance
from tests.transports.loopback import wait_until
from tests.usage import usage

TRANSPORT = UcxTransport


def resting(loop):
    """Tasks of an event loop that have UCX rest now and then."""
    tasks = asyncio.all_tasks(loop.loop)
    return [
        task for task in tasks if task.get_coro().__qualname__ == "UcxTransport._stop_when_idle"
    ]


@pytest.mark.parametrize(
    ("is_there", "memory_kind", "is_taken"),
    [
        (None, "numpy", True),
        ("numpy", "cupy", True),
        ("cupy", "cupy", True),
        ("cupy", "numpy", False),
    ],
)
def test_a_spilled_block_does_not_go_into_memory_of_a_gpu(
    monkeypatch, is_there, memory_kind, is_taken
):
    monkeypatch.setattr(ucx_module, "backend_for", backend_named)
    pools = {
        name: SimpleNamespace(take=lambda *args, name=name: name) for name in ("numpy", "cupy")
    }
    message = UcxSendBuffer(SimpleNamespace(buffers=pools), None, None, b"")
    message.size_bytes = 8
    if is_there is not None:
        assert message.memory(backend_named(is_there)) == is_there
    assert message.can_join(memory_kind) == is_taken


class TestUcx(PackedConformance):
    def test_ucx_rests_when_there_is_nothing_to_do(self, setup, block, monkeypatch):
        monkeypatch.setattr("dask_p2p.transports.ucx.REST_S", 0.05)
        for _ in range(2):
            self.read(setup, *block, ((0, 1), (0, 1)))
            for transport in (setup.reader, setup.serving):
                messenger = transport.messenger()
                wait_until(lambda messenger=messenger: messenger.stop_when_idle(3600))

    def test_closing_takes_back_what_was_asked(self, setup, block):
        requested, ended = threading.Event(), threading.Event()

        async def send_reply(**kwargs):
            requested.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        setup.host.handlers["p2p_ucx_read"] = send_reply
        remote = self.open(setup, *block, ((0, 1), (0, 1)))
        remote.request()
        assert requested.wait(BOUND_S)
        remote.close()
        assert ended.wait(BOUND_S)
        wait_until(lambda: not any(usage(setup.reader).values()))

    def test_room_is_given_back_whatever_fails(self, setup, block, monkeypatch):
        fail = Mock(side_effect=RuntimeError("the device is lost"))
        monkeypatch.setattr(HostQueue, "synchronize", fail)
        self.refused(setup, block, "the device is lost")
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_after_it_is_closed_nothing_is_started(self, setup, loop, monkeypatch):
        monkeypatch.setattr(ucx_module, "Messenger", None)  # which cannot be called
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
            with pytest.raises(TransferError, match="the worker is closing"):
                transport.messenger()

    def test_no_thread_and_no_timer_is_left(self, setup, loop, block):
        self.read(setup, *block, ((0, 1), (0, 1)))
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
        setup.host.encrypted_only = True
        self.refused(setup, block, "requires encryption")

    def test_a_reader_that_nobody_reaches(self, setup, loop, block):
        key, _ = block
        request = {"blocks": [(key, (6, 10))], "parts": [(0, ((0, 1), (0, 10)))], **FLOAT64}
        read = setup.host.handlers["p2p_ucx_read"]
        reply = loop.run(read(**request, where=([1], "nobody", 0)))
        assert reply["status"] == "error"
        assert "nobody" in reply["message"]
        assert usage(setup.serving)["messages"] == 0

    def test_a_reader_without_an_address(self, setup, block):
        reply = {"status": "error", "message": "UCX has not started"}
        setup.reader.worker.handlers["p2p_ucx_peer"] = AsyncMock(return_value=reply)
        self.refused(setup, block, "could not send its UCX address: UCX has not")

    def test_a_message_that_never_comes(self, setup, block):
        reply = {"status": "ok", "parts": [{"status": "ok"}]}
        setup.host.handlers["p2p_ucx_read"] = AsyncMock(return_value=reply)
        words = r"block .* did not arrive: no message within"
        self.refused(setup, block, words, request_timeout_s=0.2)

    def test_a_message_that_does_not_get_through(self, setup, block, monkeypatch):
        """The holder answers, and says so before the reader gives it up: other transports work."""

        def stuck(message, timeout_s):
            assert timeout_s < 60.0, "earlier than the reader"
            raise TransferError("no message within 59.5 s", is_silence=True)

        monkeypatch.setattr(Message, "result", stuck)
        words = r"holder could not send .* no message within"
        self.refused(setup, block, words, request_timeout_s=60.0)
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

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
        remote = self.rows(setup, key, array, part_bytes=128)
        for i in range(2):
            np.testing.assert_array_equal(remote.request().result(BOUND_S), array[i : i + 1])
        with pytest.raises(TransferError, match="no room"):
            remote.request().result(BOUND_S)
        remote.close()
        wait_until(lambda: usage(setup.reader)["messages"] == 0)

    def rows(self, setup, key, array, **options):
        rows = [((i, i + 1), (0, array.shape[1])) for i in range(array.shape[0])]
        return self.open(setup, key, array, *rows, **options)

    def long_rows(self, setup, count):
        """Make the holder hold rows; return them, and a reading that needs a message for each."""
        array = np.arange(count * 2**14).reshape(count, 2**14)
        setup.put("block", array)
        return array, self.rows(setup, "block", array, part_bytes=2**17)

    def read_long_rows(self, setup):
        array, remote = self.long_rows(setup, 4)
        for i, request in enumerate([remote.request() for _ in range(4)]):
            np.testing.assert_array_equal(request.result(BOUND_S), array[i : i + 1])
        remote.close()

    def test_blocks_that_do_not_go_into_one_message_come_in_several(
        self, setup, blocks, monkeypatch
    ):
        packed, pack = set(), UcxSendBuffer.pack
        monkeypatch.setattr(UcxSendBuffer, "can_join", lambda message, block: message not in packed)
        monkeypatch.setattr(
            UcxSendBuffer,
            "pack",
            lambda message, *args: packed.add(message) or pack(message, *args),
        )
        regions = self.read_blocks(setup, blocks)
        for key, array in blocks.items():
            np.testing.assert_array_equal(regions[key][0], array[1:3, :4])
        assert setup.host.calls.count("p2p_ucx_read") == len(blocks)
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_nothing_is_waited_for_where_a_row_ends_in_an_empty_region(self, setup):
        array = np.arange(400, dtype="u1").reshape(2, 200)
        setup.put("block", array)
        boxes = [((0, 1), (0, 200)), ((1, 2), (0, 200)), ((2, 2), (0, 200))]
        remote = self.open(setup, "block", array, *boxes, part_bytes=200, request_timeout_s=20.0)
        for (rows, _), region in zip(boxes, [remote.request() for _ in boxes], strict=True):
            np.testing.assert_array_equal(region.result(BOUND_S), array[slice(*rows)])
        remote.close()

    def test_a_message_is_packed_before_it_is_sent(self, setup, monkeypatch):
        """Copies of a GPU are queued; so that they take long here each is made when waited for.

        By then the next one is queued, too.
        """
        events, numbers = [], itertools.count()

        def pack(queue, dst, src):
            number, copy = next(numbers), src.copy()
            events.append(f"queue {number}")

            def wait():
                np.copyto(dst, copy)
                events.append(f"make {number}")

            return wait

        monkeypatch.setattr(HostQueue, "pack", pack)
        self.read_long_rows(setup)
        first = ["queue 0", "queue 1", "make 0", "queue 2", "make 1", "queue 3", "make 2", "make 3"]
        assert events == first

    def test_memory_is_given_back_when_nothing_is_copied_there_any_more(self, setup, monkeypatch):
        make_room, pack, waited = UcxSendBuffer.begin, UcxSendBuffer.pack, []

        def packed(target, *args):
            pack(target, *args)
            memory = ref(target.memory(NUMPY))
            target.wait_until_packed = lambda: waited.append(memory() is not None)

        def begin(target, request, reserved):
            if waiting:
                raise TransferError("no more")
            waiting.append(target)
            make_room(target, request, reserved)

        waiting = []
        monkeypatch.setattr(UcxSendBuffer, "pack", packed)
        monkeypatch.setattr(UcxSendBuffer, "begin", begin)
        _, remote = self.long_rows(setup, 2)
        with pytest.raises(TransferError, match="no more"):
            remote.request().result(BOUND_S)
        remote.close()
        assert waited == [True]

    def test_a_row_that_has_come_leaves_its_connection_open(self, setup, loop):
        """As the pool of Dask closes those of calls that are cancelled."""
        worker, ended, pack_request = setup.reader.worker, [], setup.serving.pack_request
        calling, may_answer = worker.call, asyncio.Event()

        async def call(*args, **kwargs):
            try:
                return await calling(*args, **kwargs)
            finally:
                ended.append(sys.exc_info()[0])

        async def late(*args):
            replies = await pack_request(*args)
            await may_answer.wait()
            return replies

        worker.call, setup.serving.pack_request = call, late
        for count in (3, 2):
            _, remote = self.long_rows(setup, 3)
            for request in [remote.request() for _ in range(count)]:
                request.result(BOUND_S)
            remote.close()
        assert usage(setup.reader)["requested"] == 0
        loop.loop.call_soon_threadsafe(may_answer.set)
        wait_until(lambda: len(ended) == 2)
        assert sorted(map(str, ended)) == [str(asyncio.CancelledError), "None"]

    def test_messages_come_where_there_is_room_for_one_alone(self, setup):
        setup.serving.packed = ByteBudget(2**17)
        self.read_long_rows(setup)
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)
        assert setup.host.calls.count("p2p_ucx_read") == 1

    def test_no_more_messages_are_waited_for_than_are_asked_for(self, setup):
        array, remote = self.long_rows(setup, 20)
        assert usage(setup.reader)["messages"] == 0
        ahead = deque()
        for i in range(20):
            while len(ahead) < min(3, 20 - i):
                ahead.append(remote.request())
            assert remote.reading.ahead == min(2, i + len(ahead))
            np.testing.assert_array_equal(ahead.popleft().result(BOUND_S), array[i : i + 1])
        assert setup.serving.buffers["numpy"].idle_bytes <= 5 * 2**17

    def test_an_endpoint_that_the_reader_closed(self, setup):
        """As after a message that nobody took: the holder leaves the other half of it behind."""
        key, array = "block", np.arange(2.0**17).reshape(256, 512)  # what is small gets through
        setup.put(key, array)
        setup.reader.worker.blocks[key] = array
        endpoint = SimpleNamespace(
            reader=setup.serving, holder="reader", kind="numpy", to_numpy=np.asarray
        )
        whole_box = ((0, 256), (0, 512))
        for ways in ((endpoint, setup), (setup, endpoint)):
            for way in ways:
                self.read(way, key, array, whole_box)
            setup.reader.messenger().forget(setup.serving.messenger().address)
            region = self.read(setup, key, array, whole_box, request_timeout_s=30.0)
            np.testing.assert_array_equal(region, array)

    def test_a_worker_that_left_and_came_back(self, setup, block):
        calls = setup.reader.worker.calls
        for times in (1, 2):
            self.read(setup, *block, ((0, 1), (0, 10)))
            assert len(setup.serving.messenger().endpoints) == 1
            for transport, peer in ((setup.reader, "holder"), (setup.serving, "reader")):
                transport.worker.loop.call_soon_threadsafe(transport.on_worker_left, peer)
            wait_until(lambda: setup.serving.messenger().endpoints == {})
            assert calls.count("p2p_ucx_peer") == times, "its address is another one, perhaps"
