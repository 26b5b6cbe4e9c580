"""Blocks of another process, read in place, each under a lease.

A holder publishes each block's address, shape and dtype as its `Descriptor`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dask_p2p.backends import backend_named
from dask_p2p.backends.declared import check_dtype_text, dtype_text, mismatch
from dask_p2p.config import Options, TransportOptions, duration_s, option, section
from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.geometry import Box, box_slices
from dask_p2p.interprocess.peer import Peer
from dask_p2p.interprocess.rpc import ask_and_wait, check_reply
from dask_p2p.transports.base import Reading, Region, Request
from dask_p2p.transports.in_place.leases import Leases
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.transports.in_place.same_host import SameHostTransport

_POLL_S = 20e-6
PUBLISH_REQUESTS = 3  # to a holder that withdraws the block again each time
_MOST_PUBLISHED = 10_000  # blocks in one request to publish

#: Function that returns a region of an open block; other arguments as for `Region.result`.
ReadRegion = Callable[[Box, float | None, Array | None], Any]


@section("transports.directory")
class DirectoryOptions(TransportOptions):
    """See p2p-schema.yaml."""

    wait_s: float = option("wait", duration_s)
    retain_s: float = option("retain", duration_s)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The address and the layout of a published block."""

    key: str  # repr of the key
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
        try:
            descriptor = _read(text)
        except (ValueError, TypeError, KeyError) as exc:
            raise TransferError(f"the descriptor of {block} cannot be read: {exc}") from exc
        if descriptor.key != repr(block.key):
            raise TransferError(f"the descriptor of {block} is that of {descriptor.key}")
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
        super().__init__(requests, transport.footprint(options, requests[0].kind), options)
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
            wanted = self.requests[number]
            try:
                if number not in self._regions and 0 in wanted.shape:  # no memory to lease
                    empty = backend_named(wanted.kind).empty(wanted.shape, wanted.dtype)
                    self._regions[number] = regions_of(empty)
                elif number not in self._regions:
                    descriptor = Descriptor.parse(self._lease(number), wanted)
                    self._regions[number] = self._transport.regions(descriptor, self, number)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(number)
                if number in self.ending:
                    self.end(number)
                yield part.failed(exc)
            else:
                yield part.on_its_way(partial(self._regions[number], part.box))

    def _lease(self, number: int) -> bytes:
        """Lease the block of a request, and return its descriptor.

        Requests the publication if the holder does not publish the block on its own.
        """
        wanted, asked = self.requests[number], 0
        deadline_s = time.monotonic() + DirectoryOptions.of(self._options).wait_s
        try:
            while True:
                with suppress(FileNotFoundError):  # the holder is closing
                    leases = self._leases = self._leases or Leases(self.peer.folder)
                    if (taken := leases.take(wanted.key)) is not None:
                        entry, text = taken
                        self.ending[number] = ExitStack()
                        self.ending[number].callback(leases.end, entry)
                        return text
                if not asked and time.monotonic() <= deadline_s:
                    time.sleep(_POLL_S)
                    continue
                # The block may be withdrawn again: moved and back, or one of many on disk.
                if asked == PUBLISH_REQUESTS:
                    break
                asked += 1
                self._ask_to_publish(self.requests[number:][:_MOST_PUBLISHED])
        except OSError as exc:
            message = f"the descriptors of {wanted.holder} cannot be read: {exc}"
            raise TransferError(message) from exc
        raise TransferError(f"{wanted.holder} published and withdrew {wanted} {asked} times")

    def _ask_to_publish(self, requests: Sequence[Request]) -> None:
        """Request the publication of the first block, and of all others that are in memory."""
        wanted, host, op = requests[0], self._transport.worker, self._transport.publish_op
        blocks, about = [(other.key, other.shape) for other in requests], f"block {wanted.key!r}"
        timeout_s = self._options.request_timeout_s
        reply = ask_and_wait(host, wanted.holder, op, timeout_s, about, blocks=blocks)
        check_reply(reply, wanted.holder, wanted)

    def confirm(self) -> None:
        # All blocks are of one process. Blocks without a lease were confirmed before.
        leases = self._leases if self.ending else None
        wanted = self.requests[next(iter(self.ending), 0)]
        try:
            lives = leases is None or leases.holder_lives()
        except OSError as exc:
            raise TransferError(f"cannot check that {wanted.holder} is alive: {exc}") from exc
        if not lives:
            raise BlockUnavailableError(f"{wanted.holder} ended while {wanted} was read")

    def end(self, number: int) -> None:
        """End the lease on a block. Call only after all reads of the block are synchronised."""
        self.ending.pop(number).close()

    def close(self) -> None:
        with ExitStack() as ending:  # ends each lease, even if ending another one fails
            if self._leases is not None:
                ending.callback(self._leases.close)
            while self.ending:
                ending.push(self.ending.popitem()[1])
