"""The remote blocks of one assembly: their order, their routes and their failures."""

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
        known: dict[tuple[str, ...], tuple[str, list[Route]]] = {}  # by holders of a block
        sources = []
        for number, ref in refs.items():
            if ref.holders not in known:
                holders = self._nearest_first(ref.holders)
                routes = self.context.router.routes(holders, kind, self.dtype, order)
                known[ref.holders] = holders[0], routes
            nearest, routes = known[ref.holders]
            sources.append(RemoteSource(number, ref.key, nearest, pieces[number], [*routes]))
        # A worker with local blocks is one of the holders. Its rank among them keeps the workers
        # in step: each holder serves one reader per stage.
        read = {source.nearest for source in sources}
        hosts = self.context.router.hosts([own_address, *read])
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
        here, router = self.context.address, self.context.router
        hosts = router.hosts([here, *holders])
        order = stage_order(holders, here)
        return tuple(sorted(order, key=lambda h: hosts[h] != hosts[here]))

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

    def given_up(self, sources: Sequence[RemoteSource]) -> list[RemoteSource]:
        """Return the sources that were given up. Each of them is now on its next route.

        Raises `TransferError` if a source has no route left.
        """
        given_up = [source for source in sources if source.error is not None]
        for source in given_up:
            self._next_route(source)
        return given_up

    def _next_route(self, source: RemoteSource) -> None:
        """Leave the failed route. Raise `TransferError` if none is left."""
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
            raise failure(f"block {source.key!r} could not be read: {causes}")

    def unconfirmed(self) -> list[RemoteSource]:
        """End all reads. Return the sources to read again, each on its next route.

        Call only when all kernels are synchronised.

        Raises `TransferError` if a source has no route left.
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
        """Return the stages so far. Any thread may call this during the work."""
        return (*self.stages, *(fetch.progress() for fetch in tuple(self.open)))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """For each stage, the preferred transports that had failed."""
        return tuple(
            Fallback(stage.holder, name, failure.text[:REASON_CHARS])
            for stage in self.stages
            for name, failure in self.context.router.given_up(
                stage.holder, stage.transport, self.order
            )
        )

    @property
    def wanted_bytes(self) -> int:
        """Total bytes to read; 0 before the routes are chosen. Any thread may read this."""
        return sum(source.size for source in self.sources) * int(self.dtype.itemsize)

    @property
    def wasted_bytes(self) -> int:
        """Bytes that arrived but had to be read again."""
        return sum(source.wasted for source in self.sources) * int(self.dtype.itemsize)

    def close(self) -> None:
        """End all reads and their leases, even if closing one fails. Idempotent."""
        with ExitStack() as leases:
            for fetch in self.open:
                leases.callback(fetch.reading.close)
