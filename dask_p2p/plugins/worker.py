"""The worker plugin: references in place of copies, and the holder's side of every transport.

By default a Dask worker copies every dependency of a task to itself before the task runs, and
restores its spilled dependencies from disk. For a `ReferenceTask`, the plugin rewrites the
scheduler's ``compute-task`` message before the worker's state machine handles it. It removes the
dependencies from ``who_has`` and ``nbytes``, and replaces each in the task by a `BlockRef`. The
task then reads only the regions that it needs, block by block.

Methods of `P2PPlugin` run on the worker's event loop, those of `DaskWorkerContext` in task threads.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from distributed import Worker, WorkerPlugin

from dask_p2p.backends import worker_backend
from dask_p2p.backends.allocator import keep_small_buffers
from dask_p2p.backends.device import raise_if_lost
from dask_p2p.config import Options, options
from dask_p2p.engine.remote import BlockRef
from dask_p2p.engine.task import PLUGIN_NAME, ReferenceTask, plugin_context
from dask_p2p.monitoring import metrics as prometheus
from dask_p2p.monitoring.metrics import COUNTERS_METRIC, DEVICE_METRIC, Values
from dask_p2p.monitoring.records import RECORDS_OP
from dask_p2p.plans import stage_order
from dask_p2p.plugins.context import DaskWorkerContext
from dask_p2p.plugins.dask_internals import StreamFlusher
from dask_p2p.plugins.storage import on_spilled
from dask_p2p.transports import make_transports
from dask_p2p.transports.rpc import Background
from dask_p2p.transports.same_host import SameHostTransport
from dask_p2p.types import Key
from dask_p2p.versions import check_dask, pickled_plugin

_Part = TypeVar("_Part")

_LEASED_METRIC = "dask-p2p-leased-bytes"
_REFUSAL = (
    "dask_p2p: other workers cannot read a worker's blocks in place, so it sends them as messages: "
    "{0.full_text}."
)


class P2PPlugin(WorkerPlugin):  # type: ignore[misc]
    """Worker plugin for peer-to-peer transfers.

    Options are the worker's own, by default from its configuration; tasks carry their options.
    """

    name = PLUGIN_NAME
    idempotent = True
    context: DaskWorkerContext | None = None  # None before the set-up

    def __init__(self, options: Options | None = None) -> None:
        self.options = options
        self._flusher = StreamFlusher()
        self._background = Background()
        self._parts: dict[Any, Any] = {}  # by the function that made the part
        self._device_bytes = 0  # memory of the GPU, once it is known

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_plugin(type(self))

    def part(self, make: Callable[[Worker], Any]) -> Any:
        """Return the part of the plugin that `make` returned for this worker.

        The plugin calls the part's method `close` when it is removed. On the event loop.
        """
        if make not in self._parts:
            self._parts[make] = make(self._worker)
        return self._parts[make]

    async def add_to(self, dask_worker: Worker) -> None:
        """Install the plugin on a worker, unless a working one is there.

        The scheduler sends this method, not a function. A method travels with its object, and
        `plugin_of_version` imports its class faster than Python imports a function.
        """
        if plugin_context(dask_worker) is None:
            await dask_worker.plugin_add(self, catch_errors=False)

    def setup(self, worker: Worker) -> None:
        """Replace the worker's handlers, and add those of the transports: all or none."""
        try:
            check_dask()
            keep_small_buffers()
            self.options = chosen = self.options or options()
            self._worker = worker
            self._context = context = DaskWorkerContext(worker, chosen)
            self._transports = context.router.transports = make_transports(context, chosen)
        except BaseException:
            worker.plugins.pop(self.name, None)  # Dask keeps plugins that failed
            raise
        for refusal in {transport.refusal for transport in self._in_place()} - {None}:
            context.warn(_REFUSAL.format(refusal))
        for transport in self._transports.values():
            worker.handlers.update(transport.handlers())
        worker.handlers[RECORDS_OP] = context.new_records
        # A new dict, since a heartbeat may be iterating over the old one and awaiting a metric. A
        # change would raise there, and close the worker.
        own_metrics = {
            _LEASED_METRIC: lambda worker: self.leased_bytes,
            DEVICE_METRIC: lambda worker: self._device_bytes,
            COUNTERS_METRIC: lambda worker: self.figures(),
        }
        worker.metrics = {**worker.metrics, **own_metrics}
        self._end_spilling = on_spilled(worker.data, self._on_spilled)
        prometheus.register(worker, "worker", self.figures)
        self._background.start(self._warm_up())
        handlers = worker.stream_handlers
        self._originals = {op: handlers[op] for op in ("compute-task", "remove-worker")}
        handlers["compute-task"] = self._on_compute_task
        handlers["remove-worker"] = self._on_remove_worker
        self.context = context

    async def _warm_up(self) -> None:
        """Compile the kernels before a task needs them, which takes seconds once per machine."""
        backend = worker_backend()
        # Import CuPy in this thread, which also unpickles messages. If two threads import CuPy
        # concurrently, one may fail, and Dask then stops reading a stream.
        _ = backend.module
        # A full collection visits all objects of all modules, for 20 to 90 ms. Workers that do the
        # same work collect at the same time. The user's objects come later, or in other processes.
        if self._worker.nanny is not None and not self._worker.state.tasks:
            gc.freeze()
        if backend.on_device:  # if this fails, so will the first task, with an error.
            await self._context.offload(backend.warm_up)
            self._device_bytes = await self._context.offload(backend.device_bytes)

    @property
    def leased_bytes(self) -> int:
        """Bytes of blocks that are kept for readers, or for readers that may follow."""
        return sum(transport.directory.leased_bytes for transport in self._in_place())

    def _in_place(self) -> list[SameHostTransport]:
        transports = self._transports.values()
        return [transport for transport in transports if isinstance(transport, SameHostTransport)]

    def figures(self) -> Values:
        transports = self._transports.values()
        packed = {id(transport.packed): transport.packed for transport in transports}
        staging_bytes = {
            "packed": sum(budget.reserved_bytes for budget in packed.values()),
            "kept": sum(transport.kept_bytes for transport in transports)
            + self._context.outputs.idle_bytes
            + self._context.pinned.idle_bytes,
        }
        ranks = [record for record in self._context.running_records() if record.attempt]
        gauges: Values = {
            "leased_bytes": {"": self.leased_bytes},
            "pinned_bytes": {"": self._context.pinned.pinned_bytes},
            "staging_bytes": {**staging_bytes},
            "ranks": {"": len(ranks)},
            "ranks_steps_per_second": {"": sum(rank.steps_per_s for rank in ranks)},
        }
        return {**self._context.counters.values(), **gauges}

    def clear_probes(self) -> None:
        for key in self._context.probes.clear():
            for transport in self._transports.values():
                transport.on_released(key)

    async def teardown(self, worker: Worker) -> None:
        worker.stream_handlers.update(self._originals)
        prometheus.unregister(worker)
        own_metrics = (_LEASED_METRIC, DEVICE_METRIC, COUNTERS_METRIC)
        worker.metrics = {k: metric for k, metric in worker.metrics.items() if k not in own_metrics}
        self._end_spilling()
        async with AsyncExitStack() as ending:  # runs each callback, even if others fail
            ending.callback(self._context.close)
            ending.callback(worker.handlers.pop, RECORDS_OP, None)
            for transport in self._transports.values():
                for op in transport.handlers():
                    ending.callback(worker.handlers.pop, op, None)
                ending.push_async_callback(transport.close)
            for part in self._parts.values():  # first: the last callback runs first
                ending.callback(part.close)

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Notify transports of released blocks, and flush the stream of a worker without tasks."""
        state = self._worker.state
        if start in ("executing", "long-running") and not state.ready and not state.executing:
            self._flusher.flush(self._worker.batched_stream)
        if finish == "error" and worker_backend().on_device:
            self._background.start(self._context.offload(raise_if_lost))  # closes the worker
        if start == "memory" and finish != "memory":
            self._context.on_released(key)
            for transport in self._transports.values():
                transport.on_released(key)

    def _on_spilled(self, key: Key, block: Any) -> None:
        for transport in self._in_place():
            transport.on_spilled(key)

    def _on_compute_task(self, **message: Any) -> None:
        task = message.get("run_spec")
        if isinstance(task, ReferenceTask):
            context, address, references = self._context, self._worker.address, {}
            for key in message["who_has"].keys() & task.blocks.dependencies:
                holders = message["who_has"][key]
                context.on_workers_named(holders)
                local = {address} if context.holds(key) else set()
                if holders := local | ({*holders} - {address}):
                    references[key] = BlockRef(key, tuple(sorted(holders)))
            if references:
                message["run_spec"] = task.substitute(references)
                for part in ("who_has", "nbytes"):
                    message[part] = {k: v for k, v in message[part].items() if k not in references}
        self._originals["compute-task"](**message)

    def _on_remove_worker(self, **message: Any) -> None:
        try:
            self._context.on_worker_left(message["worker"])
            self._context.router.on_worker_left(message["worker"])
        finally:
            self._originals["remove-worker"](**message)


async def part_on(worker: Worker, make: Callable[[Worker], _Part]) -> _Part:
    """Return a part of a worker's plugin: see `P2PPlugin.part`. Install the plugin if missing."""
    await P2PPlugin().add_to(worker)
    part: _Part = worker.plugins[PLUGIN_NAME].part(make)
    return part


async def probe_peers(addresses: list[str], dask_worker: Worker) -> None:
    """Probe a worker's routes to the others, which opens connections and mappings for later.

    Only for GPU blocks: routes for blocks in host memory have nothing to open.
    """
    context, backend = plugin_context(dask_worker), worker_backend()
    if isinstance(context, DaskWorkerContext) and backend.on_device:
        peers = stage_order(addresses, context.address)
        await asyncio.to_thread(context.probe_peers, peers, backend.name)
