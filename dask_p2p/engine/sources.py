"""The remote blocks of one assembly: in which order they come, by which routes, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext
from dask_p2p.engine.fetch import BlockRef, Fetch, RemoteSource
from dask_p2p.errors import TransferError
from dask_p2p.monitoring.records import REASON_CHARS, Fallback, Stage
from dask_p2p.plans import BlockPlan, Piece, stage_order
from dask_p2p.transports.base import Request
from dask_p2p.transports.router import Route
from dask_p2p.types import DType, Kind


@dataclass(slots=True, eq=False)
class RemoteSources:
    """The remote blocks of one assembly."""

    plan: BlockPlan  # the pieces of the output block
    dtype: DType  # of the input blocks
    options: Options  # of the task
    context: TaskContext | None  # the worker's; needed where there are remote blocks
    start_s: float = 0.0  # when the task started, by the performance counter
    #: What came from where, in the order in which it was confirmed.
    stages: list[Stage] = field(default_factory=list)
    order: tuple[str, ...] = ()  # of transports
    open: list[Fetch] = field(default_factory=list)  # that are not confirmed yet
    sources: list[RemoteSource] = field(default_factory=list)  # in stage order

    def in_stage_order(
        self,
        refs: Mapping[int, BlockRef],  # to the blocks, by their number among the plan's sources
        kind: Kind,  # of the array that is wanted here: "numpy" or "cupy"
        *,
        has_local: bool,  # whether this worker holds some of the other sources
    ) -> list[RemoteSource]:
        """Return the remote sources in the order in which they should be read."""
        if not refs:
            return []
        assert self.context is not None, "references are only made on workers with the plugin"
        own_address = self.context.address
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self.plan.pieces:
            pieces[piece.source].append(piece)
        order = self.order = self.options.order(kind)
        known: dict[tuple[str, ...], tuple[str, list[Route]]] = {}  # for all blocks of a worker
        sources = []
        for number, ref in refs.items():
            if ref.holders not in known:
                holders = self._nearest_first(ref.holders)
                routes = self.context.router.routes(holders, kind, self.dtype, order)
                known[ref.holders] = holders[0], routes
            nearest, routes = known[ref.holders]
            sources.append(RemoteSource(number, ref.key, nearest, pieces[number], [*routes]))
        # A worker that has blocks of its own is one of the holders, and its place among them
        # is what makes the workers read from each other in step.
        read = {source.nearest for source in sources}
        hosts = self.context.router.hosts([own_address, *read])
        ranked = [*read, *([own_address] if has_local else [])]
        stages = stage_order(ranked, own_address, hosts.__getitem__)
        place = {holder: stage for stage, holder in enumerate(stages)}
        self.sources = sorted(sources, key=lambda source: place[source.nearest])
        return self.sources

    def _nearest_first(self, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Order the holders of one block: same host first, those lately silent last.

        Different readers start at different holders.
        """
        if len(holders) == 1:
            return holders
        assert self.context is not None
        here, router = self.context.address, self.context.router
        hosts = router.hosts([here, *holders])
        silent = {h: router.silences.is_silent(h, self.start_s, self.options) for h in holders}
        order = stage_order(holders, here)
        return tuple(sorted(order, key=lambda h: (silent[h], hosts[h] != hosts[here])))

    def begin(self, sources: list[RemoteSource], kind: Kind) -> Fetch | None:
        """Begin to read sources that have their route in common; None if nothing will come."""
        assert self.context is not None
        route, silences = sources[0].route, self.context.router.silences
        try:
            self._check_silence(route)
            begun_s = perf_counter()
            requests = [self._request(source, kind) for source in sources]
            reading = route.transport.read(requests, self.options)
        except TransferError as exc:
            for source in sources:
                source.give_up(exc)
            name = route.transport.name
            silences.note(route.holder, name, exc, self.start_s, self.options)
            return None
        fetch = Fetch(sources, reading, silences, self.options, self.start_s, begun_s)
        self.open.append(fetch)
        return fetch

    def _check_silence(self, route: Route) -> None:
        """Raise if the holder did not answer about another block: the time would add up."""
        assert self.context is not None
        silences, name = self.context.router.silences, route.transport.name
        try:
            silences.check(route.holder, name, self.start_s, self.options)
        except TransferError:
            # Another task gave it up, but that may have changed.
            is_older = silences.is_older(route.holder, name, self.start_s)
            if not is_older or not self.context.responds(route.holder):
                raise

    def _request(self, source: RemoteSource, kind: Kind) -> Request:
        shape = self.plan.source_shapes[source.source_number]
        boxes = [piece.src for piece in source.pieces]
        fast_axis = self.plan.axes[-1] if self.plan.axes else None
        return Request(source.key, source.route.holder, shape, self.dtype, kind, boxes, fast_axis)

    def given_up(self, sources: Sequence[RemoteSource]) -> list[RemoteSource]:
        """Return those of the sources that were given up, each to be read by its next route.

        `TransferError` if a source has no route left.
        """
        given_up = [source for source in sources if source.error is not None]
        for source in given_up:
            self._next_route(source)
        return given_up

    def _next_route(self, source: RemoteSource) -> None:
        """Leave the route that failed; raise if none is left."""
        assert self.context is not None
        assert source.error is not None
        route, error = source.route, source.error
        source.leave_route()
        router = self.context.router
        if error.scope == "route":
            last = not any(other.holder == route.holder for other in source.routes)
            router.record_failure(route, error, last)
        if not source.routes:
            causes = "; ".join(source.causes)
            failure = type(error) if len(source.causes) == 1 else TransferError
            failed = failure(f"block {source.key!r} could not be read: {causes}")
            if error.is_silence:
                failed.silent_s = router.silences.lasted_s(route.holder, route.transport.name)
            raise failed

    def unconfirmed(self) -> list[RemoteSource]:
        """End all reads. Return the sources that may be wrong, each to be read by its next route.

        Call only when all kernels are synchronised.

        `TransferError` if a source has no route left.
        """
        wrong: list[RemoteSource] = []
        while self.open:
            fetch = self.open.pop(0)
            try:
                fetch.confirm()
                if fetch.coming:
                    self.stages.append(fetch.stage())
            except TransferError as exc:
                coming = fetch.coming
                for source in coming:
                    source.give_up(exc)
                wrong += self.given_up(coming)
            finally:
                fetch.reading.close()
        return wrong

    def progress(self) -> tuple[Stage, ...]:
        """Return what has come by now, while a thread is at work; any other may ask."""
        return (*self.stages, *(fetch.progress() for fetch in tuple(self.open)))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """For each stage the transports that should have been used, and had failed."""
        if self.context is None:
            return ()
        given_up = self.context.router.given_up
        return tuple(
            Fallback(stage.holder, name, failure.text[:REASON_CHARS])
            for stage in self.stages
            for name, failure in given_up(stage.holder, stage.transport, self.order)
        )

    @property
    def wanted_bytes(self) -> int:
        """Bytes that are to come, in all; 0 before it is known from where. Any thread may ask."""
        return sum(source.size for source in self.sources) * int(self.dtype.itemsize)

    @property
    def wasted_bytes(self) -> int:
        """Bytes that came, and had to be read again."""
        return sum(source.wasted for source in self.sources) * int(self.dtype.itemsize)

    def close(self) -> None:
        """End all reads, and so all leases, also where closing one fails. Idempotent."""
        with ExitStack() as leases:
            for fetch in self.open:
                leases.callback(fetch.reading.close)
