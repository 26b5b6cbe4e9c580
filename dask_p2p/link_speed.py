"""How fast blocks move from one worker to another, and by which transport. Runs on the workers.

Every transport that may be used after the first one is measured too. One that is quicker by far is
preferred from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dask_p2p.assemble import Assembly, OutputSpec
from dask_p2p.config import Options
from dask_p2p.errors import Obstacle, P2PError
from dask_p2p.plans import BlockPlan, Piece, Source
from dask_p2p.task import PLUGIN_NAME
from dask_p2p.transports.probe import check_probe, most_probe_bytes, probe_key
from dask_p2p.transports.router import BlockRef
from dask_p2p.types import Kind
from dask_p2p.worker_context import DaskWorkerContext

__all__ = ["FAR", "Link", "clear_probes", "measure_from"]

FAR = 2  #: Times as fast that another transport must be to be preferred.

_DTYPE = np.dtype("u1")  # of probes
_LATENCY_BYTES = 1024
_REPEATS = 5
_FEW_REPEATS = 2  # of transports that are used only if they are quicker by far


@dataclass(frozen=True, slots=True)
class Link:
    """How blocks come from one worker to another."""

    reader: str  # address
    holder: str
    transport: str | None  # that is used; None if nothing works
    gbs: float  # 1e9 bytes per second, of one large block
    latency_s: float  # of one small block
    obstacles: Mapping[str, Obstacle] = field(default_factory=dict)  # to others, by transport
    error: str | None = None
    quicker: str | None = None  # a later transport that would take less than half the time


async def measure_from(
    holders: Mapping[str, str], kind: Kind, options: Options, dask_worker: Any
) -> Link:
    """Measure the link from this worker's holder, on a thread as tasks have them."""
    context = dask_worker.plugins[PLUGIN_NAME].context
    nbytes = most_probe_bytes(kind, dask_worker.memory_manager.memory_limit or None)
    pair = _Pair(context, holders[dask_worker.address], kind, nbytes, options)
    return await asyncio.to_thread(pair.link)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A worker, whose context it is, and another one whose blocks are brought to it."""

    context: DaskWorkerContext
    holder: str
    kind: Kind
    nbytes: int  # of a large block
    options: Options

    def link(self) -> Link:
        """Measure how blocks come, and prefer a transport that is quicker by far."""
        context, holder = self.context, self.holder
        order = self.options.order(self.kind)
        quicker = None
        # What was measured before may not hold any more.
        context.router.prefer(holder, order, None)
        try:
            latency_s, time_s, transport = self._measure()
            quicker = self._quicker(time_s, transport)
            # An order that the user named is kept.
            if quicker is not None and self.options.transports is None:
                context.router.prefer(holder, order, quicker)
                latency_s, time_s, transport = self._measure()
        except P2PError as exc:
            error = f"{type(exc).__name__}: {exc}"
            return Link(context.address, holder, None, 0.0, 0.0, error=error)
        obstacles = {}
        for name in order[: order.index(transport)]:
            why = self._why_not(name)
            if why is None and transport == quicker:
                why = Obstacle("slower", f"{quicker} is more than {FAR} times as fast")
            if why is not None:
                obstacles[name] = why
        gbs = self.nbytes / time_s / 1e9
        quicker = None if transport == quicker else quicker
        return Link(context.address, holder, transport, gbs, latency_s, obstacles, quicker=quicker)

    def _why_not(self, transport: str) -> Obstacle | None:
        router = self.context.router
        obstacle: Obstacle | None = router.transports[transport].obstacle(
            self.holder, self.kind, _DTYPE
        )
        return obstacle or router.failure(self.holder, transport)

    def _measure(self) -> tuple[float, float, str]:
        """Return the time of a small block and of a large one, and what brought that one."""
        block = BlockRef(probe_key(self.kind), (self.holder,))
        # The first one is tried before anything is timed.
        self.context.router.routes(block, self.kind, _DTYPE, self.options.order(self.kind))
        latency_s, _ = replace(self, nbytes=_LATENCY_BYTES)._time(_REPEATS)
        return latency_s, *self._time(_REPEATS)

    def _quicker(self, time_s: float, transport: str) -> str | None:
        """Return the quickest later transport, if it takes less than half the time."""
        order = self.options.order(self.kind)
        times_s = {}
        for name in order[order.index(transport) + 1 :]:
            if self._why_not(name) is None:
                alone = replace(self, options=replace(self.options, transports=(name,)))
                with contextlib.suppress(P2PError):
                    times_s[name], _ = alone._time(_FEW_REPEATS)
        best = min(times_s, key=lambda name: times_s[name], default=None)
        return best if best is not None and FAR * times_s[best] < time_s else None

    def _time(self, repeats: int) -> tuple[float, str]:
        """Return the least time for a probe block, and what brought it."""
        best_s, transport = float("inf"), ""
        for _ in range(repeats):
            start_s = time.perf_counter()
            region, transport = self._bring_probe()
            best_s = min(best_s, time.perf_counter() - start_s)
        check_probe(region)
        return best_s, transport

    def _bring_probe(self) -> tuple[Any, str]:
        """Bring a probe block here as a task would; return it, and the transport's name."""
        key: tuple[Any, ...] = probe_key(self.kind, self.nbytes)
        name, index = key[0], key[1:]  # as if it were the block of an array with this name
        shape, whole = (self.nbytes,), ((0, self.nbytes),)
        plan = BlockPlan(shape, (0,), (Source(0, index),), (shape,), (Piece(0, whole, whole),))
        output = OutputSpec((name,), _DTYPE, self.kind, self.options)
        assembly = Assembly(plan, output, [BlockRef(key, (self.holder,))], self.context)
        block = assembly.run()
        return block, assembly.sources.stages[-1].transport


def clear_probes(dask_worker: Any) -> None:
    """Drop the blocks that were measured."""
    dask_worker.plugins[PLUGIN_NAME].clear_probes()
