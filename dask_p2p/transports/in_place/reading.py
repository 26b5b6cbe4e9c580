"""Blocks of another process that are read where they lie, each under a lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dask_p2p.backends import backend_named
from dask_p2p.config import Options, Section, duration_s, option, section
from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.geometry import Box, box_slices
from dask_p2p.transports.in_place.descriptor import Descriptor, Peer
from dask_p2p.transports.in_place.leases import Leases
from dask_p2p.transports.reading import Reading, Region, Request
from dask_p2p.transports.replies import ask_and_wait, check_reply
from dask_p2p.transports.silence import PUBLISH_REQUESTS
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.transports.in_place.same_host import SameHostTransport

__all__ = ["DirectoryOptions", "OpenBlock", "Regions", "SameHostReading", "regions_of"]

_POLL_S = 20e-6
_MOST_PUBLISHED = 10_000  # by one request

#: Returns a region of an open block; the rest is that of `Region.result`.
Regions = Callable[[Box, float | None, Array | None], Any]


@section("transports.directory")
class DirectoryOptions(Section):
    """See p2p-schema.yaml."""

    wait_s: float = option("wait", duration_s)
    retain_s: float = option("retain", duration_s)


def regions_of(array: Array) -> Regions:
    """Return what gives regions of an array that is in this process, mapped or empty."""
    return lambda box, *_: array[box_slices(box)]


class OpenBlock:
    """A block of another process, leased until it is closed. Not for several threads at a time."""

    def __init__(self, wanted: Request) -> None:
        self.wanted = wanted
        self.is_open = True
        self.ending: list[Callable[[], None]] = []  # what closes it, the last first
        self.leases: Leases | None = None  # none for a block without elements
        self.regions: Regions

    def confirm(self) -> None:
        """Raise `TransferError` if the holder has ended, or if that cannot be found out."""
        holder = self.wanted.holder
        try:
            lives = self.leases is None or self.leases.holder_lives()
        except OSError as exc:
            raise TransferError(f"cannot find out whether {holder} is alive: {exc}") from exc
        if not lives:
            raise BlockUnavailableError(f"{holder} ended while {self.wanted} was read")

    def close(self) -> None:
        """End the lease, once all that reads the block has been synchronised. Idempotent."""
        self.is_open = False
        while self.ending:
            self.ending.pop()()


class SameHostReading(Reading):
    """Blocks of one process, opened one after another, each when its first part is wanted."""

    def __init__(
        self,
        transport: SameHostTransport,
        requests: Sequence[Request],
        peer: Peer,
        options: Options,
    ) -> None:
        super().__init__(requests, transport.footprint_for(requests, options))
        self.peer = peer
        self._transport = transport
        self._options = options
        self._leases: Leases | None = None
        self._opened: dict[int, OpenBlock] = {}

    def __iter__(self) -> Iterator[Region]:
        for part in self.parts(is_tapered=self._transport.in_place):
            try:
                block = self._opened.get(part.request) or self._open(part.request)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(part.request)
                yield part.failed(exc)
            else:
                yield part.on_its_way(partial(block.regions, part.box))

    def _open(self, number: int) -> OpenBlock:
        """Lease the block of a request, and open it."""
        wanted, transport = self.requests[number], self._transport
        opened = OpenBlock(wanted)
        try:
            if 0 in wanted.shape:  # it has no address, and needs no lease
                empty = backend_named(wanted.kind).empty(wanted.shape, wanted.dtype)
                opened.regions = regions_of(empty)
            else:
                opened.leases, entry, text = self._lease(self.requests[number:])
                opened.ending.append(partial(opened.leases.end, entry))
                descriptor = Descriptor.parse(text, wanted, transport.name)
                opened.regions = transport.regions(descriptor, opened, self.peer)
        except BaseException:
            opened.close()
            raise
        self._opened[number] = opened
        return opened

    def _lease(self, requests: Sequence[Request]) -> tuple[Leases, int, bytes]:
        """Take a lease on the first block; if the holder does not publish by itself, ask it to."""
        wanted, name, asked = requests[0], self._transport.name, 0
        deadline_s = time.monotonic() + DirectoryOptions.of(self._options).wait_s
        try:
            while True:
                with suppress(FileNotFoundError):  # the holder is closing
                    leases = self._leases = self._leases or Leases(self.peer.folder)
                    if (taken := leases.take(wanted.key)) is not None:
                        return leases, *taken
                if not asked and time.monotonic() <= deadline_s:
                    time.sleep(_POLL_S)
                    continue
                # It may be gone again: moved and back, or one of many that were on disk.
                if asked == PUBLISH_REQUESTS:
                    break
                asked += 1
                self._ask_to_publish(requests[:_MOST_PUBLISHED])
        except OSError as exc:
            message = f"{name}: the descriptors of {wanted.holder} cannot be read: {exc}"
            raise TransferError(message) from exc
        raise TransferError(
            f"{name}: {wanted.holder} published and withdrew {wanted} {asked} times"
        )

    def _ask_to_publish(self, requests: Sequence[Request]) -> None:
        """Have the holder publish the first of these blocks, and the others while it is at it."""
        wanted, name, op = requests[0], self._transport.name, self._transport.publish_op
        blocks, about = [(other.key, other.shape) for other in requests], f"block {wanted.key!r}"
        host, timeout_s = self._transport.worker, self._options.request_timeout_s
        reply = ask_and_wait(name, host, wanted.holder, op, timeout_s, about, blocks=blocks)
        check_reply(reply, wanted, name)

    def confirm(self) -> None:
        # All are of one process: the first that is still leased tells of every other.
        leased = (block for block in self._opened.values() if block.is_open and block.leases)
        if (first := next(leased, None)) is not None:
            first.confirm()

    def close(self) -> None:
        with ExitStack() as ending:  # each, whatever becomes of the others
            if self._leases is not None:
                ending.callback(self._leases.close)
            for block in self._opened.values():
                ending.callback(block.close)
