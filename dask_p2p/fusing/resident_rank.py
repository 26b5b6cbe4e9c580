"""A rank of a resident gang: it runs its program at each call of the client, and keeps the results.

The client sends commands (`command_log`) to all ranks in the same order. So ranks exchange data in
the same order, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from distributed import Worker, get_worker, secede
from distributed.protocol import Serialized, serialize
from distributed.sizeof import sizeof
from distributed.utils import sync

from dask_p2p.fusing.command_log import ANSWER, CALL, DONE, DROP, END, FETCH, PUBLISH, SIZES
from dask_p2p.fusing.command_queues import TOPIC, CommandQueue, queues_on
from dask_p2p.fusing.gang import unpacked
from dask_p2p.fusing.program import Program
from dask_p2p.fusing.runner import ProgramContext, Runner
from dask_p2p.sections.gang.progress import Progress
from dask_p2p.types import DType, Kind

_DONE_EVERY = 16  # calls between two reports of rank 0
_BEGIN = "begin of a resident gang"


class ResidentContext(ProgramContext):
    """The context of a rank of a resident gang."""


@dataclass(frozen=True)
class RunResident:
    """The work of a rank: the calls of its program."""

    gang: str  # its name
    program: bytes  # packed, so that only the rank's worker opens it
    arguments: tuple[str, ...]  # names of the arrays that stand for the arguments in the program
    dtype: DType | None  # of the first result
    kind: ClassVar[Kind] = "numpy"
    is_resident: ClassVar[bool] = True  # the gang shares its workers

    @staticmethod
    def context(*given: Any, **options: Any) -> ResidentContext:
        """Return the context of a rank: see `ProgramContext`."""
        return ResidentContext(*given, **options)

    def __call__(self, ctx: ResidentContext, blocks: Sequence[Any] = ()) -> list[list[Any]]:
        program, worker = unpacked(self.program), get_worker()
        secede()  # the rank mostly waits, and other tasks run on its worker
        queues = sync(worker.loop, queues_on, worker)
        with (
            ctx.device.running(blocks),
            queues.queue(lambda: ctx.connections.has_ended) as queue,
        ):
            announce(self.gang, ctx, queue, worker)
            table = HandleTable(program, self.arguments, blocks)
            ResidentRank(ctx, worker, queue, table, ResidentRunner(ctx, program)).serve()
        return [[] for _ in program.outputs]


def announce(gang: str, ctx: ResidentContext, queue: CommandQueue, worker: Worker) -> None:
    """Send the client the addresses of all ranks, once all of them receive commands."""
    limit = getattr(worker.memory_manager, "memory_limit", None) or 0
    own = pickle.dumps((worker.contact_address, queue.token, limit))
    if ctx.rank:
        ctx.connections.exchange(_BEGIN, {0: own}, {})
        return
    _, size = ctx.connections.rank_and_size
    receives: dict[int, None] = dict.fromkeys(range(1, size))
    found: dict[int, Any] = {0: own, **ctx.connections.exchange(_BEGIN, {}, receives)}
    ranks = [pickle.loads(found[rank]) for rank in range(size)]
    worker.log_event(TOPIC, {"gang": gang, "ranks": ranks, "resume": 0})


class HandleTable:
    """The values of a rank's handles, by the index of the block in its array."""

    def __init__(self, program: Program, arguments: Sequence[str], blocks: Sequence[Any]) -> None:
        self._inputs: list[tuple[int, Any] | None] = []  # argument and index; None: a constant
        self._blocks = list(blocks)  # of the inputs
        self._outputs = [[key[1:] for key in keys] for keys in program.outputs]
        #: Blocks by handle. Argument n has the number -1 - n.
        self.handles: dict[int, dict[Any, Any]] = {}
        numbers = {name: number for number, name in enumerate(arguments)}
        for key, block in zip(program.inputs, blocks, strict=True):
            number = numbers.get(key[0]) if isinstance(key, tuple) else None
            self._inputs.append(None if number is None else (number, key[1:]))
            if number is not None:
                self.handles.setdefault(-1 - number, {})[key[1:]] = block

    @property
    def results(self) -> int:
        """Number of results of a call."""
        return len(self._outputs)

    def read(self, handles: Sequence[int]) -> list[Any]:
        """Return the inputs of the program for a call."""
        return [
            block if which is None else self.handles[handles[which[0]]][which[1]]
            for which, block in zip(self._inputs, self._blocks, strict=True)
        ]

    def add(self, first: int, made: Sequence[Sequence[Any]]) -> None:
        """Add the results of a call under successive numbers."""
        for number, (indices, blocks) in enumerate(zip(self._outputs, made, strict=True), first):
            self.handles[number] = dict(zip(indices, blocks, strict=True))

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop handles."""
        for number in numbers:
            self.handles.pop(number, None)


class ResidentRunner(Runner):
    """Runs its program many times."""

    def __init__(self, ctx: ResidentContext, program: Program) -> None:
        super().__init__(ctx, program)
        self._progress = Progress()  # that of the rank counts calls
        self._whole = program

    def call(self, blocks: Sequence[Any]) -> list[list[Any]]:
        """Return the output blocks by array, from the blocks of the inputs."""
        self._program = replace(self._whole, literals=dict(self._whole.literals))
        self._uses = dict(self._whole.uses)
        try:
            return self.run(blocks)
        finally:
            self._values.clear()


class ResidentRank:
    """Does the commands of the client, one after the other."""

    def __init__(
        self,
        ctx: ResidentContext,
        worker: Worker,
        queue: CommandQueue,
        table: HandleTable,
        runner: ResidentRunner,
    ) -> None:
        self._ctx, self._worker, self._queue = ctx, worker, queue
        self._table, self._runner = table, runner
        self._requests: Mapping[str, Callable[..., Any]] = {
            FETCH: self._fetch,
            SIZES: self._sizes,
            PUBLISH: self._publish,
        }

    def serve(self) -> None:
        """Do commands until the last one."""
        while True:
            number, kind, *arguments = self._queue.get()
            if kind == CALL:
                self._call(number, *arguments)
            elif kind == DROP:
                self._table.drop(*arguments)
            elif kind == END:
                return
            else:
                self._queue.send((ANSWER, number, self._requests[kind](*arguments)))

    def _call(self, number: int, handles: Sequence[int], first: int) -> None:
        self._table.add(first, self._runner.call(self._table.read(handles)))
        call = first // self._table.results + 1
        self._ctx.progress.step = call
        if self._ctx.rank == 0 and call % _DONE_EVERY == 0:
            self._queue.send((DONE, number))

    def _fetch(self, handle: int) -> Any:
        blocks = self._table.handles[handle].items()
        return [(index, Serialized(*serialize(block))) for index, block in blocks]

    def _sizes(self, handle: int) -> Any:
        blocks = self._table.handles[handle].items()
        return [(index, sizeof(block)) for index, block in blocks]

    def _publish(self, handle: int, name: str) -> None:
        data = {(name, *index): block for index, block in self._table.handles[handle].items()}
        sync(self._worker.loop, self._update, data)

    async def _update(self, data: Mapping[Any, Any]) -> None:
        self._worker.update_data(data=data)
