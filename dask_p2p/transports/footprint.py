"""What transports hold in memory beside blocks, and so in what parts regions are asked for.

Parts of regions that are on their way to a task stay below `Options.staging_limit_bytes`: they are
cut to fit. That is arithmetic. What a holder has packed for all of its readers together stays below
it too: that is reserved, in a `ByteBudget`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

from dask_p2p.backends import MOST_UNREAD, backend_named
from dask_p2p.backends.host_through_device import is_for_device, slots_bytes
from dask_p2p.config import Options, transport_classes
from dask_p2p.interprocess.buffers import buffer_bytes
from dask_p2p.types import Kind


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transport holds of blocks of one kind, and how it asks for them."""

    part_bytes: int | None  # of the largest part; None: of any size, and nothing is held
    parts_in_flight: int  # asked for while the part before them is put into place
    parts_held: int = 1  # of one task at a time, at its reader
    parts_packed: int = 0  # for one task at a time, at its holder
    parts_idle: int = 0  # kept by a worker for later
    copies: int = 2  # that there are of a region at most, while it is on its way
    is_buffered: bool = True  # whether parts lie in buffers, whose sizes are powers of two
    comes_in_batches: bool = False  # whether small regions share a part

    def task_bytes(self, largest_bytes: int, remote_bytes: int, item_bytes: int) -> int:
        """Return what one task holds at most; see `staging_bytes`."""
        if self.part_bytes is None:
            return 0
        whole_bytes = remote_bytes if self.comes_in_batches else largest_bytes
        each_bytes = self._size_of(min(max(item_bytes, self.part_bytes), whole_bytes))
        return min(self.parts_held * each_bytes, self.copies * remote_bytes)

    @property
    def each_bytes(self) -> int:
        """What one part takes at most."""
        return self._size_of(self.part_bytes or 0)

    def idle_bytes(self, options: Options) -> int:
        """Return what a worker with these options keeps at most."""
        return min(self.parts_idle * self.each_bytes, options.staging_limit_bytes)

    def _size_of(self, part_bytes: int) -> int:
        return buffer_bytes(part_bytes) if self.is_buffered and part_bytes else part_bytes


def part_that_fits(part_bytes: int, most_bytes: int) -> int:
    """Return a part's size, or where its buffer is larger than that, the power of two below.

    >>> part_that_fits(3000, 4096), part_that_fits(5000, 4097)
    (3000, 4096)
    """
    if buffer_bytes(part_bytes) > most_bytes:
        return 1 << (most_bytes.bit_length() - 1)
    return part_bytes


def parts_held(in_flight: int, kind: Kind) -> int:
    """Return how many parts a task holds at a time: those in flight, and those being placed."""
    return in_flight + 1 + (MOST_UNREAD if backend_named(kind).on_device else 0)


def buffered(
    part_bytes: int, in_flight: int, left_bytes: int, held: Callable[[int], int]
) -> Footprint:
    """Return parts of a configured size, or the largest for which there is room, in batches.

    All may take `left_bytes`, and `held` returns how many there are at a time with so many in
    flight. They come one after another if there is no room for that many of the smallest.
    """
    smallest_bytes = buffer_bytes(1)
    if left_bytes // held(in_flight) < smallest_bytes:
        in_flight = 0
    most_bytes = max(smallest_bytes, left_bytes // held(in_flight))
    part_bytes = part_that_fits(part_bytes, most_bytes)
    return Footprint(part_bytes, in_flight, held(in_flight), comes_in_batches=True)


#: Gives back what was reserved. Idempotent; called perhaps in the middle of a garbage collection.
Release: TypeAlias = Callable[[], object]


class ByteBudget:
    """Bytes that several requests may reserve, up to a limit; one for more is let through alone.

    A request reserves all that it needs at once. So none waits that holds something itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[object, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return sum(list(self._reserved.values()))

    def reserve(self, *sizes: int) -> list[Release] | None:
        """Reserve memory of these sizes; return what releases each. None: there is no room now."""
        with self._lock:
            reserved_bytes = self.reserved_bytes
            if reserved_bytes and reserved_bytes + sum(sizes) > self.limit_bytes:
                return None
            made = [object() for _ in sizes]
            self._reserved.update(zip(made, sizes, strict=True))
            return [partial(self._reserved.pop, one, None) for one in made]  # which takes no lock


# --- all transports together ---


def _used(options: Options, kind: Kind, within_host: Collection[bool]) -> Iterator[Footprint]:
    """Return the footprints of the transports that may bring blocks of this kind."""
    classes = transport_classes()
    for transport in (classes[name] for name in options.order(kind) if name in classes):
        if kind in transport.kinds and transport.within_host in within_host:
            yield transport.footprint(options, kind)


def left_bytes(options: Options, kind: Kind) -> int:
    """Return what parts from other hosts may take, beside those of this one."""
    local = _used(options, kind, [True])
    held_bytes = max((used.parts_held * used.each_bytes for used in local), default=0)
    # The queue's slots are there twice, in host memory and on a GPU.
    return options.staging_limit_bytes - held_bytes - 2 * _queue_bytes(options, kind)


def _queue_bytes(options: Options, kind: Kind) -> int:
    """Return what the queue of a task takes of the memory where its blocks lie."""
    if backend_named(kind).on_device or not is_for_device(options.permute_numpy, sys.maxsize):
        return 0
    return slots_bytes(options.staging_limit_bytes)


def staging_bytes(
    options: Options, kind: Kind, largest_bytes: int, remote_bytes: int, item_bytes: int
) -> int:
    """Return what one task holds at most beyond its inputs and its output.

    It has parts from this host and from others at the same time; but of either it never has parts
    by two transports. Given are the largest region that it reads from one block, all that comes
    from other workers, and one element: no part is smaller.
    """
    wanted = largest_bytes, remote_bytes, item_bytes
    return _queue_bytes(options, kind) + brought_bytes(options, kind, wanted)


@lru_cache(maxsize=1024)  # each task of an array asks the same, before it does anything else
def brought_bytes(options: Options, kind: Kind, wanted: tuple[int, int, int]) -> int:
    """Return what transports hold, in parts from this host and from others."""
    return sum(
        max((used.task_bytes(*wanted) for used in _used(options, kind, [is_local])), default=0)
        for is_local in (True, False)
    )


def packed_bytes(options: Options, kind: Kind, readers: int, remote_bytes: int) -> int:
    """Return what one worker has packed at most, for so many tasks that read from it at a time.

    `remote_bytes` is all that they ever read from it.
    """
    packing = [used for used in _used(options, kind, [True, False]) if used.parts_packed]
    task_bytes = max((used.parts_packed * used.each_bytes for used in packing), default=0)
    copies = max((used.copies for used in packing), default=0)
    return min(options.staging_limit_bytes, readers * task_bytes, copies * remote_bytes)


def idle_bytes(options: Options, kind: Kind) -> int:
    """Return what all transports keep in buffers for later at most."""
    return sum(used.idle_bytes(options) for used in _used(options, kind, [True, False]))
