from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from dask_p2p.backends.host import HostQueue
from dask_p2p.errors import BlockMismatchError
from dask_p2p.transports.packed import CommTransport
from tests.transports.loopback import wait_until
from tests.transports.packed.conformance import PackedConformance

TRANSPORT = CommTransport
F8 = {"dtype": "float64 <f8", "item_bytes": 8, "wait_s": 60.0}


class TestComm(PackedConformance):
    test_a_holder_that_is_closing_refuses = None

    def test_room_is_given_back_where_packing_fails(self, setup, block, monkeypatch):
        def fail(*args, **kwargs):
            raise MemoryError("no room")

        monkeypatch.setattr(HostQueue, "permute", fail)
        words = r"out of memory while packing .*no room"
        self.refused(setup, block, words, box=((0, 6), (0, 1)))
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_what_is_handed_over_in_one_process_takes_no_room(self, setup, loop, block):
        key, _ = block
        request = {"blocks": [(key, (6, 10))], "parts": [(0, ((0, 6), (0, 1)))], **F8}
        reply = loop.run(setup.host.handlers["p2p_comm_read"](**request))
        assert reply["parts"][0]["data"].data.nbytes == setup.serving.packed.reserved_bytes == 48
        del reply
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)  # the loop may have it still
        setup.host.address = "inproc://holder"
        reply = loop.run(setup.host.handlers["p2p_comm_read"](**request))
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)
        assert reply["parts"][0]["data"].data.nbytes == 48

    @pytest.mark.parametrize(
        ("reply", "words"),
        [
            ({"status": "silent", "message": "gone"}, "gone"),
            ({"status": "weird"}, "weird"),
            ("nonsense", "nonsense"),
        ],
    )
    def test_a_reply_with_another_status_is_an_error(self, setup, block, reply, words):
        async def send_reply(**kwargs):
            return reply

        setup.host.handlers["p2p_comm_read"] = send_reply
        self.refused(setup, block, words)

    def test_masked_blocks_are_refused(self, setup):
        setup.put("block", np.ma.masked_equal(np.ones((2, 2)), 0))
        self.refused(setup, ("block", np.ones((2, 2))), r"(?i)masked", BlockMismatchError)

    def test_errors_that_nobody_waits_for_are_not_logged(self, setup, loop, block, monkeypatch):
        """A killed holder ends all requests at once; the reader gives up with the first."""
        requests, logged = [], []

        async def call(address, op, **kwargs):
            requests.append(asyncio.current_task())
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ConnectionAbortedError("it has left the cluster") from None

        monkeypatch.setattr(setup.reader.worker, "call", call)
        loop.loop.set_exception_handler(lambda loop, context: logged.append(context))
        try:
            remote = self.open(setup, *block)
            remote.request()
            wait_until(lambda: requests)
            remote.close()
            wait_until(lambda: all(task.done() for task in requests))
            del remote
            requests.clear()
            for _ in range(3):
                loop.run(asyncio.sleep(0.01))
                gc.collect()
        finally:
            loop.loop.set_exception_handler(None)
        assert logged == []

    def test_a_holder_that_cannot_be_reached(self, setup, block):
        del setup.network["holder"]
        self.refused(setup, block, r"holder cannot be reached to ask about block .*: nobody")
