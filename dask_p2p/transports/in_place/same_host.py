"""The base of transports whose reader reads the holder's memory itself.

A holder publishes descriptors of its blocks (`dask_p2p.transports.in_place.leases`). A reader on
the same host takes a lease on a block, and reads regions of it by its transport, without the holder
taking part.

Usually a reader finds the descriptors without a request: a worker that runs an assembling task
first publishes its own blocks for the other workers. A reader that finds no descriptor requests the
publication from the holder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

from dask_p2p import tuning
from dask_p2p.backends import backend_for
from dask_p2p.backends.declared import dtype_text
from dask_p2p.backends.host.hardware import kernel_and_namespace
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, TransferError, UnsuitableError
from dask_p2p.interprocess.peer import Peer, no_directory, separation
from dask_p2p.interprocess.rpc import Handler, ask_and_wait, check_reply
from dask_p2p.transports.base import PROBE_TIMEOUT_S, Request, Transport, answers
from dask_p2p.transports.context import WorkerContext, find_block
from dask_p2p.transports.in_place.leases import PublishedBlocks
from dask_p2p.transports.in_place.reading import (
    Descriptor,
    DirectoryOptions,
    ReadRegion,
    SameHostReading,
)
from dask_p2p.types import Array, Key

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
        return self._known(holder)[1]

    def boot_id(self, worker: str) -> str | None:
        if worker == self.worker.address:
            return kernel_and_namespace()[0]
        known = self._peers.get(worker)
        return None if known is None else known[0].boot_id

    def read(self, requests: Sequence[Request], options: Options) -> SameHostReading:
        peer, obstacle = self._known(requests[0].holder)
        if obstacle is not None:
            message = f"{requests[0].holder} cannot be read in place: {obstacle}"
            raise TransferError(message, obstacle=obstacle)
        return SameHostReading(self, requests, peer, options)

    def _known(self, holder: str) -> tuple[Peer, Obstacle | None]:
        """Return a worker's process, and the obstacle to reading its memory, if any.

        Asks the worker once. A missing answer is not recorded, so the next call asks again.
        """
        known = self._peers.get(holder)
        if known is None:
            about = "its process"
            reply = ask_and_wait(self.worker, holder, self._peer_op, PROBE_TIMEOUT_S, about)
            peer = Peer(**check_reply(reply, holder, about)["peer"])
            try:
                known = self._peers[holder] = (peer, self._peer_obstacle(peer))
            except OSError as exc:
                message = f"this worker cannot describe its own process: {exc}"
                raise TransferError(message) from exc
        return known

    def _peer_obstacle(self, peer: Peer) -> Obstacle | None:
        local = self.describe()
        return separation(local, peer) or self.memory_obstacle(local, peer)

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {self._peer_op: self._answer_peer, self.publish_op: self._answer_publish}

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
        """Publish the blocks that are in memory, without errors. Readers request the others."""
        for key, shape in blocks:
            try:
                if not self.worker.is_on_disk(key):
                    self.publish_block(key, shape)
            except Exception as exc:
                logger.debug("block %r is not published: %s: %s", key, type(exc).__name__, exc)

    def on_released(self, key: Key) -> None:
        self.directory.withdraw(key)

    def on_spilled(self, key: Key) -> None:
        """Withdraw a spilled block, which frees its memory. Any thread may call this."""
        self.directory.retire(key)

    def on_worker_left(self, holder: str) -> None:
        self._peers.pop(holder, None)

    async def close(self) -> None:
        self.is_closed = True
        if self.expiring is not None:
            self.expiring.cancel()
        deadline_s = time.monotonic() + tuning.current.close_s
        while self.directory.close():
            if time.monotonic() > deadline_s:
                self.directory.linger()
                break
            await asyncio.sleep(0.01)

    @answers
    async def _answer_peer(self) -> dict[str, Any]:
        return {"peer": asdict(await self.worker.offload(self.describe))}

    def describe(self) -> Peer:
        """Describe this process."""
        return Peer.own(self.memory_proof(), self.directory.folder, self.directory.refusal)

    @answers
    async def _answer_publish(
        self, *, blocks: Sequence[tuple[Key, tuple[int, ...]]]
    ) -> dict[str, Any]:
        """Publish the first of these blocks, and all others that are in memory."""
        await self.worker.offload(self.publish_block, *blocks[0])
        await self.worker.offload(self._publish_ahead, blocks[1:])
        return {}

    def publish_block(self, key: Key, shape: Any) -> None:
        was_on_disk = self.worker.is_on_disk(key)
        find = partial(self._find, key, shape)
        try:
            self.directory.publish(key, find, partial(self._describe_block, key))
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
            raise UnsuitableError(f"the block is in memory of {kind} arrays")
        return block

    def _describe_block(self, key: Key, block: Array) -> bytes:
        """Wait for a block's values, and return its descriptor."""
        return Descriptor(
            key=repr(key),
            shape=tuple(block.shape),
            strides=tuple(block.strides),
            dtype=dtype_text(block.dtype),
            address=self.address_of(block),
        ).text()

    def _expire_later(self) -> None:
        if self.expiring is None and not self.is_closed:
            after_s = tuning.current.descriptor_expiry_s
            self.expiring = self.worker.loop.call_later(after_s, self._expire)

    def _expire(self) -> None:
        self.expiring = None
        # Spilled blocks are withdrawn too, to free the memory that Dask reclaims.
        if self.directory.expire(
            DirectoryOptions.of(self.options).retain_s, self.worker.is_on_disk
        ):
            self._expire_later()
