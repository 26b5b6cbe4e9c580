"""The holder's side of ``ucx``: parts of blocks packed, and sent to one reader."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from dask_p2p.backends import Queue, backend_for, device_of
from dask_p2p.errors import TransferError
from dask_p2p.layout import Box, box_shape, box_size, box_slices
from dask_p2p.transports.budget import LIMIT_REACHED, Reservation
from dask_p2p.transports.buffers import Buffers, buffer_bytes, raw_bytes
from dask_p2p.transports.checksums import region_sum
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.messenger import Message, Messenger
from dask_p2p.transports.replies import dtype_text, find_block, mismatch, refuse
from dask_p2p.types import Array, Key

__all__ = ["Outbox", "Sending"]

_PAUSE_S = 1e-3  # while the limit is reached


class Sending:
    """Parts of blocks packed one after another, one while another is sent.

    Parameters
    ----------
    host
        The worker that holds the blocks.
    buffers
        For messages, by the kind of the blocks.
    any_stream
        Whether blocks may have been written on any stream.
    dtype
        Of the blocks, as the reader declares it.
    outbox
        To which messages go.
    algorithm
        Of checksums; None for none.

    Attributes
    ----------
    sums : list of int
        For each message that was sent its checksum; 0 where none is asked for.
    """

    def __init__(
        self,
        host: WorkerContext,
        buffers: Mapping[str, Buffers],
        any_stream: bool,
        dtype: str,
        outbox: Outbox,
        algorithm: str | None,
    ) -> None:
        self.sums: list[int] = []
        self._host = host
        self._buffers = buffers
        self._any_stream = any_stream
        self._dtype = dtype
        self._outbox = outbox
        self._algorithm = algorithm
        self._packed: deque[_Packed] = deque()
        self._queues: dict[Any, Queue] = {}  # by kind and device

    def run(
        self, blocks: Sequence[tuple[Any, tuple[int, ...]]], parts: Sequence[tuple[int, Box]]
    ) -> dict[str, Any]:
        """Send all parts, up to the first block that fails; return the reply."""
        failure: dict[str, Any] = {}
        with ExitStack() as ending:
            ending.callback(self._outbox.close)
            for number, group in groupby(parts, key=itemgetter(0)):
                key, shape = blocks[number]
                try:
                    block = self._find(key, shape)
                except Exception as exc:
                    failure = refuse(exc)
                    break
                with device_of(block):
                    queue = self._queue_for(block, ending)
                    for _, box in group:
                        self._pack(key, block, box, queue)
                        self._send_packed(1)  # one is packed while another is sent
                del block
            self._send_packed(0)
        return failure

    def _find(self, key: Key, shape: tuple[int, ...]) -> Any:
        block = find_block(self._host, key, shape)
        if self._dtype != dtype_text(block.dtype):
            raise mismatch(f"block {key!r}", self._dtype, dtype_text(block.dtype))
        return block

    def _queue_for(self, block: Array, ending: ExitStack) -> Queue:
        """Return the queue that packs what lies where this block does, once that is written."""
        backend = backend_for(block)
        where = backend.name, getattr(backend.device_of(block), "id", None)
        queue = self._queues.get(where)
        if queue is None:
            queue = self._queues[where] = backend.queue(beside_copies=True)
            ending.callback(queue.synchronize)  # only then may buffers be reused
        queue.wait_until_written([block], any_stream=self._any_stream)
        return queue

    def _pack(self, key: Key, block: Array, box: Box, queue: Queue) -> None:
        nbytes = box_size(box) * block.dtype.itemsize
        if not self._outbox.has_room(nbytes):
            self._send_packed(0)
            self._outbox.make_room(nbytes)
        array = self._buffers[queue.kind].take(box_shape(box), block.dtype)
        wait = queue.pack(array, block[box_slices(box)])
        self._packed.append(_Packed(array, block, key, box, wait))

    def _send_packed(self, left: int) -> None:
        while len(self._packed) > left:
            packed = self._packed.popleft()
            packed.wait()
            array, algorithm = packed.array, self._algorithm
            sum_ = 0 if algorithm is None else region_sum(packed.key, packed.box, array, algorithm)
            with device_of(array):
                self._outbox.send(array)
            self.sums.append(sum_)


class _Packed(NamedTuple):
    """A part that is packed, or is being packed."""

    array: Array
    block: Array  # which is read until it is packed
    key: Key
    box: Box
    wait: Callable[[], None]  # until it is packed


class Outbox:
    """Messages to one reader under consecutive tags, a few of them on their way at a time."""

    def __init__(
        self,
        messenger: Messenger,
        address: bytes,
        closed: int,
        tag: int,
        ahead: int,
        timeout_s: float,
        reserved: Reservation,
        other_host: bool = False,
    ) -> None:
        self.sent_bytes = 0
        self._other_host = other_host
        self._reserved = reserved
        self._messenger = messenger
        self._address = address
        self._remote_closed = closed  # of the reader's endpoints to here
        self._tag = tag
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._sent: deque[tuple[Message, int]] = deque()  # with the size of its buffer

    def has_room(self, nbytes: int) -> bool:
        """Reserve room for an array that is to be packed, if there is room now."""
        return self._reserved.reserve(buffer_bytes(nbytes))

    def make_room(self, nbytes: int) -> None:
        """Reserve room for an array that is to be packed, when what was sent has arrived."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self.has_room(nbytes):
            if self._sent:
                self._wait_for_oldest()
            elif time.monotonic() > deadline_s:
                raise TransferError(LIMIT_REACHED)
            else:
                time.sleep(_PAUSE_S)

    def send(self, array: Array) -> None:
        """Send an array; wait until there is room for another."""
        self._messenger.renew(self._address, self._remote_closed)
        message = self._messenger.send(
            self._address, raw_bytes(array), self._tag, other_host=self._other_host
        )
        self._sent.append((message, buffer_bytes(array.nbytes)))
        self._tag += 1
        self.sent_bytes += array.nbytes
        while len(self._sent) > self._ahead:
            self._wait_for_oldest()

    def close(self) -> None:
        """Wait until everything has arrived."""
        try:
            while self._sent:
                self._wait_for_oldest()
        finally:
            self._reserved.close()

    def _wait_for_oldest(self) -> None:
        message, size_bytes = self._sent.popleft()
        message.result(self._timeout_s)
        self._reserved.release(size_bytes)
