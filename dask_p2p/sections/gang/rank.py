"""A rank's task: it waits for its gang, calls the function, and waits for the commit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from dask.task_spec import Task, TaskRef
from dask.utils import key_split
from distributed import Reschedule
from distributed.protocol.pickle import dumps, loads
from distributed.utils import sync
from distributed.worker import thread_state
from tblib import pickling_support

from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext, pause_s, record_attempt
from dask_p2p.engine.task import (
    Blocks,
    RankTask,
    WaitTask,
    current_worker,
    drops_frames,
    keep_user_frames,
    reschedule_elsewhere,
)
from dask_p2p.errors import DeviceLostError, InputError, SectionError, TransferError
from dask_p2p.monitoring.records import REASON_CHARS, Stage, TaskRecord
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plugins.dask_internals import PoolThread, Units
from dask_p2p.plugins.gangs.coordinator import COMMIT, Order
from dask_p2p.plugins.worker import part_on
from dask_p2p.sections.gang.worker import LINK, Progress, RankAttempt, WorkerRanks
from dask_p2p.sections.gpu.device import device_for
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import ONE_RANK, Connections, OneRank
from dask_p2p.sections.wire.endpoint import RankAddress
from dask_p2p.transports.ucx_messenger import Messenger
from dask_p2p.types import Key, Kind

if TYPE_CHECKING:
    from dask_p2p.transports.ucx import UcxTransport

_SECEDE_S = 0.05  # time that a rank waits for its gang before it leaves its worker's thread pool
_LOOK_S = 0.02  # interval between checks for free units of a resource
_MOST_ERROR_BYTES = 2**20  # largest pickled exception that is sent to the other ranks
_MOST_CHARS = 1000  # longest text of an exception that cannot be pickled


@drops_frames
def run_rank(
    gang: str,  # name of the gang
    rank: int,
    ranks: RankGrid,  # the partition of the arrays
    body: Any,
    options: Options,  # of the section's arrays
    *arrays: Sequence[Any],  # this rank's blocks of each array
) -> Any:
    """Do the work of a rank's task.

    The body is called with a context, which its ``context`` makes, and the blocks. Its ``dtype``
    and ``shape`` are those of the first array that it returns, or None. Its ``kind`` is that of the
    blocks that it gets and returns. If it has ``is_resident``, the gang shares its workers with
    other gangs.
    """
    _, context = current_worker()
    run = _RankRun(gang, rank, ranks, body, options, arrays)
    try:
        return run.alone(context) if ranks.size == 1 else run.of_task().in_gang()
    except DeviceLostError as exc:
        reschedule_elsewhere(context, exc)


@dataclass(frozen=True)
class _RankRun:
    """The run of one rank's function. Fields are the arguments of `run_rank`."""

    gang: str
    rank: int
    ranks: RankGrid
    body: Any
    options: Options
    arrays: Sequence[Sequence[Any]]

    def alone(self, context: TaskContext) -> Any:
        """Run the function of the only rank; on a worker until its task is cancelled."""
        worker, key = current_worker()[0], getattr(thread_state, "key", None)
        task: Any = None if worker is None else worker.state.tasks.get(key)
        connections = ONE_RANK if task is None else OneRank(lambda: task.state == "cancelled")
        device = device_for(self.body.kind, self.options, connections)
        ctx = self.body.context(self.ranks, 0, connections, device=device)
        try:
            with self._record_attempt(ctx.progress, context) as fields:
                with _raise_user_errors(self.rank):
                    result = self.body(ctx, *self.arrays)
                fields["nbytes"] = _size_bytes(result)
            return result
        finally:
            if connections.has_ended:
                raise Reschedule()

    def of_task(self) -> _RankRun:
        """Return the run in the gang of this task; refuse schedulers other than the cluster's.

        Dask renames the tasks of arguments of `dask.delayed`. A task that computes with another
        scheduler than the cluster's runs a rank's function under its own key.
        """
        worker, _ = current_worker()
        key: Any = getattr(thread_state, "key", None)
        is_rank = isinstance(key, tuple) and key[1:] == (self.rank,)
        if worker is None or not is_rank or key_split(key[0]) != key_split(self.gang):
            raise InputError(
                f"expected a cluster for {self.ranks.size} ranks that run at the same time, got "
                f"another scheduler of Dask. Compute with a distributed.Client, or give ranks=1."
            )
        return replace(self, gang=str(key[0]))

    def in_gang(self) -> Any:
        """Wait for the other ranks of the gang, and run the function together with them."""
        worker: Any = current_worker()[0]
        worker_ranks = sync(worker.loop, part_on, worker, WorkerRanks)
        _, context = current_worker()  # with the plugin, if it was missing
        ucx = _ucx(context, self.options, self.body.kind)
        is_resident = getattr(self.body, "is_resident", False)
        of_gang = self.gang, self.rank, self.ranks.size, is_resident
        reach = {"timeout_s": self.options.request_timeout_s, "uses_ucx": ucx is not None}
        units, thread = Units(worker, (self.gang, self.rank)), PoolThread(worker)
        with (
            closing(thread),
            worker_ranks.rank_attempt(*of_gang, **reach) as rank_attempt,
            closing(units),
        ):
            order = _order_when_whole(rank_attempt, units, thread, is_resident)
            result = None
            if order.state == "running":
                if is_resident:
                    thread.secede()  # its function mostly waits
                ctx = self._connect(rank_attempt, order)
                workers = [worker for worker, *_ in order.peers]
                of_attempt = rank_attempt.connections, workers, order.attempt
                with self._record_attempt(ctx.progress, context, *of_attempt) as fields:
                    result, order = self._attempt(rank_attempt, ctx, thread, fields, ucx)
        if order.state != "committed":
            _raise_end(order)
        return result

    def _connect(self, rank_attempt: RankAttempt, order: Order) -> Any:
        connections = rank_attempt.connections
        connections.start(self.rank, [RankAddress(*peer) for peer in order.peers])
        reads_memory = "cma" in self.options.order("numpy")
        device = device_for(self.body.kind, self.options, connections)
        checkpoints = rank_attempt.checkpoints(order, device)
        ranks = self.ranks, self.rank
        ctx = self.body.context(*ranks, connections, checkpoints, reads_memory, device)
        rank_attempt.progress = ctx.progress
        return ctx

    def _attempt(
        self,
        rank_attempt: RankAttempt,
        ctx: Any,
        thread: PoolThread,
        fields: dict[str, Any],  # of the attempt's record
        ucx: UcxTransport | None,
    ) -> tuple[Any, Order]:
        """Call the function; return its result, and the order once all ranks are done."""
        result: Any = None
        try:
            rank_attempt.connections.reserve_files()
            rank_attempt.connections.open_channels(partial(_start_messenger, ucx))
            with _raise_user_errors(ctx.rank):
                result = self.body(ctx, *self.arrays)
            thread.release_soon()
            # Otherwise other ranks might wait for one whose function has returned.
            rank_attempt.connections.finish()
            ctx.device.let_go(is_orderly=True)
            order = rank_attempt.leave()
        except AttemptEndedError as exc:
            fields["error"] = str(exc)
            order = rank_attempt.leave(str(exc))
        except DeviceLostError as exc:
            rank_attempt.leave(f"rank {rank_attempt.rank} has lost its GPU: {exc}")
            raise  # all ranks run again, this one on another worker
        except Exception as exc:
            if (next_order := _leave_with_error(exc, rank_attempt, ctx, fields)) is None:
                raise  # with its traceback
            order = next_order
        finally:
            ctx.device.let_go(is_orderly=False)
        if order.state == "committed":
            fields["nbytes"] = _size_bytes(result)
            return result, order
        fields.setdefault("error", order.reason or "ended by another rank")
        return None, order

    def _record_attempt(
        self,
        progress: Progress,
        context: TaskContext,  # of the worker's tasks
        connections: Connections = ONE_RANK,  # connections to other ranks
        workers: Sequence[str] = (),  # addresses, by rank
        attempt: int = 1,
    ) -> AbstractContextManager[dict[str, Any]]:
        """Return a context that records the function with its worker: see `record_attempt`."""
        key, ranks, rank, start_s = (self.gang, self.rank), self.ranks, self.rank, time.time()
        dtype, shape = self.body.dtype, self.body.shape  # of the first output; None: unknown

        def record(is_running: bool = False, error: str = "", nbytes: int = 0) -> TaskRecord:
            # Any thread may call this. `error` is why the function, or the attempt, ended early.
            return TaskRecord(
                key=key,
                start_s=start_s,
                stop_s=time.time(),
                stages=tuple(
                    Stage(workers[peer_rank], LINK, received_bytes, waited_s)
                    for peer_rank, received_bytes, waited_s in sorted(connections.received)
                ),
                worker=context.address,
                shape=() if error else ranks.shape(rank),
                dtype="" if dtype is None else str(dtype),
                nbytes=nbytes,
                array_shape=shape,
                blocks=ranks.grid,
                step=progress.step,
                steps=progress.steps,
                first_step=progress.first,
                attempt=attempt,
                error=error[:REASON_CHARS],
                wanted_bytes=0 if is_running else None,
            )

        return record_attempt(context, key, record, BaseException)


def _order_when_whole(
    rank_attempt: RankAttempt, units: Units, thread: PoolThread, is_resident: bool
) -> Order:
    """Wait for the other ranks outside the thread pool; return the order that follows."""
    if rank_attempt.order_after("waiting", timeout_s=_SECEDE_S).state == "waiting":
        units.lend()
        thread.secede()  # any number of ranks may wait on a worker with one thread
    if rank_attempt.order_after("waiting").state == "running":
        # Two resident gangs run at the same time, and could wait for each other's units for ever.
        units.take(
            lambda: (
                not is_resident
                and rank_attempt.order_after("running", timeout_s=_LOOK_S).state == "running"
            )
        )
    return rank_attempt.order_after("waiting")


def _ucx(context: TaskContext, options: Options, kind: Kind) -> UcxTransport | None:
    """Return the UCX transport for large messages between hosts; None if tasks do not use UCX."""
    if "ucx" not in options.order(kind):
        return None
    transport: UcxTransport | None = context.transport("ucx")
    return None if transport is None or transport.holder_obstacle("") else transport


def _start_messenger(ucx: UcxTransport | None) -> Messenger | None:
    """Return the UCX messenger. It is None if UCX does not start here: sockets are used then."""
    with suppress(TransferError):
        return None if ucx is None else ucx.messenger()
    return None


def _size_bytes(blocks: Sequence[Sequence[Any]]) -> int:
    return sum(getattr(block, "nbytes", 0) for of_array in blocks for block in of_array)


def _leave_with_error(
    exc: Exception,  # of the function
    rank_attempt: RankAttempt,
    ctx: Any,
    fields: dict[str, Any],  # of the attempt's record
) -> Order | None:
    """Leave an attempt with an exception; return the order, or None if this rank raises it."""
    if ctx.device.has_ended:  # the cause may be memory that a lost rank has not written
        cause = f"another rank was lost; then the function raised {_describe(exc)}"
        fields["error"] = cause
        return rank_attempt.leave(cause)
    error, is_itself = pickled_error(exc, rank_attempt.rank)
    traceback.clear_frames(exc.__traceback__)  # their arrays are not used any more
    order = rank_attempt.leave(f"rank {rank_attempt.rank} raised {type(exc).__name__}", error)
    return None if is_itself and order.error == error else order


@contextmanager
def _raise_user_errors(rank: int) -> Iterator[None]:
    """Raise a `SectionError` for exceptions that Dask does not pass to the user."""
    try:
        yield
    except BaseException as exc:
        if (shown := as_user_error(exc, rank)) is exc:
            raise
        raise shown from exc


def as_user_error(exc: BaseException, rank: int) -> Exception:
    """Return an exception itself; a `SectionError` for one that Dask does not pass to the user."""
    if isinstance(exc, Exception) and not isinstance(exc, (StopIteration, Reschedule)):
        return exc
    # SystemExit would end the worker, StopIteration a coroutine of the client. Dask would
    # restart a task that raises Reschedule without end.
    named = _as_section_error(exc, rank)
    named.__cause__ = exc
    return named


def _raise_end(order: Order) -> NoReturn:
    """End a stopped attempt: all ranks raise the same error, or all are rescheduled."""
    if order.error is not None:
        raise loads(order.error)
    if order.reason:
        raise SectionError(order.reason)
    # Dask may not have noticed yet that a worker is lost: an immediate attempt would fail, too.
    if order.failures:
        time.sleep(pause_s(order.failures))
    raise Reschedule()


def pickled_error(exc: Exception, rank: int) -> tuple[bytes, bool]:
    """Return a pickled exception for the other ranks, and whether its type is preserved.

    Exceptions that cannot be pickled, or are too large, become a `SectionError`.
    """
    keep_user_frames(exc)
    pickling_support.install(exc)  # for exceptions with arguments of their own
    with suppress(Exception):
        copy = loads(dumps(exc))
        str(copy)  # Dask formats it later, so it must not fail
        text: bytes = dumps(copy)
        if type(copy) is type(exc) and len(text) <= _MOST_ERROR_BYTES:
            return text, True
    return dumps(_as_section_error(exc, rank)), False


def _as_section_error(exc: BaseException, rank: int) -> SectionError:
    keep_user_frames(exc)
    named = SectionError(f"the function raised {_describe(exc)} on rank {rank}")
    for note in getattr(exc, "__notes__", ()):
        named.add_note(str(note))
    named.add_note(f"Raised on rank {rank}:\n" + "".join(traceback.format_tb(exc.__traceback__)))
    return named


def _describe(exc: BaseException) -> str:
    text = ""
    with suppress(Exception):
        text = str(exc)[:_MOST_CHARS]
    return f"{type(exc).__name__}: {text}"


def name_of_gang(prefix: str, token: str) -> str:
    """Return the name of a gang, from the prefix of its arrays' names and its token."""
    return f"{prefix}-ranks-{token}"


def commit_of(gang: str) -> Key:
    """Return the key of the commit task, on which all output tasks depend."""
    return (gang, COMMIT)


def gang_tasks(
    gang: str,  # name of the gang
    ranks: RankGrid,
    bodies: Sequence[Any],  # by rank: see `run_rank`
    blocks: Iterable[Sequence[Any]],  # by rank: arguments of the body
    options: Options,  # sent with the tasks
) -> dict[Key, Task]:
    """Return the tasks of the ranks, and the commit task that depends on all of them."""
    tasks: dict[Key, Task] = {}
    for rank, (body, arguments) in enumerate(zip(bodies, blocks, strict=True)):
        key = (gang, rank)
        tasks[key] = RankTask(key, run_rank, gang, rank, ranks, body, options, *arguments)
    commit = commit_of(gang)
    return tasks | {commit: WaitTask(commit, _depend_on_all, Blocks(*tasks))}


def output_tasks(
    gang: str,
    number: int,  # of the array
    keys: Iterable[Iterable[Key]],  # of its blocks: by rank, in the order of the rank's blocks
) -> dict[Key, Task]:
    """Return the tasks of one array's blocks, by key."""
    commit = Blocks(commit_of(gang))
    return {
        key: WaitTask(key, _output, commit, TaskRef((gang, rank)), number, position)
        for rank, of_rank in enumerate(keys)
        for position, key in enumerate(of_rank)
    }


def _depend_on_all(ranks: list[Any]) -> None:
    """Do nothing: the outputs of all ranks count as soon as this is done."""


def _output(commit: list[Any], outputs: list[list[Any]], number: int, position: int) -> Any:
    return outputs[number][position]
