from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.transports.packed.comm import CommTransport
from tests.support import BOUND_S
from tests.transports.loopback import wait_until
from tests.transports.packed.conformance import PackedConformance
from tests.usage import usage

TRANSPORT = CommTransport
F8 = {"dtype": "float64 <f8", "item_bytes": 8, "wait_s": 60.0}


class TestComm(PackedConformance):
    @pytest.mark.parametrize("dtype", [">f8", [("a", ">i2"), ("b", "<f8"), ("c", ">U2")]], ids=str)
    def test_dtypes_in_another_byte_order(self, setup, dtype):
        array = (np.arange(12).reshape(3, 4) + 0.5).astype("i8").astype(dtype)
        setup.put("block", array.astype(array.dtype.newbyteorder("=")))
        got = self.read(setup, "block", array, ((0, 3), (1, 4)))
        assert got.dtype == array.dtype
        assert got.tobytes() == array[:, 1:].tobytes()

    def test_objects(self, setup):
        array = np.array([[1, "two"], [None, (4,)]], dtype=object)
        setup.put("block", array)
        assert self.read(setup, "block", array, ((0, 2), (1, 2))).tolist() == [["two"], [(4,)]]

    def test_masked_blocks_are_refused(self, setup):
        setup.put("block", np.ma.masked_equal(np.ones((2, 2)), 0))
        with pytest.raises(BlockMismatchError, match=r"(?i)masked"):
            self.read(setup, "block", np.ones((2, 2)), ((0, 1), (0, 1)))

    def test_errors_that_nobody_waits_for_are_not_logged(self, setup, loop, block, monkeypatch):
        """A killed holder ends all requests at once; the reader gives up with the first."""
        key, array = block
        asked, logged = [], []

        async def call(address, op, **kwargs):
            asked.append(asyncio.current_task())
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ConnectionAbortedError("it has left the cluster") from None

        monkeypatch.setattr(setup.reader.worker, "call", call)
        loop.loop.set_exception_handler(lambda loop, context: logged.append(context))
        try:
            remote = self.open(setup, key, array, ((0, 6), (0, 10)))
            remote.request()
            wait_until(lambda: asked)
            remote.close()
            wait_until(lambda: all(task.done() for task in asked))
            del remote
            asked.clear()
            for _ in range(3):
                loop.run(asyncio.sleep(0.01))
                gc.collect()
        finally:
            loop.loop.set_exception_handler(None)
        assert logged == []

    def test_what_is_under_way_is_counted(self, setup, loop, block):
        key, array = block
        may_answer, answered = asyncio.Event(), setup.host.handlers["p2p_comm_read"]

        async def answer(**request):
            await may_answer.wait()
            return await answered(**request)

        remote = self.open(setup, key, array, ((0, 6), (0, 10)), ((0, 1), (0, 1)))
        assert usage(setup.reader) == {"opened": 1, "requested": 0}
        setup.host.handlers["p2p_comm_read"] = answer
        requests = [remote.request(), remote.request()]
        # Both by one call.
        assert usage(setup.reader) == {"opened": 1, "requested": 1}
        loop.loop.call_soon_threadsafe(may_answer.set)
        for request in requests:
            request.result(BOUND_S)
        wait_until(lambda: usage(setup.reader)["requested"] == 0)
        remote.close()
        assert usage(setup.reader)["opened"] == 0
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_room_is_given_back_where_packing_fails(self, setup, block, monkeypatch):
        def fail(*args, **kwargs):
            raise MemoryError("no room")

        key, array = block
        monkeypatch.setattr(HostQueue, "permute", fail)
        with pytest.raises(TransferError, match=r"out of memory while packing .*no room"):
            self.read(setup, key, array, ((0, 6), (0, 1)))
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_what_is_handed_over_in_one_process_takes_no_room(self, setup, loop, block):
        key, _ = block
        asked = {"blocks": [(key, (6, 10))], "parts": [(0, ((0, 6), (0, 1)))], **F8}
        kept = loop.run(setup.host.handlers["p2p_comm_read"](**asked))
        assert kept["parts"][0]["data"].data.nbytes == setup.serving.packed.reserved_bytes == 48
        del kept
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)  # the loop may have it still
        setup.host.address = "inproc://holder"
        reply = loop.run(setup.host.handlers["p2p_comm_read"](**asked))
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)
        assert reply["parts"][0]["data"].data.nbytes == 48

    def test_a_region_that_lies_in_one_piece_is_not_copied(self, setup, loop, block):
        key, array = block
        asked = {"blocks": [(key, (6, 10))], "parts": [(0, ((2, 4), (0, 10)))], **F8}
        reply = loop.run(setup.host.handlers["p2p_comm_read"](**asked))
        assert np.shares_memory(reply["parts"][0]["data"].data, array)
        assert setup.serving.packed.reserved_bytes == 0

    def test_an_answer_that_does_not_come_in_time(self, setup, block):
        key, array = block
        setup.host.delay_s = 100
        start_s = time.monotonic()
        with pytest.raises(TransferError, match=r"no answer from holder .* within 0\.1 s"):
            self.read(setup, key, array, ((0, 1), (0, 1)), request_timeout_s=0.1)
        assert time.monotonic() - start_s < 50

    def test_a_holder_that_cannot_be_reached(self, setup, block):
        key, array = block
        del setup.network["holder"]
        expected = r"holder cannot be reached to ask about block .*: nobody"
        with pytest.raises(TransferError, match=expected):
            self.read(setup, key, array, ((0, 1), (0, 1)))

    @pytest.mark.parametrize(
        ("reply", "words"),
        [
            ({"status": "ok"}, "sent no reply for any part"),
            ({"status": "ok", "parts": 7}, "sent no reply for any part"),
            ({"status": "ok", "parts": []}, "sent no reply for any part"),
            ({"status": "silent", "message": "gone"}, "gone"),
            ({"status": "ok", "parts": [5]}, "could not send .* 5"),
            ({"status": "ok", "parts": [{"status": "ok"}]}, "NoneType"),
            (
                {"status": "ok", "parts": [{"status": "ok", "data": np.zeros((2, 2))}]},
                r"sent \(2, 2\) instead of \(1, 1\)",
            ),
            ({"status": "weird"}, "weird"),
            ("nonsense", "nonsense"),
        ],
    )
    def test_answers_that_make_no_sense(self, setup, block, reply, words):
        async def answer(**kwargs):
            return reply

        setup.host.handlers["p2p_comm_read"] = answer
        key, array = block
        with pytest.raises(TransferError, match=words):
            self.read(setup, key, array, ((0, 1), (0, 1)))
