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
from dask_p2p.interprocess.peer import Peer
from dask_p2p.transports.in_place.descriptor import Descriptor
from dask_p2p.transports.in_place.leases import Leases
from dask_p2p.transports.reading import Reading, Region, Request
from dask_p2p.transports.replies import ask_and_wait, check_reply
from dask_p2p.transports.silence import PUBLISH_REQUESTS
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.transports.in_place.same_host import SameHostTransport

__all__ = ["DirectoryOptions", "Regions", "SameHostReading", "regions_of"]

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


class SameHostReading(Reading):
    """Blocks of one process, opened one after another, each when its first part is wanted.

    Attributes
    ----------
    peer : Peer
        The process.
    ending : dict
        By the number of its request, what ends the lease on a block, and closes the block.
    """

    def __init__(
        self,
        transport: SameHostTransport,
        requests: Sequence[Request],
        peer: Peer,
        options: Options,
    ) -> None:
        super().__init__(requests, transport.footprint(options, requests[0].kind), options)
        self.peer = peer
        self.ending: dict[int, ExitStack] = {}
        self._transport = transport
        self._options = options
        self._leases: Leases | None = None
        self._regions: dict[int, Regions] = {}  # by number of the request

    def __iter__(self) -> Iterator[Region]:
        for part in self.parts(is_tapered=self._transport.in_place):
            number = part.request
            try:
                if number not in self._regions:
                    self._regions[number] = self._open(number)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(number)
                yield part.failed(exc)
            else:
                yield part.on_its_way(partial(self._regions[number], part.box))

    def _open(self, number: int) -> Regions:
        """Lease the block of a request, and open it."""
        wanted, transport = self.requests[number], self._transport
        if 0 in wanted.shape:  # it has no address, and needs no lease
            return regions_of(backend_named(wanted.kind).empty(wanted.shape, wanted.dtype))
        leases, entry, text = self._lease(self.requests[number:])
        self.ending[number] = ExitStack()
        self.ending[number].callback(leases.end, entry)
        try:
            descriptor = Descriptor.parse(text, wanted)
            return transport.regions(descriptor, self, number)
        except BaseException:
            self.end(number)
            raise

    def _lease(self, requests: Sequence[Request]) -> tuple[Leases, int, bytes]:
        """Take a lease on the first block; if the holder does not publish by itself, ask it to."""
        wanted, asked = requests[0], 0
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
            message = f"the descriptors of {wanted.holder} cannot be read: {exc}"
            raise TransferError(message) from exc
        raise TransferError(f"{wanted.holder} published and withdrew {wanted} {asked} times")

    def _ask_to_publish(self, requests: Sequence[Request]) -> None:
        """Have the holder publish the first of these blocks, and the others while it is at it."""
        wanted, host, op = requests[0], self._transport.worker, self._transport.publish_op
        blocks, about = [(other.key, other.shape) for other in requests], f"block {wanted.key!r}"
        timeout_s = self._options.request_timeout_s
        reply = ask_and_wait(host, wanted.holder, op, timeout_s, about, blocks=blocks)
        check_reply(reply, wanted)

    def confirm(self) -> None:
        # All blocks are of one process. What is no longer leased was confirmed before.
        leases = self._leases if self.ending else None
        wanted = self.requests[next(iter(self.ending), 0)]
        try:
            lives = leases is None or leases.holder_lives()
        except OSError as exc:
            raise TransferError(f"cannot find out whether {wanted.holder} is alive: {exc}") from exc
        if not lives:
            raise BlockUnavailableError(f"{wanted.holder} ended while {wanted} was read")

    def end(self, number: int) -> None:
        """End the lease on a block, once all that reads the block has been synchronised."""
        self.ending.pop(number).close()

    def close(self) -> None:
        with ExitStack() as ending:  # each, whatever becomes of the others
            if self._leases is not None:
                ending.callback(self._leases.close)
            while self.ending:
                ending.push(self.ending.popitem()[1])
