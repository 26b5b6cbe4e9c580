"""The remote blocks of one assembly: in which order they come, by which route, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from dask_p2p.config import Options
from dask_p2p.errors import (
    BlockUnavailableError,
    SilentError,
    TransferError,
    UnreachableError,
    UnsuitableError,
)
from dask_p2p.layout import box_size
from dask_p2p.monitoring.records import REASON_CHARS, Fallback, Stage
from dask_p2p.plans import BlockPlan, Piece, stage_order
from dask_p2p.reads import Incoming, OpenRead, RemoteSource
from dask_p2p.retry import GRACE_S
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.reading import Request
from dask_p2p.transports.router import BlockRef, Route
from dask_p2p.types import DType, Kind

__all__ = ["RemoteSources"]


class RemoteSources:
    """The remote blocks of one assembly.

    Parameters
    ----------
    plan
        The pieces of the output block.
    dtype : numpy.dtype
        Of the input blocks.
    options
        Of the task.
    context
        The worker's; needed where there are remote blocks.
    start_s
        When the task started, by the performance counter.

    Attributes
    ----------
    stages : list of Stage
        What came from where, in the order in which it was confirmed.
    wasted_bytes : int
        What came, and had to be read again.
    """

    def __init__(
        self,
        plan: BlockPlan,
        dtype: DType,
        options: Options,
        context: WorkerContext | None,
        start_s: float = 0.0,
    ) -> None:
        self.stages: list[Stage] = []
        self.wasted_bytes = 0
        self._plan = plan
        self._dtype = dtype
        self._options = options
        self._context = context
        self._start_s = start_s
        self._order: tuple[str, ...] = ()  # of transports
        self._open: list[OpenRead] = []
        self._ordered: list[RemoteSource] = []
        self._wanted_bytes = 0
        # Holders, by this transport or by all (None), and why: none is waited for twice.
        self._unreachable: dict[tuple[str, str | None], str] = {}

    def in_stage_order(
        self, refs: Mapping[int, BlockRef], kind: Kind, *, has_local: bool
    ) -> list[RemoteSource]:
        """Return the remote sources in the order in which they should be read.

        Parameters
        ----------
        refs
            References to the blocks, by their number among the plan's sources.
        kind
            Of the array that is wanted here: "numpy" or "cupy".
        has_local
            Whether this worker holds some of the other sources.
        """
        if not refs:
            return []
        assert self._context is not None, "references are only made on workers with the plugin"
        own_address = self._context.address
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self._plan.pieces:
            pieces[piece.source].append(piece)
        order = self._order = self._options.order(kind)
        # The same for all blocks of a worker.
        known: dict[tuple[str, ...], tuple[tuple[str, ...], list[Route]]] = {}
        sources = []
        for slot, ref in refs.items():
            if ref.holders not in known:
                nearest = self._nearest_first(ref.holders)
                nearest_ref = BlockRef(ref.key, nearest)
                routes = self._context.router.routes(nearest_ref, kind, self._dtype, order)
                known[ref.holders] = nearest, routes
            nearest, routes = known[ref.holders]
            sources.append(RemoteSource(slot, BlockRef(ref.key, nearest), pieces[slot], [*routes]))
        # A worker that has blocks of its own is one of the holders, and its place among them
        # is what makes the workers read from each other in step.
        holders = {source.ref.holders[0] for source in sources}
        hosts = self._context.router.hosts([own_address, *holders])
        ranked = [*holders, *([own_address] if has_local else [])]
        stages = stage_order(ranked, own_address, hosts.__getitem__)
        place = {holder: stage for stage, holder in enumerate(stages)}
        self._ordered = sorted(sources, key=lambda source: place[source.ref.holders[0]])
        return self._ordered

    def _nearest_first(self, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Order the holders of one block: those of this host first, readers different ones."""
        assert self._context is not None
        here = self._context.address
        hosts = self._context.router.hosts([here, *holders]) if len(holders) > 1 else {}
        order = stage_order(holders, here)
        return tuple(sorted(order, key=lambda holder: hosts.get(holder) != hosts.get(here)))

    def begin(self, sources: list[RemoteSource], kind: Kind) -> OpenRead:
        """Begin to read sources that have their route in common.

        Raises
        ------
        TransferError
            If nothing of them will come.
        """
        route = sources[0].route
        self._check_reachable(route)
        begun_s = perf_counter()
        requests = [self._request(source, route.holder, kind) for source in sources]
        reading = route.transport.read(requests, self._options)
        largest = max(box_size(box) for request in requests for box in request.boxes)
        slot_bytes = min(reading.part_bytes or 0, largest * self._dtype.itemsize)
        read = OpenRead(route.transport, sources, reading, slot_bytes, begun_s, begun_s)
        for source in sources:
            source.reading = reading
            source.missing = source.wanted = source.size
        self._open.append(read)
        return read

    def _request(self, source: RemoteSource, holder: str, kind: Kind) -> Request:
        shape = self._plan.source_shapes[source.slot]
        boxes = [piece.src for piece in source.pieces]
        return Request(source.ref.key, holder, shape, self._dtype, kind, boxes)

    def wait_for(self, incoming: Incoming) -> Any:
        """Return a region's array as soon as it has arrived.

        Raises
        ------
        TransferError
            If it will not come.
        """
        route = incoming.source.route
        self._check_reachable(route)
        try:
            limit_s = self._options.request_timeout_s + GRACE_S
            return incoming.read.timed(incoming.region.pending.result, limit_s)
        except TimeoutError:  # the event loop, which keeps the deadlines, is stuck or gone
            raise TransferError(
                f"no answer of {route.holder} in time, and the worker's event loop did not respond"
            ) from None

    def fail(self, incoming: Incoming, error: Exception) -> None:
        """Note that a source does not come by its current route, and drop what came of it."""
        read = incoming.read
        read.reading.drop(incoming.region.part.request)
        self.note_failure([incoming.source], error)
        if isinstance(error, (UnreachableError, SilentError)):
            for number, source in enumerate(read.sources):  # nothing more comes from there
                read.reading.drop(number)
                if source.missing:
                    self.note_failure([source], error)
        if read.transport.in_place:
            return  # kernels that are queued may read there still
        if all(source.error is not None for source in read.sources):
            read.reading.close()

    def note_failure(self, sources: Sequence[RemoteSource], error: Exception) -> None:
        """Note that sources do not come by their current route."""
        for source in sources:
            self._fail(source, error)
            holder, transport = source.route.holder, source.route.transport.name
            if isinstance(error, UnreachableError):
                self._unreachable[holder, None] = str(error)
            elif isinstance(error, SilentError):
                self._unreachable[holder, transport] = str(error)

    def _fail(self, source: RemoteSource, error: Exception) -> None:
        if source.reading is not None:
            self.wasted_bytes += (source.size - source.missing) * self._dtype.itemsize
        source.error = error
        source.reading = None

    def _check_reachable(self, route: Route) -> None:
        """Raise if the holder did not answer about another block: the time would add up."""
        holder, transport = route.holder, route.transport.name
        if (why := self._unreachable.get((holder, None))) is not None:
            raise UnreachableError(why)
        if (why := self._unreachable.get((holder, transport))) is not None:
            raise SilentError(why)

    def failed(self, sources: Sequence[RemoteSource]) -> list[RemoteSource]:
        """Return those of the sources that failed, each to be read by its next route.

        Raises
        ------
        TransferError
            If a source has no route left.
        """
        failed = [source for source in sources if source.error is not None]
        for source in failed:
            self._next_route(source)
        return failed

    def _next_route(self, source: RemoteSource) -> None:
        """Give up the route that failed; raise if none is left."""
        assert self._context is not None
        assert source.error is not None
        route, error = source.routes.pop(0), source.error
        source.error = None
        message, name = str(error), route.transport.name
        source.causes.append(message if message.startswith(f"{name}: ") else f"{name}: {message}")
        if isinstance(error, BlockUnavailableError):
            # The holder answers, it just lacks the block: no other transport would find it.
            source.routes = [other for other in source.routes if other.holder != route.holder]
        elif not isinstance(error, UnsuitableError):
            last = not any(other.holder == route.holder for other in source.routes)
            self._context.router.report_failure(route, error, last)
        if not source.routes:
            causes = "; ".join(source.causes)
            failure = type(error) if len(source.causes) == 1 else TransferError
            raise failure(f"block {source.ref.key!r} could not be read: {causes}")

    def unconfirmed(self) -> list[RemoteSource]:
        """End all reads. Return the sources that may be wrong, each to be read by its next route.

        Call only when all kernels are synchronised.

        Raises
        ------
        TransferError
            If a source has no route left.
        """
        wrong: list[RemoteSource] = []
        while self._open:
            read = self._open.pop(0)
            sources = [source for source in read.sources if source.reading is read.reading]
            try:
                self._confirm(read, sources)
            except TransferError as exc:
                for source in sources:
                    self._fail(source, exc)
                wrong += self.failed(sources)
            else:
                if sources:
                    stage = read.stage(sources, self._dtype.itemsize, self._start_s)
                    self.stages.append(stage)
            finally:
                read.reading.close()
        return wrong

    def _confirm(self, read: OpenRead, sources: list[RemoteSource]) -> None:
        """Raise if what came of these sources may be wrong, or is not all."""
        if sources:
            read.reading.confirm()
        for source in sources:
            if source.missing:
                name = source.route.transport.name
                raise TransferError(f"{name}: {source.ref.key!r} arrived incomplete")

    def so_far(self) -> tuple[Stage, ...]:
        """Return what has come by now, while a thread is at work; any other may ask."""
        open_ = [read.so_far(self._dtype.itemsize, self._start_s) for read in tuple(self._open)]
        return (*self.stages, *open_)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """For each stage the transports that should have been used, and had failed."""
        if self._context is None:
            return ()
        given_up = self._context.router.given_up
        return tuple(
            Fallback(stage.holder, name, failure.text[:REASON_CHARS])
            for stage in self.stages
            for name, failure in given_up(stage.holder, stage.transport, self._order)
        )

    @property
    def wanted_bytes(self) -> int:
        """Bytes that are to come, in all; 0 before it is known from where. Any thread may ask."""
        if not self._wanted_bytes:
            elements = sum(source.size for source in self._ordered)
            self._wanted_bytes = elements * int(self._dtype.itemsize)
        return self._wanted_bytes

    def close(self) -> None:
        """End all reads, and so all leases, also where closing one fails. Idempotent."""
        with ExitStack() as leases:
            for read in self._open:
                leases.callback(read.reading.close)
