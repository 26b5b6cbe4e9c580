"""The base of transports whose reader reads the holder's memory itself.

A holder publishes descriptors of its blocks (`dask_p2p.transports.leases`). A reader on
the same host takes a lease on a block, and reads regions of it by its transport, without the holder
taking part.

Usually a reader finds the descriptors without a request: a worker that runs an assembling task
first publishes its own blocks for the other workers. A reader that finds no descriptor requests the
publication from the holder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

from dask_p2p.backends import backend_for, backend_named, check_dtype_text, dtype_text, mismatch
from dask_p2p.backends.host import kernel_and_namespace
from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, Obstacle, TransferError
from dask_p2p.geometry import Box, box_slices
from dask_p2p.transports.base import (
    PROBE_TIMEOUT_S,
    Reading,
    Region,
    Request,
    Transport,
    WorkerContext,
    find_block,
)
from dask_p2p.transports.leases import Leases, PublishedBlocks
from dask_p2p.transports.process_memory import Peer, no_directory, separation
from dask_p2p.transports.rpc import Handler, ask_and_wait, check_reply, rpc_handler
from dask_p2p.types import Array, Key

EXPIRY_S = 0.1  # interval of checks for descriptors that have expired
CLOSE_S = 5.0  # longest wait of a closing transport for readers

logger = logging.getLogger(__name__)

_MOST_FROM_DISK = 2  # spilled blocks that are published at a time


class SameHostTransport(Transport):
    """Transport of published blocks between processes of one host."""

    within_host: ClassVar[bool] = True

    def __init__(self, worker: WorkerContext, options: Options) -> None:
        super().__init__(worker, options)
        self.directory = PublishedBlocks(worker.folder)
        self._peers: dict[str, tuple[Peer, Obstacle | None]] = {}  # by holder, with its obstacle
        self.expiring: asyncio.TimerHandle | None = None
        self._from_disk: deque[Any] = deque()  # keys of published blocks that are spilled
        self._peer_op = f"p2p_{self.name}_peer"
        self.publish_op = f"p2p_{self.name}_publish"

    # --- parts that subclasses implement ---

    @abstractmethod
    def memory_proof(self) -> str:
        """Return `Peer.memory_proof` of this process."""

    @abstractmethod
    def memory_obstacle(self, local: Peer, remote: Peer) -> Obstacle | None:
        """Return the obstacle to reading a process of this host and user; None without one."""

    @abstractmethod
    def address_of(self, block: Array) -> dict[str, Any]:
        """Wait for a block's values, and return its address for `Descriptor.address`."""

    @abstractmethod
    def regions(self, descriptor: Descriptor, reading: SameHostReading, number: int) -> ReadRegion:
        """Return the `ReadRegion` function of the leased block of a request.

        `reading.ending` closes all mappings and files that this method opens.
        """

    # --- the reader's side, in task threads ---

    def holder_obstacle(self, holder: str) -> Obstacle | None:
        return self._identify_peer(holder)[1]

    def boot_id(self, worker: str) -> str | None:
        if worker == self.worker.address:
            return kernel_and_namespace()[0]
        description = self._peers.get(worker)
        return None if description is None else description[0].boot_id

    def read(self, requests: Sequence[Request], options: Options) -> SameHostReading:
        peer, obstacle = self._identify_peer(requests[0].holder)
        if obstacle is not None:
            message = f"{requests[0].holder} cannot be read in place: {obstacle}"
            raise TransferError(message, obstacle=obstacle)
        return SameHostReading(self, requests, peer, options)

    def _identify_peer(self, holder: str) -> tuple[Peer, Obstacle | None]:
        """Return a worker's process, and the obstacle to reading its memory, if any.

        Asks the worker once. A missing answer is not recorded, so the next call asks again.
        """
        description = self._peers.get(holder)
        if description is None:
            about = "its process"
            reply = ask_and_wait(self.worker, holder, self._peer_op, PROBE_TIMEOUT_S, about)
            peer = Peer(**check_reply(reply, holder, about)["peer"])
            try:
                local = self.describe()
                obstacle = separation(local, peer) or self.memory_obstacle(local, peer)
            except OSError as exc:
                message = f"this worker cannot describe its own process: {exc}"
                raise TransferError(message) from exc
            description = self._peers[holder] = (peer, obstacle)
        return description

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {self._peer_op: self._serve_peer, self.publish_op: self._serve_publish}

    @property
    def refusal(self) -> Obstacle | None:
        """The obstacle to reading this worker's blocks by this transport; None without one."""
        text = self.directory.refusal
        return None if text is None else no_directory(text)

    def publish(self, blocks: Mapping[Any, Any]) -> None:
        if self.is_closed:
            return
        # Only blocks still held are published: a cancelled task's block may have been released.
        self._publish_ahead(
            (key, block.shape)
            for key, block in blocks.items()
            if backend_for(block).name in self.kinds and not self.directory.touch(key, block)
        )

    def _publish_ahead(self, blocks: Iterable[tuple[Any, tuple[int, ...]]]) -> None:
        for key, shape in blocks:
            try:
                if not self.worker.is_on_disk(key):
                    self.publish_block(key, shape)
            except Exception as exc:  # readers request the block later
                logger.debug("block %r is not published: %s: %s", key, type(exc).__name__, exc)

    def on_released(self, key: Key) -> None:
        self.directory.withdraw(key)

    def on_spilled(self, key: Key) -> None:
        """Withdraw a spilled block, which frees its memory. Any thread may call this."""
        self.directory.withdraw(key, also_unfinished=False)

    def on_worker_left(self, holder: str) -> None:
        self._peers.pop(holder, None)

    async def close(self) -> None:
        self.is_closed = True
        if self.expiring is not None:
            self.expiring.cancel()
        deadline_s = time.monotonic() + CLOSE_S
        while self.directory.close() and time.monotonic() <= deadline_s:
            await asyncio.sleep(0.01)

    @rpc_handler
    async def _serve_peer(self) -> dict[str, Any]:
        return {"peer": asdict(await self.worker.offload(self.describe))}

    def describe(self) -> Peer:
        return Peer.describe_self(
            self.memory_proof(), self.directory.folder, self.directory.refusal
        )

    @rpc_handler
    async def _serve_publish(
        self, *, blocks: Sequence[tuple[Key, tuple[int, ...]]]
    ) -> dict[str, Any]:
        await self.worker.offload(self.publish_block, *blocks[0])
        await self.worker.offload(self._publish_ahead, blocks[1:])
        return {}

    def publish_block(self, key: Key, shape: Any) -> None:
        was_on_disk = self.worker.is_on_disk(key)
        find = partial(self._find, key, shape)
        try:
            self.directory.publish(key, find, self._describe_block)
        finally:
            if self.expiring is None:  # a timer that is already set covers this block too
                self.worker.loop.call_soon_threadsafe(self._expire_later)
        if was_on_disk and key not in self._from_disk:
            self._from_disk.append(key)
            # Only the latest of these stay in memory, and those with a lease.
            while len(self._from_disk) > _MOST_FROM_DISK:
                self.directory.withdraw(self._from_disk.popleft())

    def _find(self, key: Key, shape: Any) -> Any:
        block = find_block(self.worker, key, shape)
        if (kind := backend_for(block).name) not in self.kinds:  # perhaps spilled to host memory
            raise TransferError(f"the block is in memory of {kind} arrays", scope="region")
        return block

    def _describe_block(self, block: Array) -> bytes:
        layout = tuple(block.shape), tuple(block.strides), dtype_text(block.dtype)
        return Descriptor(*layout, self.address_of(block)).text()

    def _expire_later(self) -> None:
        if self.expiring is None and not self.is_closed:
            self.expiring = self.worker.loop.call_later(EXPIRY_S, self._expire)

    def _expire(self) -> None:
        self.expiring = None
        # Spilled blocks are withdrawn too, to free the memory that Dask reclaims.
        if self.directory.expire(self.options.retain_blocks_s, self.worker.is_on_disk):
            self._expire_later()


# Blocks of another process, read in place, each under a lease.
#
# A holder publishes each block's address, shape and dtype as its `Descriptor`.

# A reader looks for a block's descriptor for this time. Then it requests one from the holder.
_WAIT_S = 5e-3
_POLL_S = 20e-6
PUBLISH_REQUESTS = 3  # to a holder that withdraws the block again each time
_MOST_PUBLISHED = 10_000  # blocks in one request to publish

#: Function that returns a region of an open block; other arguments as for `Region.result`.
ReadRegion = Callable[[Box, float | None, Array | None], Any]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The address and the layout of a published block."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    address: Mapping[str, Any]  # address of the block, in the transport's terms

    def text(self) -> bytes:
        # Not by `asdict`, which makes deep copies.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def parse(cls, text: bytes, block: Request) -> Descriptor:
        """Return a descriptor, checked against the request for its block."""
        descriptor = _read(text)
        if descriptor.shape != tuple(block.shape):
            declared = f"{block.dtype} {block.shape}"
            raise mismatch(block, declared, f"{descriptor.dtype} {descriptor.shape}")
        check_dtype_text(block, dtype_text(block.dtype), descriptor.dtype)
        return descriptor


@lru_cache(maxsize=1024)  # successive tasks of a worker read the same blocks
def _read(text: bytes) -> Descriptor:
    fields = json.loads(text)
    layout = {name: tuple(fields[name]) for name in ("shape", "strides")}
    return Descriptor(**{**fields, **layout})


def regions_of(array: Array) -> ReadRegion:
    """Return the `ReadRegion` function of an array in this process, mapped or empty."""
    return lambda box, *_: array[box_slices(box)]


class SameHostReading(Reading):
    """The reading of blocks of one process. Each block is opened for its first part."""

    def __init__(
        self,
        transport: SameHostTransport,
        requests: Sequence[Request],
        peer: Peer,
        options: Options,
    ) -> None:
        super().__init__(requests, transport.footprint(options, requests[0].kind))
        self.peer = peer
        #: By number of the request: closes the block, and ends the lease on it.
        self.ending: dict[int, ExitStack] = {}
        self._transport = transport
        self._options = options
        self._leases: Leases | None = None
        self._regions: dict[int, ReadRegion] = {}  # by number of the request

    def __iter__(self) -> Iterator[Region]:
        for part in self.parts(is_tapered=self._transport.in_place):
            number = part.request
            request = self.requests[number]
            try:
                if number not in self._regions and 0 in request.shape:  # no memory to lease
                    empty = backend_named(request.kind).empty(request.shape, request.dtype)
                    self._regions[number] = regions_of(empty)
                elif number not in self._regions:
                    descriptor = Descriptor.parse(self._lease(number), request)
                    self._regions[number] = self._transport.regions(descriptor, self, number)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(number)
                if number in self.ending:
                    self.end(number)
                yield part.mark_failed(exc)
            else:
                yield part.mark_requested(partial(self._regions[number], part.box))

    def _lease(self, number: int) -> bytes:
        """Lease the block of a request, and return its descriptor.

        Requests the publication if the holder does not publish the block on its own.
        """
        request, request_count = self.requests[number], 0
        deadline_s = time.monotonic() + _WAIT_S
        try:
            while True:
                with suppress(FileNotFoundError):  # the holder is closing
                    leases = self._leases = self._leases or Leases(self.peer.folder)
                    if (lease := leases.take(request.key)) is not None:
                        entry, text = lease
                        self.ending[number] = ExitStack()
                        self.ending[number].callback(leases.end, entry)
                        return text
                if not request_count and time.monotonic() <= deadline_s:
                    time.sleep(_POLL_S)
                    continue
                # The block may be withdrawn again: moved and back, or one of many on disk.
                if request_count == PUBLISH_REQUESTS:
                    break
                request_count += 1
                # All blocks that are in memory are published, and the first one in any case.
                transport, about = self._transport, f"block {request.key!r}"
                timeout_s = self._options.request_timeout_s
                requests = self.requests[number:][:_MOST_PUBLISHED]
                reply = ask_and_wait(
                    transport.worker, request.holder, transport.publish_op, timeout_s, about,
                    blocks=[(block.key, block.shape) for block in requests],
                )  # fmt: skip
                check_reply(reply, request.holder, request)
        except OSError as exc:
            message = f"the descriptors of {request.holder} cannot be read: {exc}"
            raise TransferError(message) from exc
        # The blocks of a holder that spills are withdrawn often. Another transport reads this one.
        message = f"{request.holder} published and withdrew {request} {request_count} times"
        raise TransferError(message, scope="region")

    def confirm(self) -> None:
        # All blocks are of one process. Blocks without a lease were confirmed before.
        leases = self._leases if self.ending else None
        request = self.requests[next(iter(self.ending), 0)]
        try:
            lives = leases is None or leases.holder_lives()
        except OSError as exc:
            raise TransferError(f"cannot check that {request.holder} is alive: {exc}") from exc
        if not lives:
            raise TransferError(f"{request.holder} ended while {request} was read", scope="block")

    def end(self, number: int) -> None:
        """End the lease on a block. Call only after all reads of the block are synchronised."""
        self.ending.pop(number).close()

    def close(self) -> None:
        with ExitStack() as ending:  # ends each lease, even if ending another one fails
            if self._leases is not None:
                ending.callback(self._leases.close)
            while self.ending:
                ending.push(self.ending.popitem()[1])
