"""What owners do with requests, whatever the transport, and ``comm``."""

import asyncio
import gc
import time
import weakref
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.errors import BlockMismatchError
from dask_p2p.transports.packed import CommTransport, PackedTransport, ReadRequest, SendBuffer
from dask_p2p.transports.packed_reading import RateController
from tests.transports.conformance import FLOAT64, PackedConformance
from tests.transports.loopback import LoopbackHost, wait_until

BOXES = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
PARTS = [(number, box) for number in range(3) for box in BOXES]


class LateQueue(HostQueue):
    """Packs when somebody waits for it, as a GPU might."""

    def __init__(self, happened):
        super().__init__(NUMPY)
        self._happened, self._waiting = happened, []

    def pack(self, dst, src):
        block = weakref.ref(src.base)
        start = (src.ctypes.data - src.base.ctypes.data) // src.base.strides[0]
        self._happened.append("begun")
        self._waiting.append((dst, block, slice(start, start + src.shape[0])))

    def synchronize(self):
        for dst, block, rows in self._waiting:
            assert block() is not None, "its memory may be another's by now"
            dst[...] = block()[rows]
        self._waiting.clear()
        self._happened.append("packed")


class Memory(SendBuffer):
    """One array for each region."""

    def __init__(self, happened):
        self.happened, self.packed = happened, []

    def pack(self, number, queue, region):
        self.packed.append(np.empty_like(region))
        queue.pack(self.packed[-1], region)
        return self.packed[-1]

    def send(self):
        self.happened.append("sent")

    def close(self):
        self.happened.append("closed")
        super().close()


class ToMemory(PackedTransport):
    name = "memory"
    footprint = recv_buffer = obstacle = None

    def own_bytes(self, request):
        return [48 for _ in request.parts]

    async def make_send_buffer(self, request, where):
        where.append(Memory(where))
        return where[-1]


@pytest.fixture
def holder(loop, tmp_path, monkeypatch):
    host = LoopbackHost("holder", loop.loop, {}, tmp_path)
    transport = ToMemory(host, options())
    transport.happened = []
    monkeypatch.setattr(NUMPY, "queue", lambda leave_bandwidth: LateQueue(transport.happened))
    # A worker has each block only until it is asked for.
    host.block = host.blocks.pop
    yield transport
    host.close()


def serve(holder, loop):
    """Return the answers, and the regions that were packed."""
    blocks = [(number, (4, 3)) for number in range(3)]
    request = ReadRequest(blocks, PARTS, "float64 <f8", 8, time.monotonic() + 60.0)
    target = Memory(holder.happened)

    async def packed():
        target.begin(*await holder.reserve(request))
        return await holder.worker.offload(holder.pack_all, target)

    return loop.run(packed()), target.packed


def test_where_nothing_can_be_packed_nothing_is_sent(holder, loop):
    replies, packed = serve(holder, loop)
    assert (replies, packed) == ([{"status": "missing"}] * 6, [])
    assert holder.happened == ["closed"]


def test_a_region_that_cannot_join_others_ends_the_replies(holder, loop, monkeypatch):
    """The reader knows a region by its place among the replies."""
    monkeypatch.setattr(Memory, "can_join", lambda target, block: block[0, 0] != 1)
    holder.worker.blocks.update({number: np.full((4, 3), float(number)) for number in range(3)})
    replies, packed = serve(holder, loop)
    assert len(replies) == len(packed) == 2


@pytest.mark.parametrize(
    ("limit_bytes", "taken_bytes", "fit"), [(288, 0, 6), (287, 0, 3), (287, 200, 1), (10, 0, 1)]
)
def test_as_many_regions_are_packed_as_there_is_room_for(
    holder, loop, limit_bytes, taken_bytes, fit
):
    holder.packed.limit_bytes = limit_bytes
    reservations = holder.packed.reserve(taken_bytes)
    holder.worker.blocks.update({number: np.ones((4, 3)) for number in range(3)})
    replies, packed = serve(holder, loop)
    assert len(replies) == len(packed) == fit
    reservations[0]()
    assert holder.packed.reserved_bytes == 0


def test_late_answers_are_asked_for_in_smaller_parts_until_they_are_early():
    rate = RateController()
    rate.update(2**24, 1.0, 30.0)
    assert rate.most_bytes >= 2**24, "early ones change nothing"
    rate.update(2**24, 30.0, 30.0)
    assert rate.most_bytes == 2**22
    rate.update(2**20, 30.0, 30.0)
    assert rate.most_bytes == 2**18
    rate.update(2**18, 4.0, 30.0)
    assert rate.most_bytes == 2**18, "neither late nor early"
    rate.update(2**10, 30.0, 30.0)
    assert 2**10 < rate.most_bytes < 2**18, "there is a least size, below which nothing is quicker"
    while rate.most_bytes < 2**24:
        before_bytes = rate.most_bytes
        rate.update(before_bytes, 0.1, 30.0)
        assert rate.most_bytes == 2 * before_bytes


TRANSPORT = CommTransport


class TestComm(PackedConformance):
    test_a_holder_that_is_closing_refuses = None

    def test_room_is_given_back_where_packing_fails(self, setup, block, monkeypatch):
        monkeypatch.setattr(HostQueue, "permute", Mock(side_effect=MemoryError("no room")))
        words = r"out of memory while packing .*no room"
        self.refused(setup, block, words, box=((0, 6), (0, 1)))
        wait_until(lambda: setup.serving.packed.reserved_bytes == 0)

    def test_what_is_handed_over_in_one_process_takes_no_room(self, setup, loop, block):
        key, _ = block
        request = {"blocks": [(key, (6, 10))], "parts": [(0, ((0, 6), (0, 1)))], **FLOAT64}
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
        setup.host.handlers["p2p_comm_read"] = AsyncMock(return_value=reply)
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
