"""The read of one holder's regions over one route: started, awaited, confirmed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from dask_p2p import tuning
from dask_p2p.backends import Timer
from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext
from dask_p2p.errors import TransferError, without_frames
from dask_p2p.geometry import box_size
from dask_p2p.monitoring.records import REASON_CHARS, Fallback, Stage
from dask_p2p.plans import BlockPlan, Piece, stage_order
from dask_p2p.transports.base import Reading, Region, Request
from dask_p2p.transports.router import Route
from dask_p2p.types import Array, DType, Key, Kind

_T = TypeVar("_T")


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
        return self.routes[0]

    @property
    def size(self) -> int:
        return sum(box_size(piece.src) for piece in self.pieces)

    def give_up(self, error: TransferError) -> None:
        if self.fetch is not None:
            self.wasted += self.size - self.missing
        self.error, self.fetch = without_frames(error), None

    def leave_route(self) -> Route:
        """Drop the failed route, and all others that this error rules out; return the route.

        Afterwards `routes` may be empty.
        """
        assert self.error is not None
        route, error = self.routes.pop(0), self.error
        self.causes.append(f"{route.transport.name}: {error}")
        if error.scope in ("block", "holder"):  # the same with every transport
            self.routes = [
                alternative for alternative in self.routes if alternative.holder != route.holder
            ]
        self.error = None
        return route


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
        return self.route.transport.in_place

    @property
    def live_sources(self) -> list[RemoteSource]:
        return [source for source in self.sources if source.fetch is self]

    def regions(self) -> Iterator[Region]:
        """Request one region after another. Keeps none: the next one takes the memory."""
        regions = iter(self.reading)
        try:
            while True:
                yield self._time_wait(next, regions)
        except StopIteration:
            return

    def wait_for(self, region: Region, target: Array | None = None) -> Array:
        """Wait for a region, and return its array.

        The array is `target` if the transport can write the region directly into it.

        Raises `TransferError` if the region will not arrive.
        """
        limit_s = self.options.request_timeout_s + tuning.current.event_loop_grace_s
        try:
            return self._time_wait(region.result, limit_s, target)
        except TimeoutError:  # the event loop enforces the deadlines: it is blocked or closed
            raise TransferError(
                f"no answer from {self.route.holder} in time, and the worker's event loop did not "
                "respond"
            ) from None

    def _time_wait(self, wait: Callable[..., _T], *args: Any) -> _T:
        start_s = perf_counter()
        try:
            return wait(*args)
        finally:
            self.last_s = perf_counter()
            self.waited_s += self.last_s - start_s

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
        live_sources = self.live_sources
        if live_sources:
            self.reading.confirm()
        for source in live_sources:
            if source.missing:
                raise TransferError(f"{source.key!r} arrived incomplete")

    def progress(self) -> Stage:
        """Return the stage's record so far. Any thread may call this."""
        is_coming = any(source.missing for source in self.live_sources)
        return self._stage((perf_counter() if is_coming else self.last_s) - self.begun_s)

    def stage(self) -> Stage:
        copied_s = self.copies.seconds or None
        return self._stage(copied_s if self.in_place else self.last_s - self.begun_s)

    def _stage(self, wire_s: float | None) -> Stage:
        return Stage(
            holder=self.route.holder,
            transport=self.route.transport.name,
            nbytes=sum(source.size - source.missing for source in self.live_sources)
            * self.itemsize,
            waited_s=self.waited_s,
            wire_s=wire_s,
            begun_s=self.begun_s - self.start_s,
            kernel_s=self.kernels.seconds,
        )


@dataclass(slots=True, eq=False)
class RemoteSources:
    """The remote blocks of one assembly."""

    plan: BlockPlan  # pieces of the output block
    dtype: DType  # dtype of the input blocks
    options: Options  # the task's
    context: TaskContext  # the worker's
    start_s: float = 0.0  # start of the task, by the performance counter
    #: Records of the completed reads, in the order of their confirmation.
    stages: list[Stage] = field(default_factory=list)
    order: tuple[str, ...] = ()  # names of transports, preferred first
    open: list[Fetch] = field(default_factory=list)  # reads that are not confirmed yet
    sources: list[RemoteSource] = field(default_factory=list)  # all sources in stage order

    def in_stage_order(
        self,
        refs: Mapping[int, BlockRef],  # by number among the plan's sources
        kind: Kind,  # kind of the arrays on this worker: "numpy" or "cupy"
        *,
        has_local: bool,  # True if this worker holds some of the plan's sources
    ) -> list[RemoteSource]:
        """Return the remote sources in stage order, for reading one after another."""
        if not refs:
            return []
        own_address = self.context.address
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.plan.pieces:
            pieces[piece.source].append(piece)
        order = self.order = self.options.order(kind)
        routes_by_holders: dict[
            tuple[str, ...], tuple[str, list[Route]]
        ] = {}  # by holders of a block
        sources = []
        for number, ref in refs.items():
            if ref.holders not in routes_by_holders:
                holders = self._nearest_first(ref.holders)
                routes = self.context.router.find_routes(holders, kind, self.dtype, order)
                routes_by_holders[ref.holders] = holders[0], routes
            nearest, routes = routes_by_holders[ref.holders]
            sources.append(RemoteSource(number, ref.key, nearest, pieces[number], [*routes]))
        # A worker with local blocks is one of the holders. Its rank among them keeps the workers
        # in step: each holder serves one reader per stage.
        read = {source.nearest for source in sources}
        hosts = self.context.router.find_hosts([own_address, *read])
        ranked = [*read, *([own_address] if has_local else [])]
        stages = stage_order(ranked, own_address, hosts.__getitem__)
        stage_of = {holder: stage for stage, holder in enumerate(stages)}
        self.sources = sorted(sources, key=lambda source: stage_of[source.nearest])
        return self.sources

    def _nearest_first(self, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Return the holders of a block: those on this host first.

        Different readers start at different holders.
        """
        if len(holders) == 1:
            return holders
        own_address, router = self.context.address, self.context.router
        hosts = router.find_hosts([own_address, *holders])
        order = stage_order(holders, own_address)
        return tuple(sorted(order, key=lambda h: hosts[h] != hosts[own_address]))

    def begin(self, sources: list[RemoteSource], kind: Kind) -> Fetch | None:
        """Start the read of sources with a common route. Return None if the transport fails."""
        route = sources[0].route
        try:
            begun_s = perf_counter()
            requests = [self._request(source, kind) for source in sources]
            reading = route.transport.read(requests, self.options)
        except TransferError as exc:
            for source in sources:
                source.give_up(exc)
            return None
        fetch = Fetch(sources, reading, self.options, self.start_s, begun_s)
        self.open.append(fetch)
        return fetch

    def _request(self, source: RemoteSource, kind: Kind) -> Request:
        shape = self.plan.source_shapes[source.source_number]
        boxes = [piece.src for piece in source.pieces]
        fast_axis = self.plan.axes[-1] if self.plan.axes else None
        return Request(source.key, source.route.holder, shape, self.dtype, kind, boxes, fast_axis)

    def switch_routes(self, sources: Sequence[RemoteSource]) -> list[RemoteSource]:
        """Return the sources that were given up. Each of them is now on its next route.

        Raises `TransferError` if a source has no route left.
        """
        given_up = []
        for source in sources:
            if (error := source.error) is None:
                continue
            route = source.leave_route()
            if error.scope == "route":
                last = not any(other_route.holder == route.holder for other_route in source.routes)
                self.context.router.record_failure(route, error, last)
            if not source.routes:
                causes = "; ".join(source.causes)
                failure = type(error) if len(source.causes) == 1 else TransferError
                raise failure(f"block {source.key!r} could not be read: {causes}")
            given_up.append(source)
        return given_up

    def confirm_reads(self) -> list[RemoteSource]:
        """End all reads. Return the sources to read again, each on its next route.

        Call only when all kernels are synchronised.

        Raises `TransferError` if a source has no route left.
        """
        failed_sources: list[RemoteSource] = []
        while self.open:
            fetch = self.open.pop(0)
            try:
                fetch.confirm()
                if fetch.live_sources:
                    self.stages.append(fetch.stage())
            except TransferError as exc:
                live_sources = fetch.live_sources
                for source in live_sources:
                    source.give_up(exc)
                failed_sources += self.switch_routes(live_sources)
            finally:
                fetch.reading.close()
        return failed_sources

    def progress(self) -> tuple[Stage, ...]:
        """Return the stages so far. Any thread may call this during the work."""
        return (*self.stages, *(fetch.progress() for fetch in tuple(self.open)))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(
            Fallback(stage.holder, name, failure.text[:REASON_CHARS])
            for stage in self.stages
            for name, failure in self.context.router.list_failed(
                stage.holder, stage.transport, self.order
            )
        )

    @property
    def wanted_bytes(self) -> int:
        return sum(source.size for source in self.sources) * int(self.dtype.itemsize)

    @property
    def wasted_bytes(self) -> int:
        return sum(source.wasted for source in self.sources) * int(self.dtype.itemsize)

    def close(self) -> None:
        """End all reads and their leases, even if closing one fails. Idempotent."""
        with ExitStack() as leases:
            for fetch in self.open:
                leases.callback(fetch.reading.close)
