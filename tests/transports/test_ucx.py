from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.config import options
from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.transports import ucx as ucx_module
from dask_p2p.transports import ucx_reading
from dask_p2p.transports.ucx import UcxOptions, UcxTransport
from tests.support import with_section
from tests.transports.conformance import Conformance
from tests.transports.loopback import linked, wait_until


@pytest.fixture
def setup(loop, tmp_path):
    with linked(UcxTransport, loop, tmp_path, options()) as setup:
        yield setup


class TestUcx(Conformance):
    @pytest.mark.parametrize(
        "dtype", [">f8", ">i2", "M8[ns]", "U3", "V7", [("a", "i1"), ("b", ">f8")]], ids=str
    )
    def test_dtypes_of_numpy(self, setup, dtype):
        array = np.zeros((3, 4), dtype)
        array.view("u1")[...] = 1
        setup.put("block", array)
        got = self.read(setup, "block", array, ((0, 3), (1, 4)))
        assert got.dtype == array.dtype
        assert got.tobytes() == array[:, 1:].tobytes()

    def test_a_structured_block_with_other_fields(self, setup):
        """Of the same sizes at the same places: its bytes would do, its values would not."""
        real = np.ones((2, 2), [("a", "i1"), ("b", ">f8")])
        setup.put("block", real)
        for other in (
            [("a", "u1"), ("b", ">f8")],
            [("a", "i1"), ("b", "<f8")],
            [("b", "i1"), ("a", ">f8")],
            [("a", "i1"), ("b", "V8")],
            [("b", ">f8"), ("a", "i1")],
            [("a", "i1"), ("b", "i1", (8,))],
            [("a", "i1"), ("b", [("c", "f4"), ("d", "f4")])],
            "V9",
        ):
            declared = real.view("V9") if other == "V9" else np.ones((2, 2), other)
            with pytest.raises(BlockMismatchError, match="declared as"):
                self.read(setup, "block", declared, ((0, 1), (0, 1)))
        aligned = np.dtype([("a", "i1"), ("b", "f8")], align=True)
        equal = np.dtype({"names": "ab", "formats": ["i1", "f8"], "offsets": [0, 8]})
        assert aligned == equal
        setup.put("block", np.ones((2, 2), aligned))
        self.read(setup, "block", np.ones((2, 2), equal), ((0, 1), (0, 1)))

    def test_ucx_rests_when_there_is_nothing_to_do(self, setup, block, monkeypatch):
        monkeypatch.setattr(ucx_module, "_REST_S", 0.05)
        key, array = block
        for _ in range(2):
            self.read(setup, key, array, ((0, 1), (0, 1)))
            for transport in (setup.reader, setup.serving):
                messenger = transport.messenger()
                wait_until(lambda messenger=messenger: not messenger._driven)

    def test_closing_takes_back_what_was_asked(self, setup, block):
        asked, ended = threading.Event(), threading.Event()

        async def answer(**kwargs):
            asked.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        setup.host.handlers["p2p_ucx_send"] = answer
        key, array = block
        remote = self.open(setup, key, array, ((0, 1), (0, 1)))
        assert asked.wait(10)
        remote.close()
        assert ended.wait(10)

    def test_tags_do_not_start_at_the_same_place(self, setup):
        """What was meant for a process that died must not come for the right thing here."""
        places = {UcxTransport(setup.host, options())._next_tag for _ in range(10)}
        assert len(places) == 10
        assert max(places) > 2**40

    def test_room_is_given_back_whatever_fails(self, setup, block, monkeypatch):
        def fail(queue):
            raise RuntimeError("the device is lost")

        key, array = block
        monkeypatch.setattr(HostQueue, "synchronize", fail)
        with pytest.raises(TransferError, match="the device is lost"):
            self.read(setup, key, array, ((0, 1), (0, 1)))
        assert setup.serving.packed.reserved_bytes == 0

    def test_after_it_is_closed_nothing_is_started(self, setup, loop):
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
            with pytest.raises(TransferError, match="the worker is closing"):
                transport.messenger()
            assert transport._messenger is None

    def test_no_thread_and_no_timer_is_left(self, setup, loop, block):
        key, array = block
        self.read(setup, key, array, ((0, 1), (0, 1)))
        for transport in (setup.reader, setup.serving):
            loop.run(transport.close())
            assert transport._resting.cancelled()
        wait_until(lambda: not [t for t in threading.enumerate() if "p2p-ucx-send" in t.name])

    def test_closing_waits_for_what_is_being_started(self, setup, loop, monkeypatch):
        starting, go_on = threading.Event(), threading.Event()
        closed = []

        def start(device):
            starting.set()
            assert go_on.wait(10)
            return SimpleNamespace(close=lambda: closed.append(True), under_way=0)

        monkeypatch.setattr(ucx_module, "Messenger", start)
        with ThreadPoolExecutor(1) as threads:
            started = threads.submit(setup.reader.messenger)
            assert starting.wait(10)
            closing = asyncio.run_coroutine_threadsafe(setup.reader.close(), loop.loop)
            wait_until(lambda: setup.reader.is_closed)
            time.sleep(0.1)  # for it to get to where it waits
            go_on.set()
            started.result(10)
            closing.result(10)
        assert closed == [True]

    def test_objects_and_encryption_are_obstacles(self, setup):
        assert setup.reader.obstacle("holder", "numpy", np.dtype(object)).code == "objects"
        setup.reader.host.encrypted_only = True
        said = setup.reader.obstacle("holder", "numpy", np.dtype("f8"))
        assert said.code == "unencrypted"
        assert "requires encryption" in said.text
        assert "p2p.transports.ucx.allow-unencrypted" in said.remedy

    def test_a_holder_that_may_not_send_unencrypted(self, setup, block):
        key, array = block
        setup.host.encrypted_only = True
        with pytest.raises(TransferError, match="requires encryption"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_the_probe(self, setup):
        setup.reader.probe("holder", "numpy")
        original = setup.host.probes.block
        setup.host.probes.block = lambda key: original(key) ^ 1
        with pytest.raises(TransferError, match="65536 of 65536 bytes of a probe arrived changed"):
            setup.reader.probe("holder", "numpy")

    def test_buffers_are_used_again(self, setup, block):
        key, array = block
        for _ in range(20):
            self.read(setup, key, array, ((0, 6), (2, 10)))
        for side in (setup.reader, setup.serving):
            wait_until(lambda side=side: side.usage()["messages"] == 0)
            assert 512 <= side.buffers["numpy"].idle_bytes <= 3 * 512

    @pytest.mark.parametrize(
        "change",
        [
            {"tag": -1},
            {"tag": 2**64},
            {"tag": "7"},
            {"parts": [(0, ((0, 7), (0, 10)))]},
            {"parts": [(0, ((0, 1.5), (0, 10)))]},
            {"parts": [(0, ((0, 1),))]},
            {"parts": [(1, ((0, 6), (0, 10)))]},
            {"parts": [(0, ((0, 6), (0, 10)), 0)]},
            {"parts": [5]},
            {"parts": None},
            {"closed": -1},
            {"closed": None},
            {"ahead": 0},
            {"ahead": 1e9},
            {"blocks": [(("x-1", 0, 0), (6,))]},
            {"blocks": [(("x-1", 0, 0), 5)]},
            {"blocks": [("x-1", 0, 0)]},
            {"blocks": []},
            {"blocks": 5},
            {"dtype": "float32 <f4"},
            {"wait_s": "long"},
            {"blocks": [(["unhashable", []], (6, 10))]},
            {"reader": 5},
            {"reader": "nobody"},
        ],
        ids=str,
    )
    def test_requests_that_make_no_sense(self, setup, loop, block, change):
        key, _ = block
        request = {
            "blocks": [(key, (6, 10))],
            "parts": [(0, ((0, 6), (0, 10)))],
            "ahead": 2,
            "dtype": "float64 <f8",
            "tag": 1,
            "reader": "reader",
            "closed": 0,
            "wait_s": 1.0,
        }
        reply = loop.run(setup.host.handlers["p2p_ucx_send"](**{**request, **change}))
        assert reply["status"] != "ok"
        assert setup.serving.usage()["messages"] == 0

    @pytest.mark.parametrize("address", [None, "text", b"", bytes(2**17)], ids=lambda a: str(a)[:9])
    def test_a_reader_that_tells_no_address(self, setup, block, address):
        async def answer():
            return {"status": "ok", "address": address}

        setup.reader.host.handlers["p2p_ucx_peer"] = answer
        key, array = block
        with pytest.raises(TransferError, match="reader did not send its UCX address"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_an_answer_of_another_size(self, setup, block):
        serve = setup.host.handlers["p2p_ucx_send"]

        async def lie(**kwargs):
            return {**await serve(**kwargs), "nbytes": 3}

        setup.host.handlers["p2p_ucx_send"] = lie
        key, array = block
        with pytest.raises(TransferError, match=r"holder sent 3 bytes of block .*, not 8"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_a_message_that_never_comes(self, setup, block):
        async def lie(**kwargs):
            return {"status": "ok", "nbytes": 8, "checksums": [0]}

        setup.host.handlers["p2p_ucx_send"] = lie
        key, array = block
        with pytest.raises(TransferError, match=r"ucx: block .* does not come: no message within"):
            self.read(setup, key, array, ((0, 1), (0, 1)), request_timeout_s=0.2)

    def test_a_holder_that_stops_in_the_middle(self, setup, block):
        """What comes is good; what does not ends with the holder's reason, long before time."""
        key, array = block
        take = setup.serving.buffers["numpy"].take
        sent = []

        def fail_at_third(shape, dtype):
            sent.append(shape)
            if len(sent) == 3:
                raise MemoryError("no room")
            return take(shape, dtype)

        setup.serving.buffers["numpy"].take = fail_at_third
        rows = [((i, i + 1), (0, 10)) for i in range(6)]
        remote = self.open(setup, key, array, *rows)
        requests = [remote.request() for _ in rows]
        for request in requests[2:]:
            with pytest.raises(TransferError, match="no room"):
                request.result()
        with pytest.raises(TransferError, match="no room"):
            remote.confirm()
        remote.close()
        wait_until(lambda: setup.reader.usage()["messages"] == 0)

    @pytest.mark.parametrize("sent", [None, "1", -1, 1, True, 2**40])
    def test_a_holder_that_lacks_a_block_and_miscounts(self, setup, block, sent):
        async def lie(**kwargs):
            return {"status": "missing", "block": 0, "sent": sent, "nbytes": 0}

        setup.host.handlers["p2p_ucx_send"] = lie
        key, array = block
        with pytest.raises(BlockUnavailableError, match="is not there any more"):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    def test_more_messages_than_one_request_may_ask_for(self, setup, blocks, monkeypatch):
        monkeypatch.setattr(ucx_reading, "_MOST_MESSAGES", 3)
        setup.drop(("x", 2))
        came = self.read_blocks(setup, blocks)
        assert isinstance(came["x", 2][0], BlockUnavailableError)
        for key, array in blocks.items():
            if key != ("x", 2):
                np.testing.assert_array_equal(came[key][0], array[1:3, :4])
        assert setup.host.calls.count("p2p_ucx_send") == 2  # the second from block 3 on

    def test_a_holder_packs_no_more_than_a_few_ahead(self, setup):
        array = np.arange(20 * 2**14).reshape(20, 2**14)  # rows that UCX does not send at once
        setup.put("block", array)
        rows = [((i, i + 1), (0, 2**14)) for i in range(20)]
        full_parts = {"parts_in_flight": 2, "host_part_bytes": 2**17}
        sections = with_section(self.options, UcxOptions, **full_parts).sections
        remote = self.open(setup, "block", array, *rows, sections=sections)
        wait_until(lambda: setup.serving.usage()["messages"] == 3)
        for i in range(20):
            np.testing.assert_array_equal(remote.request().result(20), array[i : i + 1])
        remote.confirm()
        assert setup.serving.buffers["numpy"].idle_bytes <= 5 * 2**17

    def test_an_endpoint_that_the_reader_closed(self, setup):
        """As after a message that nobody took: the holder leaves the other half of it behind."""
        key, array = "block", np.arange(2.0**17).reshape(256, 512)  # what is small gets through
        setup.put(key, array)
        setup.reader.host.blocks[key] = array
        back = SimpleNamespace(
            reader=setup.serving, holder="reader", kind="numpy", to_numpy=np.asarray
        )
        whole = ((0, 256), (0, 512))
        for ways in ((back, setup), (setup, back)):
            for way in ways:
                self.read(way, key, array, whole)
            setup.reader.messenger().forget(setup.serving.messenger().address)
            got = self.read(setup, key, array, whole, request_timeout_s=5.0)
            np.testing.assert_array_equal(got, array)

    def test_a_worker_that_left_and_came_back(self, setup, block):
        key, array = block
        asked = setup.reader.host.calls
        for times in (1, 2):
            self.read(setup, key, array, ((0, 1), (0, 10)))
            assert len(setup.serving._messenger.endpoints) == 1
            for transport, other in ((setup.reader, "holder"), (setup.serving, "reader")):
                transport.host.loop.call_soon_threadsafe(transport.on_worker_left, other)
            wait_until(lambda: setup.serving._messenger.endpoints == {})
            assert asked.count("p2p_ucx_peer") == times, "its address is another one, perhaps"
