"""What comes of one holder by one route: begun, waited for, confirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from dask_p2p.backends import Timer
from dask_p2p.config import Options
from dask_p2p.errors import TransferError, without_frames
from dask_p2p.geometry import box_size
from dask_p2p.monitoring.records import Stage
from dask_p2p.plans import Piece
from dask_p2p.transports.base import Reading, Region
from dask_p2p.transports.router import Route
from dask_p2p.transports.silence import EVENT_LOOP_GRACE_S, SilenceLog
from dask_p2p.types import Array, Key
from dask_p2p.versioned import versioned

_T = TypeVar("_T")


@versioned()
@dataclass(frozen=True, slots=True)
class BlockRef:
    """Stands in a task for a block that its own worker holds, or others do."""

    key: Any  # Dask key
    holders: tuple[str, ...]  # addresses of the workers that hold it, in order


@dataclass(slots=True)
class RemoteSource:
    """A remote block, its pieces, and the routes to it that are left."""

    source_number: int  # among the plan's sources
    key: Key
    nearest: str  # of its holders
    pieces: list[Piece]
    routes: list[Route]
    causes: list[str] = field(default_factory=list)  # of the routes that failed
    error: TransferError | None = None  # of the current route
    fetch: Fetch | None = None  # that brings it, and has not failed
    missing: int = 0  # elements that have not been put into place, once it is fetched
    wasted: int = 0  # elements that came, and have to be read again

    @property
    def route(self) -> Route:
        """The current one."""
        return self.routes[0]

    @property
    def size(self) -> int:
        """Elements that are read of it."""
        return sum(box_size(piece.src) for piece in self.pieces)

    def give_up(self, error: TransferError) -> None:
        """Note that it does not come by the current route."""
        if self.fetch is not None:
            self.wasted += self.size - self.missing
        self.error, self.fetch = without_frames(error), None

    def leave_route(self) -> None:
        """Go on to the next route that may help after what failed; there may be none left."""
        assert self.error is not None
        route, error = self.routes.pop(0), self.error
        self.causes.append(f"{route.transport.name}: {error}")
        if error.scope in ("block", "holder"):  # no other transport would find it there
            self.routes = [other for other in self.routes if other.holder != route.holder]
        self.error = None


@dataclass(slots=True, eq=False)
class Fetch:
    """What comes of one holder by one route."""

    sources: Sequence[RemoteSource]  # of this route, in the order of the reading's requests
    reading: Reading  # of the route's transport
    silences: SilenceLog  # of the worker
    options: Options  # of the task
    start_s: float  # when the task started, by the performance counter
    begun_s: float  # when the transport was asked
    kernels: Timer = field(default_factory=Timer)  # of those that put its regions into place
    copies: Timer = field(default_factory=Timer)  # of copy engines that bring them
    waited_s: float = 0.0
    route: Route = field(init=False)
    last_s: float = field(init=False)  # when the thread last had something of it
    slot_bytes: int = field(init=False)  # of the largest part, if it comes through local memory
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
        """Whether its regions lie in the holder's memory."""
        return self.route.transport.in_place

    @property
    def coming(self) -> list[RemoteSource]:
        """The sources that it brings, or has brought: those that have not failed."""
        return [source for source in self.sources if source.fetch is self]

    def regions(self) -> Iterator[Region]:
        """Ask for one region after another. None is kept here: the next one takes its room."""
        regions = iter(self.reading)
        try:
            while True:
                yield self._timed(next, regions)
        except StopIteration:
            return

    def wait_for(self, region: Region, place: Array | None = None) -> Array:
        """Return a region's array as soon as it has arrived.

        That is the one given where the transport can bring the region straight there.

        `TransferError` if it will not come.
        """
        holder, transport = self.route.holder, self.route.transport.name
        if not region.is_here():
            self.silences.check(holder, transport, self.start_s, self.options)
        limit_s = self.options.request_timeout_s + EVENT_LOOP_GRACE_S
        try:
            return self._timed(region.result, limit_s, place)
        except TimeoutError:  # the event loop, which keeps the deadlines, is stuck or gone
            raise TransferError(
                f"no answer of {holder} in time, and the worker's event loop did not respond"
            ) from None

    def _timed(self, wait: Callable[..., _T], *args: Any) -> _T:
        """Call a function that waits for the holder."""
        start_s = perf_counter()
        try:
            return wait(*args)
        finally:
            self.last_s = perf_counter()
            self.waited_s += self.last_s - start_s

    def note_placed(self, region: Region) -> None:
        """Note that a region is in the output, or will be when all kernels are synchronised."""
        self.sources[region.request].missing -= box_size(region.box)
        self.silences.heard(self.route.holder, self.route.transport.name)

    def give_up(self, region: Region, error: TransferError) -> None:
        """Give up the source of a region that does not come, to be read again by its next route.

        If the holder is silent, all that is missing is given up.
        """
        given_up = range(len(self.sources)) if error.is_silence else [region.request]
        for number in given_up:
            self.reading.drop(number)
            if number == region.request or self.sources[number].missing:
                self.sources[number].give_up(error)
        holder, transport = self.route.holder, self.route.transport.name
        self.silences.note(holder, transport, error, self.start_s, self.options)
        # Kernels that are queued may read in place still.
        if not self.in_place and all(source.error is not None for source in self.sources):
            self.reading.close()

    def confirm(self) -> None:
        """Raise `TransferError` if what came may be wrong, or is not all."""
        coming = self.coming
        if coming:
            self.reading.confirm()
        for source in coming:
            if source.missing:
                raise TransferError(f"{source.key!r} arrived incomplete")

    def progress(self) -> Stage:
        """Return what would be recorded of it by now; any thread may ask."""
        is_coming = any(source.missing for source in self.coming)
        return self._stage((perf_counter() if is_coming else self.last_s) - self.begun_s)

    def stage(self) -> Stage:
        """Return what is recorded of it, once all is done."""
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
