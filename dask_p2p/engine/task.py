"""The task that assembles one output block, as Dask's schedulers and workers see it.

Its dependencies are exactly the input blocks that it reads, so Dask handles lineage, culling,
memory release and recovery. On a worker with the plugin, the task gets its blocks as references
(`BlockRef`) instead of copies.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from dask.base import tokenize
from dask.task_spec import GraphNode, Task

from dask_p2p.config import Options
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.context import TaskContext, pause_s, record_attempt
from dask_p2p.engine.remote import BlockRef
from dask_p2p.errors import (
    ConfigError,
    DeviceLostError,
    FileError,
    InputError,
    SectionError,
    TransferError,
    without_frames,
)
from dask_p2p.geometry import Index
from dask_p2p.inputs import pluralize
from dask_p2p.loading import is_library
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.plans import Plan
from dask_p2p.types import Key

# Frames of tasks that fail: users see those of their program, and none keeps its arrays.
#
# A worker of Dask has the exception of a task in a variable of a frame that the exception's
# traceback leads to. Such a cycle stays until Python collects garbage of its oldest generation: for
# minutes, on a worker that does little. Python counts objects for that, and no bytes of arrays.

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Until Dask has made a text of the traceback, which takes it some milliseconds.
_DROP_S = 0.5

_PACKAGE = "dask_p2p"
# Errors about a user's program: their causes are not in frames of this package.
_ABOUT_USERS = (ConfigError, FileError, InputError, SectionError)
# Packages that run tasks, and carry their exceptions.
_RUNNERS = {_PACKAGE, "dask", "distributed", "tornado", "tblib", *sys.stdlib_module_names}


def drops_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function of a task that shows users their frames when it fails.

    Soon afterwards its frames are dropped, with all arrays.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as exc:
            keep_user_frames(exc)
            _drop_soon(exc)
            raise

    return run


def _drop_soon(exc: BaseException) -> None:
    try:
        from distributed import get_worker

        loop = get_worker().loop
    except (ImportError, ValueError):  # another scheduler of Dask, or none
        return
    loop.add_callback(loop.call_later, _DROP_S, without_frames, exc)


def keep_user_frames(exc: BaseException) -> None:
    """Drop the frames before those of the user's program from a traceback, and from its causes'.

    An error about the program has no frames of this package at all. An exception that no frame of
    the program leads to keeps its traceback.
    """
    visited = set[int]()
    link: BaseException | None = exc
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        link.__traceback__ = _select_user_frames(link)
        link = link.__cause__ or link.__context__


def _select_user_frames(exc: BaseException) -> TracebackType | None:
    frames, link = [], exc.__traceback__
    while link is not None:
        frames.append(link)
        link = link.tb_next
    pairs = [(tb, str(tb.tb_frame.f_globals.get("__name__")).partition(".")[0]) for tb in frames]
    is_about_users = isinstance(exc, _ABOUT_USERS)
    is_user = [
        package not in _RUNNERS and (is_about_users or not is_library(package))
        for _, package in pairs
    ]
    otherwise = len(pairs) if is_about_users else 0
    start = is_user.index(True) if True in is_user else otherwise
    shown = [tb for tb, package in pairs[start:] if not is_about_users or package != _PACKAGE]
    result: TracebackType | None = None
    for tb in reversed(shown):
        result = TracebackType(result, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return result


logger = logging.getLogger(__name__)

#: Name under which the worker plugin is registered.
PLUGIN_NAME = "dask-p2p"

#: Start of the names of arrays whose tasks Dask may fuse with those of their inputs. Such a task is
#: of Dask's class, and its key joins the names of both arrays.
FUSABLE = "p2p-on-gpu"

#: Callback for a worker without the plugin, and the keys of the blocks of a task on it.
OnMissing: TypeAlias = Callable[[Any, Sequence[Key]], None]

_name_of = lru_cache(maxsize=256)(str)  # name of a dtype, which takes NumPy 20 µs

_unplugged: WeakKeyDictionary[Any, TaskContext] = WeakKeyDictionary()  # workers without plugin


class Blocks(GraphNode):  # type: ignore[misc]
    """The input blocks of a task, in its plan's order: for each a Dask key or a `BlockRef`.

    All tasks that read the same blocks share one instance, so that edges of the graph take no
    memory on the client and are not sent.
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
        """Return the blocks with some keys replaced by other keys or by references."""
        items = tuple([i if isinstance(i, BlockRef) else subs.get(i, i) for i in self.items])
        return self if items == self.items else Blocks(*items)


def _argument(position: int) -> Any:
    """Return a property for one of the arguments of a task's function."""
    return property(lambda task: task.args[position])


class ReferenceTask(Task):  # type: ignore[misc]
    """A task that gets its `blocks` as references on workers with the plugin."""

    __slots__ = ()

    blocks: Blocks  # dependencies passed as references

    def reads(self) -> Iterable[tuple[Key, int]]:
        """Return the dependencies that the task reads, and the number of elements read of each."""
        raise NotImplementedError  # Dask's class is no ABC


class WaitTask(ReferenceTask):
    """A task that waits for its `blocks` without reading them.

    Its function gets a list of these blocks, which it must not read, and the other arguments.
    """

    __slots__ = ()

    blocks: Blocks = _argument(0)

    def reads(self) -> Iterable[tuple[Key, int]]:
        return ((key, 1) for key in self.dependencies - self.blocks.dependencies)


class AssembleTask(ReferenceTask):
    """A task that assembles one output block: `assemble_block`, whose arguments it names."""

    __slots__ = ()

    block_fusion = True  # it would rename the task, and hide its class from the plugin

    #: Plan of the whole output. A worker derives the pieces of its own block from it. The pieces
    #: of all blocks grow with the square of the number of blocks: too many for one client.
    plan: Plan = _argument(1)
    index: Index = _argument(2)  # index of the output block
    output: OutputSpec = _argument(3)  # properties that all blocks of the output share
    blocks: Blocks = _argument(4)  # input blocks, in the plan's order

    def __init__(self, key: Key, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        super().__init__(key, func, *args, **kwargs)
        if len(args) > 4 and isinstance(args[4], Blocks):
            # One object for all tasks that read the same blocks: it is pickled once.
            self._dependencies = self.blocks.dependencies  # type: ignore[misc]

    def reads(self) -> Iterable[tuple[Key, int]]:
        return zip(self.blocks.items, self.plan.source_elements(self.index), strict=True)

    def substitute(self, subs: Mapping[Any, Any], key: Any = None) -> AssembleTask:
        """Return the task with some of its blocks, and perhaps its own key, replaced."""
        task: AssembleTask = super().substitute(subs, key)
        if task.key != task.args[0]:  # which the record has
            task = type(self)(task.key, task.func, task.key, *task.args[1:])
        return task


class RankTask(Task):  # type: ignore[misc]
    """A task that runs one rank of a gang; see `dask_p2p.sections`. Its key is ``(gang, rank)``."""

    __slots__ = ()

    body: Any = _argument(3)  # function of the ranks, the same for all

    block_fusion = True  # it would rename the task, and the scheduler finds it by its name


def unwrap_task(task: Any) -> Any:
    """Return the task of this package that Dask has wrapped into one of another name, or the task.

    Dask does so for the tasks of arguments of `dask.delayed`, so also for stores that are written
    later.
    """
    is_wrapper = type(task) is Task and getattr(task.func, "__name__", "") == "_identity"
    if is_wrapper and isinstance(task.args[0], (ReferenceTask, RankTask)):
        return task.args[0].substitute({}, key=task.key)
    return task


def run_name(key: Any) -> Any:
    """Return the name of the array that a task makes; of a fused task's name, the last part."""
    name = key[0] if isinstance(key, tuple) else key
    start = name.find(FUSABLE) if isinstance(name, str) else -1
    return name[start:] if start > 0 else name


def is_fusable(key: Any) -> bool:
    """Return whether the task with this key, fused or not, makes a block of a `FUSABLE` array."""
    return str(run_name(key)).startswith(FUSABLE)


@drops_frames
def assemble_block(
    key: Key,
    plan: Plan,
    index: Index,
    output: OutputSpec,
    blocks: Sequence[Any],
    on_missing: OnMissing | None = None,
) -> Any:
    """Return the task's output block, on any scheduler."""
    start_s, counted_s = time.time(), time.perf_counter()
    worker, context = current_worker()
    assembly = Assembly(plan.block(index), output, blocks, context, counted_s)
    if worker in _unplugged and on_missing is not None:
        on_missing(worker, list(map(output.key, plan.sources(index))))
    record = partial(_record, key, start_s, plan, assembly, context.address)
    try:
        with record_attempt(context, key, record) as fields:
            block = assembly.finish(assembly.run(), index)
            fields["shape"] = tuple(getattr(block, "shape", ()))
            fields["dtype"] = _name_of(getattr(block, "dtype", ""))
            fields["nbytes"] = int(getattr(block, "nbytes", 0))
            return block
    except TransferError as exc:
        reschedule_failed(key, exc, context, output.options)
    except DeviceLostError as exc:
        reschedule_elsewhere(context, exc)


def _record(
    key: Key,
    start_s: float,
    plan: Plan,
    assembly: Assembly,
    address: str,
    is_running: bool = False,
    **fields: Any,
) -> TaskRecord:
    """Return a record of an attempt so far, with these additional fields. Thread-safe."""
    chunks, sources = assembly.output.chunks or plan.chunks, assembly.sources
    return TaskRecord(
        key=key,
        start_s=start_s,
        stop_s=time.time(),
        worker=address,
        array_shape=tuple(map(sum, chunks)),
        blocks=tuple(map(len, chunks)),
        wasted_bytes=sources.wasted_bytes,
        wanted_bytes=sources.wanted_bytes if is_running else None,
        stages=sources.progress() if is_running else tuple(sources.stages),
        fallbacks=() if is_running else sources.fallbacks,
        kernel_s=assembly.kernels.seconds,
        **fields,
    )


def reschedule_failed(
    key: Key, error: TransferError, log: TaskContext, options: Options
) -> NoReturn:
    """Return the task to the scheduler, which has current data on workers and blocks.

    Dask neither counts nor bounds `Reschedule`, so `log` counts the attempts. The last one raises
    `TransferError`.
    """
    from distributed import Reschedule

    count, causes = log.count_attempt(key, str(error))
    if count >= options.attempts:
        log.forget_attempts(key)
        raise TransferError(
            f"task {key!r} failed {pluralize(count, 'time')} on {log.address}: {causes}. "
            f"Check that these workers can reach each other; p2p.attempts and p2p.timeouts set "
            f"the number of attempts and their deadlines."
        ) from error
    logger.info("attempt %d at %r failed, rescheduling: %s", count, key, str(error))
    time.sleep(pause_s(count))
    raise Reschedule() from error


def reschedule_elsewhere(context: TaskContext, error: DeviceLostError) -> NoReturn:
    """Return the task to the scheduler if this worker closes. Otherwise raise the error."""
    from distributed import Reschedule

    if not context.on_device_lost(error):
        raise error
    raise Reschedule() from error


def current_worker() -> tuple[Any, TaskContext]:
    """Return this thread's worker, or None, and the context of its tasks."""
    try:
        from distributed import get_worker

        worker = get_worker()
    except (ImportError, ValueError):
        return None, TaskContext()
    if (context := plugin_context(worker)) is None:
        return worker, _unplugged.setdefault(worker, TaskContext(worker.address))
    _unplugged.pop(worker, None)
    return worker, context


def plugin_context(worker: Any) -> TaskContext | None:
    """Return the context that a worker's plugin provides to tasks; None before its set-up."""
    return getattr(worker.plugins.get(PLUGIN_NAME), "context", None)
