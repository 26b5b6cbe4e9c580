"""What is being read of one holder, and the blocks and regions that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from dask_p2p.backends import Timer
from dask_p2p.layout import box_size
from dask_p2p.monitoring.records import Stage
from dask_p2p.plans import Piece
from dask_p2p.transports.base import Transport
from dask_p2p.transports.reading import Reading, Region
from dask_p2p.transports.router import BlockRef, Route

__all__ = ["Incoming", "OpenRead", "RemoteSource"]

_T = TypeVar("_T")


@dataclass(slots=True)
class RemoteSource:
    """A remote block, its pieces, and the routes to it that are left."""

    slot: int  # number among the plan's sources
    ref: BlockRef
    pieces: list[Piece]
    routes: list[Route]
    causes: list[str] = field(default_factory=list)  # of the routes that failed
    error: Exception | None = None  # of the current route
    reading: Reading | None = None  # that brings it, and has not failed
    wanted: int = 0  # elements, once reading has begun
    missing: int = 0  # elements of them that have not been put into place

    @property
    def route(self) -> Route:
        """The current one."""
        return self.routes[0]

    @property
    def size(self) -> int:
        """Elements that are read of it."""
        return sum(box_size(piece.src) for piece in self.pieces)


@dataclass(slots=True)
class OpenRead:
    """What is being read of one holder."""

    transport: Transport
    sources: list[RemoteSource]
    reading: Reading
    slot_bytes: int  # of the largest part, if it is to come through local memory
    begun_s: float  # by the performance counter
    last_s: float  # when the thread last had something of it
    waited_s: float = 0.0
    kernels: Timer = field(default_factory=Timer)  # that put its regions into place
    copies: Timer = field(default_factory=Timer)  # of regions, by copy engines

    def timed(self, wait: Callable[..., _T], *args: Any) -> _T:
        """Call something that waits for the holder."""
        start_s = perf_counter()
        try:
            return wait(*args)
        finally:
            self.last_s = perf_counter()
            self.waited_s += self.last_s - start_s

    def regions(self) -> Iterator[Incoming]:
        """Ask for one region after another. None is kept here: the next one takes its room."""
        regions = iter(self.reading)
        try:
            while True:
                yield Incoming(self, self.timed(next, regions))
        except StopIteration:
            return

    def so_far(self, itemsize: int, start_s: float) -> Stage:
        """Return what would be recorded of it by now; any thread may ask."""
        coming = [source for source in self.sources if source.reading is self.reading]
        elements = sum(source.wanted - source.missing for source in coming)
        until_s = perf_counter() if any(source.missing for source in coming) else self.last_s
        return Stage(
            holder=self.sources[0].ref.holders[0],
            transport=self.transport.name,
            nbytes=elements * itemsize,
            waited_s=self.waited_s,
            wire_s=until_s - self.begun_s,
            begun_s=self.begun_s - start_s,
            kernel_s=self.kernels.seconds,
        )

    def stage(self, sources: Sequence[RemoteSource], itemsize: int, start_s: float) -> Stage:
        """Return what is recorded of it, once all is done.

        Parameters
        ----------
        sources
            Those that came by it.
        itemsize
            Bytes of an element.
        start_s
            When the task started, by the performance counter.
        """
        in_place = self.transport.in_place
        return Stage(
            holder=sources[0].route.holder,
            transport=self.transport.name,
            nbytes=sum(source.size for source in sources) * itemsize,
            waited_s=self.waited_s,
            wire_s=self.copies.seconds or None if in_place else self.last_s - self.begun_s,
            begun_s=self.begun_s - start_s,
            kernel_s=self.kernels.seconds,
        )


@dataclass(slots=True)
class Incoming:
    """A region on its way."""

    read: OpenRead
    region: Region
    prefetched: Any = None  # by the queue, which copies it here; None if it comes by messages

    @property
    def source(self) -> RemoteSource:
        """The block that it is a region of."""
        return self.read.sources[self.region.part.request]
