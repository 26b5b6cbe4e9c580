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
    holder = holders[dask_worker.address]
    context = dask_worker.plugins[PLUGIN_NAME].context
    nbytes = most_probe_bytes(kind, dask_worker.memory_manager.memory_limit or None)
    return await asyncio.to_thread(_measure_link, context, holder, kind, nbytes, options)


def _measure_link(
    context: DaskWorkerContext, holder: str, kind: Kind, nbytes: int, options: Options
) -> Link:
    order = options.order(kind)
    quicker = None
    context.router.prefer(holder, order, None)  # what was measured before may not hold any more
    try:
        first = latency_s, time_s, transport = _measure(context, holder, kind, nbytes, options)
        quicker = _quicker(context, holder, kind, nbytes, options, *first[1:])
        # An order that the user named is kept.
        if quicker is not None and options.transports is None:
            context.router.prefer(holder, order, quicker)
            latency_s, time_s, transport = _measure(context, holder, kind, nbytes, options)
    except P2PError as exc:
        return Link(context.address, holder, None, 0.0, 0.0, {}, f"{type(exc).__name__}: {exc}")
    obstacles = {}
    for name in order[: order.index(transport)]:
        why = _why_not(context, holder, kind, name)
        if why is None and transport == quicker:
            why = Obstacle("slower", f"{quicker} is more than {FAR} times as fast")
        if why is not None:
            obstacles[name] = why
    gbs = nbytes / time_s / 1e9
    quicker = None if transport == quicker else quicker
    return Link(context.address, holder, transport, gbs, latency_s, obstacles, quicker=quicker)


def _why_not(
    context: DaskWorkerContext, holder: str, kind: Kind, transport: str
) -> Obstacle | None:
    obstacle: Obstacle | None = context.router.transports[transport].obstacle(
        holder, kind, np.dtype("u1")
    )
    return obstacle or context.router.failure(holder, transport)


def _measure(
    context: DaskWorkerContext, holder: str, kind: Kind, nbytes: int, options: Options
) -> tuple[float, float, str]:
    """Return the time of a small block and of a large one, and what brought that one."""
    # The first one is tried before anything is timed.
    context.router.routes(
        BlockRef(probe_key(kind), (holder,)), kind, np.dtype("u1"), options.order(kind)
    )
    latency_s, _ = _time(context, holder, kind, _LATENCY_BYTES, options)
    return latency_s, *_time(context, holder, kind, nbytes, options)


def _quicker(
    context: DaskWorkerContext,
    holder: str,
    kind: Kind,
    nbytes: int,
    options: Options,
    time_s: float,
    transport: str,
) -> str | None:
    """Return the quickest later transport, if it takes less than half the time."""
    order = options.order(kind)
    times_s = {}
    for name in order[order.index(transport) + 1 :]:
        alone = replace(options, transports=(name,))
        if _why_not(context, holder, kind, name) is None:
            with contextlib.suppress(P2PError):
                times_s[name], _ = _time(context, holder, kind, nbytes, alone, _FEW_REPEATS)
    best = min(times_s, key=lambda name: times_s[name], default=None)
    return best if best is not None and FAR * times_s[best] < time_s else None


def _time(
    context: DaskWorkerContext,
    holder: str,
    kind: Kind,
    nbytes: int,
    options: Options,
    repeats: int = _REPEATS,
) -> tuple[float, str]:
    """Return the least time for a probe block of this size, and what brought it."""
    best_s, transport = float("inf"), ""
    for _ in range(repeats):
        start_s = time.perf_counter()
        region, transport = _bring_probe(context, holder, kind, nbytes, options)
        best_s = min(best_s, time.perf_counter() - start_s)
    check_probe(region)
    return best_s, transport


def _bring_probe(
    context: DaskWorkerContext, holder: str, kind: Kind, nbytes: int, options: Options
) -> tuple[Any, str]:
    """Bring a probe block here as a task would; return it, and the transport's name."""
    key: tuple[Any, ...] = probe_key(kind, nbytes)
    name, index = key[0], key[1:]  # as if it were the block of an array with this name
    whole = ((0, nbytes),)
    sources = (Source(0, index),)
    plan = BlockPlan((nbytes,), (0,), sources, ((nbytes,),), (Piece(0, whole, whole),))
    output = OutputSpec((name,), np.dtype("u1"), kind, options)
    assembly = Assembly(plan, output, [BlockRef(key, (holder,))], context)
    block = assembly.run()
    return block, assembly.sources.stages[-1].transport


def clear_probes(dask_worker: Any) -> None:
    """Drop the blocks that were measured."""
    dask_worker.plugins[PLUGIN_NAME].clear_probes()
