"""What holders do with requests, whatever the transport."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest

from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.transports.packed import PackedTransport, ReadRequest, SendBuffer
from tests.transports.loopback import LoopbackHost

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
