"""Blocks of another process that are read where they lie, each under a lease."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from dask_p2p.backends import backend_named
from dask_p2p.config import Options
from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.layout import Box, box_slices
from dask_p2p.retry import PUBLISH_REQUESTS
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.descriptor import Descriptor, Peer
from dask_p2p.transports.directory import DirectoryOptions, Lease, take
from dask_p2p.transports.flow_control import FlowControl
from dask_p2p.transports.reading import Arrived, Failed, Pending, Reading, Region, Request
from dask_p2p.transports.replies import ask_and_wait, check_reply
from dask_p2p.types import Array, Kind

__all__ = ["ArrayBlock", "LeasedBlock", "SameHostReading", "publish_op"]

_POLL_S = 20e-6
_MOST_PUBLISHED = 10_000  # by one request


def publish_op(transport: str) -> str:
    """Return the name of the operation by which a holder is asked to publish blocks."""
    return f"p2p_{transport}_post"


class LeasedBlock(ABC):
    """A block that is read under a lease.

    Parameters
    ----------
    block
        As it is declared.
    lease
        Ended with `close`; None for a block that needs none.
    release
        Called once the lease has ended.
    """

    def __init__(
        self, block: Request, lease: Lease | None = None, release: Callable[[], None] | None = None
    ) -> None:
        self.block = block
        self._lease = lease
        self._release = release

    @property
    def is_open(self) -> bool:
        """Whether the lease has not ended."""
        return self._lease is not None

    @abstractmethod
    def region(self, box: Box) -> Pending:
        """Return a region of it."""

    def confirm(self) -> None:
        """Raise an error if the holder has ended: what is read of it then is nowhere promised."""
        if self._lease is None:
            return
        try:
            lives = self._lease.holder_lives()
        except OSError as exc:
            message = f"cannot find out whether {self.block.holder} is alive: {exc}"
            raise TransferError(message) from exc
        if not lives:
            raise BlockUnavailableError(f"{self.block.holder} ended while {self.block} was read")

    def close(self) -> None:
        """End the lease. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
            if self._release is not None:
                self._release()


class ArrayBlock(LeasedBlock):
    """A block that is an array in this process: of mapped memory, or without elements."""

    def __init__(self, array: Array, block: Request, *lease: Any) -> None:
        super().__init__(block, *lease)
        self._array = array

    def region(self, box: Box) -> Pending:
        return Arrived(self._array[box_slices(box)])


class SameHostReading(Reading):
    """Blocks of one process, leased one after another, each when its first part is wanted.

    Parameters
    ----------
    requests, flow
        See `Reading`.
    host
        The reader's worker.
    peer
        The holder's process.
    options
        Of the task.
    """

    transport: ClassVar[str]  # its name
    kind: ClassVar[Kind]  # of the blocks
    is_tapered: ClassVar[bool] = False  # see `Reading.parts`

    def __init__(
        self,
        requests: Sequence[Request],
        flow: FlowControl,
        host: WorkerContext,
        peer: Peer,
        options: Options,
    ) -> None:
        super().__init__(requests, flow)
        self.peer = peer
        self._host = host
        self._options = options
        self._opened: dict[int, LeasedBlock] = {}

    @abstractmethod
    def open_leased(self, descriptor: Descriptor, block: Request, lease: Lease) -> LeasedBlock:
        """Return a block on which a lease was taken. If this fails, the lease is ended."""

    def __iter__(self) -> Iterator[Region]:
        for part in self.parts(is_tapered=self.is_tapered):
            try:
                block = self._opened.get(part.request) or self._open(part.request)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(part.request)
                yield Region(part, Failed(exc))
            else:
                yield Region(part, block.region(part.box))

    def _open(self, number: int) -> LeasedBlock:
        block = self.requests[number]
        if 0 in block.shape:  # it has no address, and needs no lease
            empty = backend_named(self.kind).empty(block.shape, block.dtype)
            opened: LeasedBlock = ArrayBlock(empty, block)
        else:
            lease = self._lease(self.requests[number:])
            try:
                descriptor = Descriptor.parse(lease.text, block, self.transport)
                opened = self.open_leased(descriptor, block, lease)
            except BaseException:
                lease.close()
                raise
        self._opened[number] = opened
        return opened

    def _lease(self, requests: Sequence[Request]) -> Lease:
        """Take a lease on the first block; if the holder does not publish by itself, ask it to."""
        block, folder = requests[0], self.peer.folder
        deadline_s = time.monotonic() + DirectoryOptions.of(self._options).wait_s
        try:
            while (lease := take(folder, block.key)) is None:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
            for _ in range(PUBLISH_REQUESTS):
                if lease is not None:
                    return lease
                self._ask_to_publish(requests[:_MOST_PUBLISHED])
                # It may be gone again: moved and back, or one of many that were on disk.
                lease = take(folder, block.key)
        except OSError as exc:
            message = f"{self.transport}: the descriptors of {block.holder} cannot be read: {exc}"
            raise TransferError(message) from exc
        if lease is None:
            message = f"{block.holder} published and withdrew {block} {PUBLISH_REQUESTS} times"
            raise TransferError(f"{self.transport}: {message}")
        return lease

    def _ask_to_publish(self, requests: Sequence[Request]) -> None:
        """Have the holder publish the first of these blocks, and the others while it is at it."""
        block, name, timeout_s = requests[0], self.transport, self._options.request_timeout_s
        reply = ask_and_wait(
            name,
            self._host,
            block.holder,
            publish_op(name),
            timeout_s,
            f"block {block.key!r}",
            blocks=[(request.key, request.shape) for request in requests],
        )
        check_reply(reply, block, name)

    def confirm(self) -> None:
        # All are of one process: the first that is still leased tells of every other.
        for block in self._opened.values():
            if block.is_open:
                block.confirm()
                return

    def close(self) -> None:
        with ExitStack() as leases:  # each, whatever becomes of the others
            for block in self._opened.values():
                leases.callback(block.close)
