"""A rank of a resident gang: it runs its program at each call of the client, and keeps the results.

The client sends commands (`commands`) to all ranks in the same order. So ranks exchange data in
the same order, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from distributed import Worker, get_worker, secede
from distributed.protocol import Serialized, serialize
from distributed.protocol.pickle import dumps, loads
from distributed.sizeof import sizeof
from distributed.utils import sync

from dask_p2p.fusing.resident.commands import (
    ANSWER,
    CALL,
    DONE,
    DROP,
    END,
    FETCH,
    KEEP,
    PUBLISH,
    TOPIC,
    CommandQueue,
    CommandQueues,
)
from dask_p2p.fusing.resident.replayed_calls import HandleTable, ReplayedCalls
from dask_p2p.fusing.running.gang import ProgramContext, Runner, output_of
from dask_p2p.fusing.running.messages import FailedValue
from dask_p2p.fusing.running.program import ReadyProgram, ReadyStep
from dask_p2p.plugins.dask_internals import Units
from dask_p2p.plugins.worker import part_on
from dask_p2p.sections.exchange.device import HOST_ARRAYS, Host
from dask_p2p.sections.gang.rank import as_user_error
from dask_p2p.sections.gang.worker import Progress
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.types import DType, Kind

_DONE_EVERY = 16  # calls between two reports of rank 0
_BEGIN = "begin of a resident gang"


@dataclass(frozen=True)
class RunResident:
    """The work of a rank: the calls of its program."""

    gang: str  # its name
    program: bytes  # pickled, so that only the rank's worker opens it
    arguments: tuple[str, ...]  # names of the arrays that stand for the arguments in the program
    dtype: DType | None  # of the first result
    shape: tuple[float, ...] | None  # of the first result
    kind: Kind  # of the arrays
    idle_s: float  # time without a command until the rank lends its resources
    is_resident: ClassVar[bool] = True  # the gang shares its workers
    context: ClassVar[Any] = ProgramContext

    def __call__(self, ctx: ProgramContext, blocks: Sequence[Any] = ()) -> list[list[Any]]:
        program, worker = loads(self.program), get_worker()
        if ctx.connections.is_alone:
            secede()  # as ranks of a gang do: the rank mostly waits
        queues = sync(worker.loop, part_on, worker, CommandQueues)
        units = Units(worker, (self.gang, ctx.rank))
        with (
            ctx.device.running([block for block in blocks if ctx.device.holds(block)]),
            closing(units),
            queues.queue(lambda: ctx.connections.has_ended, units, self.idle_s) as queue,
        ):
            table = HandleTable(program, self.arguments, blocks, ctx.device)
            resume, state = ctx.checkpoints.read_state() if ctx.checkpoints else (0, None)
            if state is not None:
                table.restore(state)
            announce(self.gang, ctx, queue, worker, resume)
            ready = ReadyProgram(program, runs_again=True)
            calls = ReplayedCalls(ctx, ready, table, ResidentRunner(ctx, ready).call)
            ResidentRank(ctx, worker, queue, table, calls).serve()
        return [[] for _ in program.outputs]


def announce(
    gang: str, ctx: ProgramContext, queue: CommandQueue, worker: Worker, resume: int
) -> None:
    """Send the client the addresses of all ranks, once all of them receive commands.

    `resume` is the number of the checkpoint that they have begun with; 0 without one.
    """
    limit = getattr(worker.memory_manager, "memory_limit", None) or 0
    description = pickle.dumps((worker.contact_address, queue.token, limit))
    if ctx.rank:
        ctx.connections.exchange(_BEGIN, {0: description}, {})
        return
    _, size = ctx.connections.rank_and_size
    receives: dict[int, None] = dict.fromkeys(range(1, size))
    received: dict[int, Any] = {0: description, **ctx.connections.exchange(_BEGIN, {}, receives)}
    ranks = [pickle.loads(received[rank]) for rank in range(size)]
    worker.log_event(TOPIC, {"gang": gang, "ranks": ranks, "resume": resume})


class ResidentRunner(Runner):
    """Runs its program many times. A failed task gives a failed value, and the program goes on."""

    def __init__(self, ctx: ProgramContext, ready: ReadyProgram) -> None:
        super().__init__(ctx, ready)
        self._rank = ctx.rank
        self._progress = Progress()  # that of the rank counts calls
        self._number = 0
        self._messages.failed_value = self._failed_value

    def call(self, blocks: Sequence[Any], number: int) -> list[list[Any]]:
        self._number = number
        self._values = self._ready.values(self._assembling.is_lent)
        try:
            return self.run(blocks)
        finally:
            self._values.clear()

    def _run(self, step: ReadyStep) -> None:
        # A failed value of another rank has come under the key of the block.
        for value in (self._values.get(step.key), *[self._values[key] for key in step.reads]):
            if type(value) is FailedValue:
                self._use(step)
                break
        else:
            try:
                super()._run(step)
                return
            except BaseException as exc:  # also SystemExit, which would end the gang
                value = self._failed_value(as_user_error(exc, self._rank))
        self._assembling.drop(step.key)
        self._values[step.key] = value

    def _failed_value(self, exc: Exception) -> FailedValue:
        exc.add_note(f"In call {self._number} of a resident gang.")
        return FailedValue.from_exception(exc, self._rank)


@dataclass
class ResidentRank:
    """Does the commands of the client, one after the other."""

    _ctx: ProgramContext
    _worker: Worker
    _queue: CommandQueue
    _table: HandleTable
    _calls: ReplayedCalls

    def serve(self) -> None:
        while True:
            number, kind, *arguments = self._queue.get()
            if kind == CALL:
                self._call(number, *arguments)
            elif kind == DROP:
                self._table.drop(*arguments)
            elif kind == KEEP:
                if self._ctx.checkpoints is not None:
                    self._ctx.checkpoints.save(number, self._table.state())
                self._queue.send((ANSWER, number, None))
            elif kind == END:
                return
            else:
                self._queue.send((ANSWER, number, self._reply(kind, *arguments)))

    def _reply(self, kind: str, handle: int, *name: str) -> Any:
        """Return the answer to a request; a pickled exception if it fails, or if a block has."""
        try:
            blocks = self._table.handles[handle]
            if kind == PUBLISH:
                return self._publish(blocks, *name)
            failed = [block.error for block in blocks.values() if type(block) is FailedValue]
            if failed:
                return failed[0]
            if kind == FETCH:
                return [(index, _serialized(block)) for index, block in blocks.items()]
            return [(index, int(sizeof(block))) for index, block in blocks.items()]
        except AttemptEndedError:
            raise
        except Exception as exc:
            return FailedValue.from_exception(exc, self._ctx.rank).error

    def _call(self, number: int, arguments: Sequence[Any], first: int) -> None:
        call = first // self._table.results + 1
        self._table.add(first, self._calls.call(self._table.read(arguments), call))
        self._ctx.progress.step = call
        if self._ctx.rank == 0 and call % _DONE_EVERY == 0:
            self._queue.send((DONE, number))

    def _publish(self, blocks: Mapping[Any, Any], name: str) -> None:
        device = self._ctx.device
        data = {(name, *index): _copied(device, block) for index, block in blocks.items()}

        async def update() -> None:
            self._worker.update_data(data=data)

        sync(self._worker.loop, update)


def _serialized(block: Any) -> Any:
    return Serialized(*serialize(block)) if HOST_ARRAYS.holds(block) else dumps(block)


def _copied(device: Host, block: Any) -> Any:
    """Return a block in memory of its own: functions of later tasks may overwrite it."""
    output = output_of(device, block)
    return output.copy(order="K") if output is block and isinstance(block, np.ndarray) else output
