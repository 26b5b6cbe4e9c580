"""The task that assembles one output block, as Dask's schedulers and workers see it.

Its dependencies are, truthfully, all input blocks of which it needs a region: lineage, culling,
memory release and recovery are Dask's own. What a worker with the plugin changes is only how the
blocks that it does not hold are given: as references (`AssembleTask.with_references`) instead of
as copies.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from dask.base import tokenize
from dask.task_spec import GraphNode, Task
from dask.utils import format_bytes

from dask_p2p.assemble import Assembly, OutputSpec
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError, P2PWarning, TransferError, VersionError
from dask_p2p.layout import Index
from dask_p2p.monitoring.records import REASON_CHARS, Record
from dask_p2p.plans import Plan
from dask_p2p.retry import AttemptLog, pause_s
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.router import BlockRef
from dask_p2p.types import Array, Key
from dask_p2p.versioned import Unreadable, check_readable, this_version

__all__ = [
    "PLUGIN_NAME",
    "AssembleTask",
    "Blocks",
    "plugin_runtime",
    "try_again",
    "warn_client",
    "whereabouts",
]

logger = logging.getLogger(__name__)

#: Name under which the worker plugin is registered.
PLUGIN_NAME = "dask-p2p"

_TAKEN_OFF = "the worker's plugin was taken off while the task waited"
_name_of = lru_cache(maxsize=256)(str)  # of a dtype, which NumPy takes 20 µs to tell
_warned: WeakSet[Any] = WeakSet()  # workers that have said that they lack the plugin
_unplugged: WeakKeyDictionary[Any, AttemptLog] = WeakKeyDictionary()  # workers that lost it


class Blocks(GraphNode):  # type: ignore[misc]
    """The input blocks of a task, in its plan's order. All tasks that read the same share one.

    So an edge of the graph takes no memory of its own on the client, and does not travel.

    Parameters
    ----------
    *items
        Of each block its Dask key, or a `BlockRef`.
    """

    __slots__ = ("_token", "items")
    key: Any
    _dependencies: frozenset[Any]

    def __init__(self, *items: Any) -> None:
        self.key = None
        self.items = items
        self._token: str | None = None
        keys = frozenset(item for item in items if not isinstance(item, BlockRef))
        self._dependencies = keys  # type: ignore[misc]  # Dask's class has slots, and no types

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, self.items

    def __call__(self, values: Mapping[Any, Any] = {}) -> list[Any]:  # of Dask
        self._verify_values(values)
        return [i if isinstance(i, BlockRef) else values[i] for i in self.items]

    def __dask_tokenize__(self) -> Any:
        if self._token is None:
            self._token = tokenize(self.items)
        return type(self).__name__, self._token

    def substitute(self, subs: Mapping[Any, Any], key: Any = None) -> Blocks:
        """Return the same with other keys, or references, in the place of some keys."""
        others = {known: subs[known] for known in self.dependencies & subs.keys()}
        if not others:
            return self
        return Blocks(*(others.get(i, i) if not isinstance(i, BlockRef) else i for i in self.items))


class AssembleTask(Task):  # type: ignore[misc]
    """Assembles one output block.

    Parameters
    ----------
    key
        Dask key of the output block.
    plan : Plan
        Of the whole output. A worker makes the pieces of its own block from it: there are as many
        pieces as blocks squared, too many for one client to make and to send.
    index : tuple of int
        Of the output block.
    output : OutputSpec
        What all blocks of the output have in common.
    blocks : Blocks
        The input blocks, in the plan's order.
    """

    __slots__ = ()

    def __init__(self, key: Key, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        super().__init__(key, func, *args, **kwargs)
        if args and isinstance(args[-1], Blocks):
            # The same object for all tasks that read the same, and so pickled once.
            self._dependencies = args[-1].dependencies  # type: ignore[misc]

    @property
    def is_readable(self) -> bool:
        """Whether this version of the package can read all of it; if not, it ends in an error."""
        unreadable = any(isinstance(arg, Unreadable) for arg in self.args)
        return not unreadable and isinstance(self.args[-1], Blocks)

    @property
    def plan(self) -> Plan:
        """Of the whole output."""
        plan: Plan = self.args[1]
        return plan

    @property
    def index(self) -> Index:
        """Of the output block."""
        index: Index = self.args[2]
        return index

    @property
    def blocks(self) -> Blocks:
        """The input blocks."""
        blocks: Blocks = self.args[4]
        return blocks

    @property
    def block_fusion(self) -> bool:
        """Fusing would rename the task, and hide its class from the plugin."""
        return True

    @classmethod
    def of(
        cls,
        key: Key,
        plan: Plan,
        index: Index,
        output: OutputSpec,
        blocks: Blocks,
        function: Callable[..., Any] | None = None,
    ) -> AssembleTask:
        """Make the task; by default `assemble_block` does its work."""
        return cls(key, function or assemble_block, key, plan, index, output, blocks)

    def with_references(self, references: Mapping[Any, BlockRef]) -> AssembleTask:
        """Return the task with these dependencies replaced by references."""
        *others, blocks = self.args
        return type(self)(self.key, self.func, *others, blocks.substitute(references))


def assemble_block(
    key: Key, plan: Plan, index: Index, output: OutputSpec, blocks: Sequence[Any]
) -> Any:
    """Do a task's work, on any scheduler."""
    check_readable(plan, output)
    start_s, counted_s = time.time(), time.perf_counter()
    worker, runtime = whereabouts()
    if runtime is None:
        if any(isinstance(block, BlockRef) for block in blocks):
            log = _unplugged.setdefault(worker, AttemptLog(worker.address))
            try_again(key, TransferError(_TAKEN_OFF), log, output.options)
        if worker is not None:
            _warn_of_whole_blocks(worker, list(map(output.key, plan.sources(index))))
        return _finished(Assembly(plan.block(index), output, blocks).run(), index, output)
    assembly = Assembly(plan.block(index), output, blocks, runtime, counted_s)
    runtime.under_way[key] = lambda: _under_way(key, start_s, plan, assembly)
    try:
        result = _finished(_attempt(key, start_s, plan, assembly, runtime), index, output)
        runtime.record(_ended(key, start_s, plan, assembly, result))
    finally:
        runtime.under_way.pop(key, None)
    return result


def _attempt(
    key: Key, start_s: float, plan: Plan, assembly: Assembly, runtime: WorkerContext
) -> Any:
    try:
        with assembly.ranges(key):
            return assembly.run()
    except TransferError as exc:
        runtime.record(_ended(key, start_s, plan, assembly, error=str(exc)))
        try_again(key, exc, runtime, assembly.options)
    except DeviceLostError as exc:
        from distributed import Reschedule

        if not runtime.on_device_lost(exc):
            raise
        raise Reschedule() from exc  # to another worker: this one leaves


def _finished(block: Array, index: Index, output: OutputSpec) -> Any:
    return block if output.post is None else output.post(block, index)


def _ended(
    key: Key,
    start_s: float,
    plan: Plan,
    assembly: Assembly,
    block: Array | None = None,
    error: str = "",
) -> Record:
    """Note an attempt that has ended, on a worker with the plugin."""
    return _record(
        key,
        start_s,
        plan,
        assembly,
        stages=tuple(assembly.sources.stages),
        shape=tuple(getattr(block, "shape", ())),
        dtype=_name_of(getattr(block, "dtype", "")),
        nbytes=int(getattr(block, "nbytes", 0)),
        fallbacks=assembly.sources.fallbacks,
        error=error[:REASON_CHARS],
    )


def _under_way(key: Key, start_s: float, plan: Plan, assembly: Assembly) -> Record:
    """Tell of an attempt that has not ended; any thread may ask."""
    stages, wanted_bytes = assembly.sources.so_far(), assembly.sources.wanted_bytes
    return _record(key, start_s, plan, assembly, stages=stages, wanted_bytes=wanted_bytes)


def _record(key: Key, start_s: float, plan: Plan, assembly: Assembly, **others: Any) -> Record:
    """Note what is known of an attempt at any time, and others of its fields."""
    assert assembly.context is not None
    chunks = getattr(assembly.output.post, "chunks", plan.chunks)  # those of a plan may have rims
    return Record(
        key=key,
        start_s=start_s,
        stop_s=time.time(),
        worker=assembly.context.address,
        array_shape=tuple(map(sum, chunks)),
        blocks=tuple(map(len, chunks)),
        axes=assembly.plan.axes,
        wasted_bytes=assembly.sources.wasted_bytes,
        kernel_s=assembly.kernel_s,
        **others,
    )


def _assemble(key: Key, plan: Any, index: Any, output: Any, *blocks: Any) -> NoReturn:
    """Refuse a task of the first version, which names its work so."""
    check_readable(plan, output)
    raise VersionError(f"expected a task of {this_version()}, got {key!r} of an older version.")


def try_again(
    key: Key, error: TransferError, log: WorkerContext | AttemptLog, options: Options
) -> NoReturn:
    """Return the task to the scheduler, which knows by now which workers left and what moved.

    `Reschedule` itself is neither counted nor bounded in Dask: the count is kept here.
    """
    from distributed import Reschedule

    attempts = log.record_failure(key, str(error))
    if attempts.count >= options.attempts:
        log.forget_attempts(key)
        raise TransferError(
            f"task {key!r} failed {attempts.count} times on {log.address}: {attempts}. "
            f"See whether the workers named can reach each other; p2p.attempts and p2p.timeouts "
            f"set how long to try."
        ) from error
    logger.info("attempt %d at %r failed, rescheduling: %s", attempts.count, key, str(error))
    time.sleep(pause_s(options, attempts.count))
    raise Reschedule() from error


def whereabouts() -> tuple[Any, WorkerContext | None]:
    """Return the worker that this thread works for, and its plugin; None where there is none."""
    try:
        from distributed import get_worker

        worker = get_worker()
    except (ImportError, ValueError):
        return None, None
    return worker, plugin_runtime(worker)


def plugin_runtime(worker: Any) -> WorkerContext | None:
    """Return what a worker's plugin offers to tasks; None without one that is set up."""
    return getattr(worker.plugins.get(PLUGIN_NAME), "context", None)


def _warn_of_whole_blocks(worker: Any, keys: list[Any]) -> None:
    """Warn the user, once for each worker, what a task has moved because the plugin is missing."""
    if worker in _warned:
        return
    wanted = set(keys)
    moved_bytes = sum(
        nbytes
        for transfer in list(worker.transfer_incoming_log)
        for key, nbytes in transfer["keys"].items()
        if key in wanted
    )
    if not moved_bytes:
        return
    _warned.add(worker)
    text = (
        f"dask_p2p: {format_bytes(moved_bytes)} were moved as whole blocks to {worker.address}, "
        f"for one block of a result, because the worker lacked the package's plugin. Call "
        f"dask_p2p.register(client) first, or start the scheduler with --preload dask_p2p.preload."
    )
    warn_client(worker, text, P2PWarning)


def warn_client(worker: Any, text: str, category: type[Warning]) -> None:
    """Have the clients warn their users: as `distributed.warn` does, but not in the worker too.

    Workers that find the same send the same text, and Python shows it once.
    """
    event = {"message": pickle.dumps(text), "category": pickle.dumps(category)}
    worker.log_event("warn", event)
