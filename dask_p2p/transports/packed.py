"""The base of transports whose holder packs regions. They differ in the receiving memory.

A reader requests a batch of regions, of any blocks of a holder, by one RPC. The holder packs each
into contiguous memory::

    reader                                        holder
      allocates memory (`RecvBuffer`)
      --- RPC: keys, boxes, dtype, where ------>  packs the regions (`SendBuffer`)
      <-- reply: ok or an error, for each ------

Several calls are in progress at a time, so that a batch is packed while the one before is sent.
Requests and errors use Dask's connections, encrypted if those are. The packed bytes use the
transport's own path.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from distributed.protocol import to_serialize

from dask_p2p.backends import (
    Backend,
    Queue,
    backend_for,
    backend_named,
    check_dtype_text,
    device_of,
    dtype_text,
    mismatch,
)
from dask_p2p.config import Options
from dask_p2p.errors import TransferError
from dask_p2p.geometry import Box, Layout, box_size, box_slices
from dask_p2p.transports.base import Request, Transport, WorkerContext, find_block
from dask_p2p.transports.buffers import Footprint, Release, left_bytes, parts_held
from dask_p2p.transports.packed_reading import (
    PackedReading,
    RateController,
    RecvBuffer,
    lay_out_regions,
)
from dask_p2p.transports.rpc import Handler, refuse, rpc_handler
from dask_p2p.types import Array, Key, Kind

NO_ROOM = "its outgoing staging limit (p2p.memory.staging-limit) is reached"
PAUSE_S = 1e-3  # between checks for free memory


class ReadRequest(NamedTuple):
    """A reader's request."""

    blocks: Sequence[tuple[Key, tuple[int, ...]]]  # keys and shapes
    parts: Sequence[tuple[int, Box]]  # indices into `blocks`, and boxes
    dtype: str
    item_bytes: int
    deadline_s: float  # end of the reader's wait, by `time.monotonic`

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def layout(self) -> Layout:
        return lay_out_regions([box for _, box in self.parts], self.item_bytes)


class SendBuffer:
    """The memory into which a holder packs the regions of one request."""

    def begin(self, request: ReadRequest, reserved: list[Release]) -> None:
        """Prepare for a request, or its first regions, with memory reserved for them."""
        self.request = request
        self.reserved = dict(enumerate(reserved))

    def can_join(self, block: Array) -> bool:
        """Return whether this block's regions can join those that are packed already."""
        return True

    @abstractmethod
    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        """Queue a copy of the request's region number `number`. Return the packed array."""

    def payload(self, packed: Array) -> dict[str, Any]:
        return {}

    def send(self) -> None:
        """Send the packed regions, and wait for their arrival."""

    def close(self) -> None:
        """Release the reservations. Called also after errors."""
        for release in self.reserved.values():
            release()


class FlatSendBuffer(SendBuffer):
    """A buffer that holds the regions one after another."""

    def begin(self, request: ReadRequest, reserved: list[Release]) -> None:
        super().begin(request, reserved)
        self._layout = request.layout()
        self.size_bytes = self._layout.size_bytes

    @abstractmethod
    def memory(self, backend: Backend) -> Array:
        """Return the buffer as a 1-D array of bytes, for regions of this backend."""

    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        memory = self.memory(backend_for(region))
        packed: Array = self._layout.view(memory, number, region.dtype)
        self.wait_until_packed = queue.pack(packed, region)
        return packed


class PackedTransport(Transport):
    """A transport whose holder packs regions."""

    reading: ClassVar[type[PackedReading]] = PackedReading
    #: Class of the memory that receives a batch of regions.
    recv_buffer: ClassVar[type[RecvBuffer]] = RecvBuffer
    #: True if readers convert regions with another byte order.
    converts: ClassVar[bool] = False
    #: Executor that packs regions for readers; None: the worker's threads.
    threads: Executor | None = None

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.opened: set[PackedReading] = set()  # open readings of task threads
        self._rates: defaultdict[str, RateController] = defaultdict(RateController)  # by holder

    @property
    def op(self) -> str:
        return f"p2p_{self.name}_read"

    def handlers(self) -> Mapping[str, Handler]:
        return {self.op: self._serve}

    @abstractmethod
    async def make_send_buffer(self, request: ReadRequest, where: Any) -> SendBuffer:
        """Return the send buffer of a request, by the reader's description `where`."""

    def own_bytes(self, request: ReadRequest) -> list[int]:
        return []

    def read(self, requests: Sequence[Request], options: Options) -> PackedReading:
        reading = self.reading(self, requests, options, self._rates[requests[0].holder])
        self.opened.add(reading)
        return reading

    def on_worker_left(self, holder: str) -> None:
        self._rates.pop(holder, None)

    async def close(self) -> None:
        self.is_closed = True
        await self.worker.offload(self.free_memory)
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def free_memory(self) -> None:
        """Free all kept memory. May block: call it from a thread."""
        for buffers in self.pools:
            buffers.clear()

    # --- the holder's side ---

    @rpc_handler
    async def _serve(
        self,
        *,
        blocks: Sequence[tuple[Key, tuple[int, ...]]],
        parts: Sequence[tuple[int, Box]],
        dtype: str,
        item_bytes: int,
        wait_s: float,
        where: Any = None,
    ) -> dict[str, Any]:
        """Handle one request. References keep the blocks alive until they are packed."""
        request = ReadRequest(blocks, parts, dtype, item_bytes, time.monotonic() + wait_s)
        return {"parts": await self.pack_request(request, where)}

    async def pack_request(self, request: ReadRequest, where: Any) -> Sequence[dict[str, Any]]:
        send_buffer = await self.make_send_buffer(request, where)
        send_buffer.begin(*await self.reserve(request))
        return await self.worker.offload(self.pack_all, send_buffer, threads=self.threads)

    async def reserve(self, request: ReadRequest) -> tuple[ReadRequest, list[Release]]:
        """Reserve memory for the first regions of a request.

        Waits until at least one region fits. Returns the request for the regions that fit. Raises
        `TransferError` at the reader's deadline.
        """
        count = len(request.parts)
        while True:
            for shift in range(max(1, count.bit_length())):
                first = request._replace(parts=request.parts[: count >> shift])
                sizes = self.own_bytes(first)
                if sum(sizes) <= self.packed.limit_bytes or len(first.parts) == 1:
                    reserved = self.packed.reserve(*sizes)
                    if reserved is not None:
                        return first, reserved
            if not request.left_s:
                raise TransferError(NO_ROOM)
            await asyncio.sleep(PAUSE_S)

    def pack_all(self, send_buffer: SendBuffer) -> list[dict[str, Any]]:
        """Pack the regions block by block, and send them. Return a reply or an error for each."""
        request, replies = send_buffer.request, list[dict[str, Any]]()
        with closing(send_buffer):
            for number, group in groupby(enumerate(request.parts), key=lambda part: part[1][0]):
                boxes = [(offset, box) for offset, (_, box) in group]
                try:
                    block = self._find(request, *request.blocks[number])
                except Exception as exc:
                    replies += [refuse(exc) for _ in boxes]
                    continue
                if not send_buffer.can_join(block):
                    break  # the reader requests regions without a reply again
                with device_of(block):
                    replies += self._pack(send_buffer, block, boxes)
                del block
            if any(reply["status"] == "ok" for reply in replies):
                send_buffer.send()
        return replies

    def _find(self, request: ReadRequest, key: Key, shape: tuple[int, ...]) -> Any:
        block = find_block(self.worker, key, shape)
        about, block_dtype = f"block {key!r}", dtype_text(block.dtype)
        try:
            check_dtype_text(about, request.dtype, block_dtype)
        except TransferError:  # only the byte order differs
            if not self.converts:
                raise
        if block.dtype.itemsize != request.item_bytes:
            raise mismatch(about, request.dtype, block_dtype)
        return block

    def _queue_for(self, block: Array) -> Queue:
        queue: Queue = backend_for(block).queue(leave_bandwidth=True)
        queue.wait_until_written([block], any_stream=self.options.any_producer_stream)
        return queue

    def _pack(
        self, send_buffer: SendBuffer, block: Array, boxes: Sequence[tuple[int, Box]]
    ) -> list[dict[str, Any]]:
        queue = self._queue_for(block)
        try:
            packed = [
                send_buffer.pack(number, queue, block[box_slices(box)]) for number, box in boxes
            ]
        finally:
            queue.synchronize()  # memory is reused after the reply, and after an error
        return [{"status": "ok", **send_buffer.payload(region)} for region in packed]


# ``comm``: packed regions over Dask's own connections, between any two workers.
#
# The reply contains the regions, sent by Dask's serialisation and protocol (tcp, tls, ucx, inproc).
# GPU regions are sent from device memory if the protocol supports this (ucx), otherwise from host
# memory.


_PART_BYTES = 2**24
_IN_FLIGHT = 2  # parts requested ahead; the reader and the holder may each hold each part once


class CommTransport(PackedTransport):
    """Transport of regions in the replies of RPCs."""

    name: ClassVar[str] = "comm"
    converts: ClassVar[bool] = True
    moves_objects: ClassVar[bool] = True

    @classmethod
    def footprint(cls, options: Options, kind: Kind) -> Footprint:
        part_bytes, on_device = options.part_bytes or _PART_BYTES, backend_named(kind).on_device
        part_count = parts_held(_IN_FLIGHT, kind) + on_device  # one more in host memory
        return Footprint(
            max(1, min(part_bytes, left_bytes(options, kind) // part_count)),
            _IN_FLIGHT,
            parts_held=part_count,
            parts_packed=_IN_FLIGHT + 1,
            copies=2 if on_device else 1,
            is_buffered=False,
            comes_in_batches=True,
        )

    def probe(self, holder: str, kind: Kind) -> None:
        """Do nothing: Dask itself uses these connections, so that they need no probe."""

    async def make_send_buffer(self, request: ReadRequest, where: Any) -> SendBuffer:
        return Reply(self.worker.address)

    def own_bytes(self, request: ReadRequest) -> list[int]:
        return [box_size(box) * request.item_bytes for _, box in request.parts]


class Reply(SendBuffer):
    """A reply that contains the regions."""

    def __init__(self, address: str) -> None:
        self._protocol = address.partition("://")[0]

    def pack(self, number: int, queue: Queue, region: Array) -> Array:
        on_device = backend_for(region).on_device
        if not on_device and region.flags.c_contiguous:
            return region
        packed = queue.scratch(region.shape, region.dtype)
        queue.pack(packed, region)()
        if on_device and not self._protocol.startswith("ucx"):
            # On this thread: serialisation would copy it on the event loop.
            packed = queue.to_host(packed)
        if self._protocol != "inproc":  # with inproc the reader owns the array from now on
            # Dask drops its reference after sending.
            weakref.finalize(packed, self.reserved.pop(number)).atexit = False
        return packed

    def payload(self, packed: Array) -> dict[str, Any]:
        return {"data": to_serialize(packed)}
