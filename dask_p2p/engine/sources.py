"""The remote blocks of one assembly: in which order they come, by which routes, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter

from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext
from dask_p2p.engine.fetch import BlockRef, Fetch, RemoteSource
from dask_p2p.errors import TransferError
from dask_p2p.monitoring.records import REASON_CHARS, Fallback, Stage
from dask_p2p.plans import BlockPlan, Piece, stage_order
from dask_p2p.transports.reading import Request
from dask_p2p.transports.router import Route
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
    """

    def __init__(
        self,
        plan: BlockPlan,
        dtype: DType,
        options: Options,
        context: TaskContext | None,
        start_s: float = 0.0,
    ) -> None:
        self.stages: list[Stage] = []
        self._plan = plan
        self._dtype = dtype
        self._options = options
        self._context = context
        self._start_s = start_s
        self._order: tuple[str, ...] = ()  # of transports
        self._open: list[Fetch] = []
        self._sources: list[RemoteSource] = []

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
        known: dict[tuple[str, ...], tuple[str, list[Route]]] = {}  # for all blocks of a worker
        sources = []
        for number, ref in refs.items():
            if ref.holders not in known:
                holders = self._nearest_first(ref.holders)
                routes = self._context.router.routes(holders, kind, self._dtype, order)
                known[ref.holders] = holders[0], routes
            nearest, routes = known[ref.holders]
            sources.append(RemoteSource(number, ref.key, nearest, pieces[number], [*routes]))
        # A worker that has blocks of its own is one of the holders, and its place among them
        # is what makes the workers read from each other in step.
        read = {source.nearest for source in sources}
        hosts = self._context.router.hosts([own_address, *read])
        ranked = [*read, *([own_address] if has_local else [])]
        stages = stage_order(ranked, own_address, hosts.__getitem__)
        place = {holder: stage for stage, holder in enumerate(stages)}
        self._sources = sorted(sources, key=lambda source: place[source.nearest])
        return self._sources

    def _nearest_first(self, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Order the holders of one block: same host first, those lately silent last.

        Different readers start at different holders.
        """
        if len(holders) == 1:
            return holders
        assert self._context is not None
        here, router = self._context.address, self._context.router
        hosts = router.hosts([here, *holders])
        silent = {h: router.silences.is_silent(h, self._start_s, self._options) for h in holders}
        order = stage_order(holders, here)
        return tuple(sorted(order, key=lambda h: (silent[h], hosts[h] != hosts[here])))

    def begin(self, sources: list[RemoteSource], kind: Kind) -> Fetch | None:
        """Begin to read sources that have their route in common; None if nothing will come."""
        assert self._context is not None
        route, silences = sources[0].route, self._context.router.silences
        try:
            self._check_silence(route)
            begun_s = perf_counter()
            requests = [self._request(source, kind) for source in sources]
            reading = route.transport.read(requests, self._options)
        except TransferError as exc:
            for source in sources:
                source.give_up(exc)
            name = route.transport.name
            silences.note(route.holder, name, exc, self._start_s, self._options)
            return None
        fetch = Fetch(sources, reading, silences, self._options, self._start_s, begun_s)
        self._open.append(fetch)
        return fetch

    def _check_silence(self, route: Route) -> None:
        """Raise if the holder did not answer about another block: the time would add up."""
        assert self._context is not None
        silences, name = self._context.router.silences, route.transport.name
        try:
            silences.check(route.holder, name, self._start_s, self._options)
        except TransferError:
            # Another task gave it up, but that may have changed.
            is_older = silences.is_older(route.holder, name, self._start_s)
            if not is_older or not self._context.responds(route.holder):
                raise

    def _request(self, source: RemoteSource, kind: Kind) -> Request:
        shape = self._plan.source_shapes[source.source_number]
        boxes = [piece.src for piece in source.pieces]
        return Request(source.key, source.route.holder, shape, self._dtype, kind, boxes)

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
        assert self._context is not None
        assert source.error is not None
        route, error = source.route, source.error
        source.leave_route()
        router = self._context.router
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
        while self._open:
            fetch = self._open.pop(0)
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
        return (*self.stages, *(fetch.progress() for fetch in tuple(self._open)))

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
        return sum(source.size for source in self._sources) * int(self._dtype.itemsize)

    @property
    def wasted_bytes(self) -> int:
        """Bytes that came, and had to be read again."""
        return sum(source.wasted for source in self._sources) * int(self._dtype.itemsize)

    def close(self) -> None:
        """End all reads, and so all leases, also where closing one fails. Idempotent."""
        with ExitStack() as leases:
            for fetch in self._open:
                leases.callback(fetch.reading.close)
