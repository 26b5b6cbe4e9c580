"""The read of one holder's regions over one route: started, awaited, confirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from dask_p2p import tuning
from dask_p2p.backends import Timer
from dask_p2p.config import Options
from dask_p2p.errors import TransferError, without_frames
from dask_p2p.geometry import box_size
from dask_p2p.monitoring.records import Stage
from dask_p2p.plans import Piece
from dask_p2p.transports.base import Reading, Region
from dask_p2p.transports.router import Route
from dask_p2p.types import Array, Key
from dask_p2p.versioned import versioned

_T = TypeVar("_T")


@versioned()
@dataclass(frozen=True, slots=True)
class BlockRef:
    """A reference, in a task, to a block in the memory of this worker or of others."""

    key: Any  # Dask key
    holders: tuple[str, ...]  # addresses of the workers that hold it, in order


@dataclass(slots=True)
class RemoteSource:
    """A remote block with its pieces and remaining routes."""

    source_number: int  # index among the plan's sources
    key: Key
    nearest: str  # address of the nearest holder
    pieces: list[Piece]
    routes: list[Route]
    causes: list[str] = field(default_factory=list)  # errors of the failed routes

    error: TransferError | None = None  # error of the current route
    fetch: Fetch | None = None  # current read of the block, unless it failed
    missing: int = 0  # elements of the current fetch that are not in the output yet
    wasted: int = 0  # elements that arrived but must be read again

    @property
    def route(self) -> Route:
        """The current route."""
        return self.routes[0]

    @property
    def size(self) -> int:
        """Number of elements to read from the block."""
        return sum(box_size(piece.src) for piece in self.pieces)

    def give_up(self, error: TransferError) -> None:
        """Record the failure of the current route."""
        if self.fetch is not None:
            self.wasted += self.size - self.missing
        self.error, self.fetch = without_frames(error), None

    def leave_route(self) -> None:
        """Drop the failed route, and all others that this error rules out.

        Afterwards `routes` may be empty.
        """
        assert self.error is not None
        route, error = self.routes.pop(0), self.error
        self.causes.append(f"{route.transport.name}: {error}")
        if error.scope in ("block", "holder"):  # the same with every transport
            self.routes = [other for other in self.routes if other.holder != route.holder]
        self.error = None


@dataclass(slots=True, eq=False)
class Fetch:
    """The read of one holder's regions over one route."""

    sources: Sequence[RemoteSource]  # sources of this route, in the order of the requests
    reading: Reading  # the transport's side of the read

    options: Options  # the task's
    start_s: float  # start of the task, by the performance counter
    begun_s: float  # start of the read, by the performance counter

    kernels: Timer = field(default_factory=Timer)  # kernels that write regions to the output
    copies: Timer = field(default_factory=Timer)  # copy engines that transfer regions
    waited_s: float = 0.0
    route: Route = field(init=False)
    last_s: float = field(init=False)  # end of the thread's last wait for the holder
    slot_bytes: int = field(init=False)  # size of the largest staged part; 0 without a limit
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        requests = self.reading.requests
        self.route, self.last_s = self.sources[0].route, self.begun_s
        self.itemsize = requests[0].dtype.itemsize
        largest = max(box_size(box) for request in requests for box in request.boxes)
        self.slot_bytes = min(self.reading.part_bytes or 0, largest * self.itemsize)
        for source in self.sources:
            source.missing = source.size
            source.fetch = self

    @property
    def in_place(self) -> bool:
        """True if the regions stay in the holder's memory and are read there."""
        return self.route.transport.in_place

    @property
    def coming(self) -> list[RemoteSource]:
        """The sources of this fetch that have not failed, complete or not."""
        return [source for source in self.sources if source.fetch is self]

    def regions(self) -> Iterator[Region]:
        """Request one region after another. Keeps none: the next one takes the memory."""
        regions = iter(self.reading)
        try:
            while True:
                yield self._timed(next, regions)
        except StopIteration:
            return

    def wait_for(self, region: Region, target: Array | None = None) -> Array:
        """Wait for a region, and return its array.

        The array is `target` if the transport can write the region directly into it.

        Raises `TransferError` if the region will not arrive.
        """
        limit_s = self.options.request_timeout_s + tuning.current.event_loop_grace_s
        try:
            return self._timed(region.result, limit_s, target)
        except TimeoutError:  # the event loop enforces the deadlines: it is blocked or closed
            raise TransferError(
                f"no answer from {self.route.holder} in time, and the worker's event loop did not "
                "respond"
            ) from None

    def _timed(self, wait: Callable[..., _T], *args: Any) -> _T:
        """Call a function that waits for the holder."""
        start_s = perf_counter()
        try:
            return wait(*args)
        finally:
            self.last_s = perf_counter()
            self.waited_s += self.last_s - start_s

    def record_written(self, region: Region) -> None:
        """Record that a region is in the output, or will be once the queue is synchronised."""
        self.sources[region.request].missing -= box_size(region.box)

    def give_up(self, region: Region, error: TransferError) -> None:
        """Give up the source of a failed region. Its next route reads it again.

        If the holder is silent, all incomplete sources are given up.
        """
        given_up = range(len(self.sources)) if error.is_silence else [region.request]
        for number in given_up:
            self.reading.drop(number)
            if number == region.request or self.sources[number].missing:
                self.sources[number].give_up(error)
        # Queued kernels may still read in place.
        if not self.in_place and all(source.error is not None for source in self.sources):
            self.reading.close()

    def confirm(self) -> None:
        """Raise `TransferError` if the regions may be corrupt, or some are missing."""
        coming = self.coming
        if coming:
            self.reading.confirm()
        for source in coming:
            if source.missing:
                raise TransferError(f"{source.key!r} arrived incomplete")

    def progress(self) -> Stage:
        """Return the stage's record so far. Any thread may call this."""
        is_coming = any(source.missing for source in self.coming)
        return self._stage((perf_counter() if is_coming else self.last_s) - self.begun_s)

    def stage(self) -> Stage:
        """Return the stage's final record."""
        copied_s = self.copies.seconds or None
        return self._stage(copied_s if self.in_place else self.last_s - self.begun_s)

    def _stage(self, wire_s: float | None) -> Stage:
        return Stage(
            holder=self.route.holder,
            transport=self.route.transport.name,
            nbytes=sum(source.size - source.missing for source in self.coming) * self.itemsize,
            waited_s=self.waited_s,
            wire_s=wire_s,
            begun_s=self.begun_s - self.start_s,
            kernel_s=self.kernels.seconds,
        )
