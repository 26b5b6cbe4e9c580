"""Memory of transports in addition to blocks, and the sizes of parts that follow from it.

The regions in transfer to a task stay below `Options.staging_limit_bytes`: the sizes of their parts
are computed from it. Regions that a holder has packed for all its readers stay below the same
limit: their memory is reserved in a `ByteBudget`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

from dask_p2p.backends import MOST_UNREAD, backend_named
from dask_p2p.config import Options, transport_classes
from dask_p2p.interprocess.buffers import buffer_bytes
from dask_p2p.types import Kind


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes and numbers of parts that a transport holds, for blocks of one kind."""

    part_bytes: int | None  # upper bound of a part; None: no bound, and no memory for parts
    parts_in_flight: int  # parts requested while the one before them is written to the output
    parts_held: int = 1  # parts per task at the reader
    parts_packed: int = 0  # parts per task at the holder
    parts_idle: int = 0  # buffers that a worker keeps for reuse

    copies: int = 2  # upper bound of the copies of a region in transfer
    is_buffered: bool = True  # True if parts are in buffers, whose sizes are powers of two
    comes_in_batches: bool = False  # True if small regions share a part

    def task_bytes(self, largest_bytes: int, remote_bytes: int, item_bytes: int) -> int:
        """Return the upper bound of one task's memory; see `staging_bytes`."""
        if self.part_bytes is None:
            return 0
        whole_bytes = remote_bytes if self.comes_in_batches else largest_bytes
        each_bytes = self._size_of(min(max(item_bytes, self.part_bytes), whole_bytes))
        return min(self.parts_held * each_bytes, self.copies * remote_bytes)

    @property
    def each_bytes(self) -> int:
        """Upper bound of the memory of one part."""
        return self._size_of(self.part_bytes or 0)

    def idle_bytes(self, options: Options) -> int:
        """Return the upper bound of idle buffers of a worker with these options."""
        return min(self.parts_idle * self.each_bytes, options.staging_limit_bytes)

    def _size_of(self, part_bytes: int) -> int:
        return buffer_bytes(part_bytes) if self.is_buffered and part_bytes else part_bytes


def part_that_fits(part_bytes: int, most_bytes: int) -> int:
    """Return a part's size; if its buffer does not fit, the largest power of two that fits.

    >>> part_that_fits(3000, 4096), part_that_fits(5000, 4097)
    (3000, 4096)
    """
    if buffer_bytes(part_bytes) > most_bytes:
        return 1 << (most_bytes.bit_length() - 1)
    return part_bytes


def parts_held(in_flight: int, kind: Kind) -> int:
    """Return the number of parts that a task holds: those in flight, and those being written."""
    return in_flight + 1 + (MOST_UNREAD if backend_named(kind).on_device else 0)


def buffered(
    part_bytes: int, in_flight: int, left_bytes: int, held: Callable[[int], int]
) -> Footprint:
    """Return a footprint with parts of the configured size, or the largest size that fits.

    All parts together take at most `left_bytes`. `held` returns the number of parts held for a
    number of parts in flight. If the smallest parts do not fit, parts come one after another.
    """
    smallest_bytes = buffer_bytes(1)
    if left_bytes // held(in_flight) < smallest_bytes:
        in_flight = 0
    most_bytes = max(smallest_bytes, left_bytes // held(in_flight))
    part_bytes = part_that_fits(part_bytes, most_bytes)
    return Footprint(part_bytes, in_flight, held(in_flight), comes_in_batches=True)


#: Function that releases a reservation. Idempotent; a garbage collection may call it.
Release: TypeAlias = Callable[[], object]


class ByteBudget:
    """A byte budget shared by requests. A request above the limit is admitted alone.

    Each request reserves all its memory in one step, so that no request waits while it holds some.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[object, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are reserved now."""
        return sum(list(self._reserved.values()))

    def reserve(self, *sizes: int) -> list[Release] | None:
        """Reserve memory of these sizes. Return a release function for each; None if it is full."""
        with self._lock:
            reserved_bytes = self.reserved_bytes
            if reserved_bytes and reserved_bytes + sum(sizes) > self.limit_bytes:
                return None
            made = [object() for _ in sizes]
            self._reserved.update(zip(made, sizes, strict=True))
            return [partial(self._reserved.pop, one, None) for one in made]  # without a lock


# --- all transports together ---


def _used(options: Options, kind: Kind, within_host: Collection[bool]) -> Iterator[Footprint]:
    """Return the footprints of the transports that may move blocks of this kind."""
    classes = transport_classes()
    for transport in (classes[name] for name in options.order(kind) if name in classes):
        if kind in transport.kinds and transport.within_host in within_host:
            yield transport.footprint(options, kind)


def left_bytes(options: Options, kind: Kind) -> int:
    """Return the memory that remains for parts from other hosts, beyond those from this host."""
    local = _used(options, kind, [True])
    held_bytes = max((used.parts_held * used.each_bytes for used in local), default=0)
    return options.staging_limit_bytes - held_bytes


@lru_cache(maxsize=1024)  # every task of an array calls it first, with the same arguments
def staging_bytes(
    options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
) -> int:
    """Return the upper bound of one task's memory beyond its inputs and its output.

    A task holds parts from this host and from other hosts at the same time, but in each case from
    one transport only. The sizes are those of the largest region read from one block, of all
    regions from other workers, and of one element, the smallest part.
    """
    sizes = largest_bytes, remote_bytes, item_bytes
    return sum(
        max((used.task_bytes(*sizes) for used in _used(options, kind, [is_local])), default=0)
        for is_local in (True, False)
    )


def packed_bytes(options: Options, kind: Kind, readers: int, remote_bytes: int) -> int:
    """Return the upper bound of a worker's packed regions, for a number of concurrent readers.

    `remote_bytes` is the total that the readers read from the worker.
    """
    packing = [used for used in _used(options, kind, [True, False]) if used.parts_packed]
    task_bytes = max((used.parts_packed * used.each_bytes for used in packing), default=0)
    copies = max((used.copies for used in packing), default=0)
    return min(options.staging_limit_bytes, readers * task_bytes, copies * remote_bytes)


def idle_bytes(options: Options, kind: Kind) -> int:
    """Return the upper bound of all transports' idle buffers."""
    return sum(used.idle_bytes(options) for used in _used(options, kind, [True, False]))
