"""The tasks of a gang whose ranks run programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, TaskRef
from dask.utils import format_bytes
from distributed import get_worker
from distributed.protocol.pickle import dumps, loads
from distributed.utils import sync

from dask_p2p.config import Options
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import InputError, MemoryLimitError
from dask_p2p.fusing.planning.sizes import CallValue, Declared, Program, Superstep
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.fusing.running.assembling import Assembling, name_task
from dask_p2p.fusing.running.messages import Messages
from dask_p2p.fusing.running.program import (
    KeptPrograms,
    LiveValues,
    ReadyProgram,
    ReadyStep,
    memory_bytes,
    size_of,
)
from dask_p2p.geometry import Chunks
from dask_p2p.graph import array_of_layer, is_expression, layered_array
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plugins.gangs.scheduler import GIVE_BACK
from dask_p2p.sections.exchange.device import HOST, Host, Lending
from dask_p2p.sections.exchange.regions import Reads
from dask_p2p.sections.gang.checkpoints import Checkpoints
from dask_p2p.sections.gang.rank import gang_tasks
from dask_p2p.sections.gang.worker import Progress
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, DaskArray, DType, Key, Kind

#: Bytes of new values between two looks at all values: parts of the worker's limit, and of the most
#: bytes that a rank may take.
_LOOK, _LOOK_OF_MOST, _LEAST_LOOK_BYTES = 1 / 64, 1 / 8, 2**20
#: Values may take this factor of the declared bytes: sizes of reductions are guesses.
_SLACK = 1.5
#: Dask pauses a worker at this part of its limit. A nanny ends the worker at 95 %.
_FULL = 0.8


class ProgramContext:
    """The context of a rank that runs a program: its connections, and its supersteps so far."""

    def __init__(
        self,
        ranks: Any,  # grid of all ranks
        rank: int = 0,
        connections: Connections = ONE_RANK,  # to the other ranks
        checkpoints: Checkpoints | None = None,  # of the handles of a resident gang
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,
    ) -> None:
        self.rank, self.connections, self.device = rank, connections, device
        self.checkpoints = checkpoints
        self.reads_memory = reads_memory and not connections.is_alone
        self.progress = Progress()


class Runner:
    """The values of one rank, and the execution of its program.

    Making it is a collective call of all ranks, unless they have opened the memories.
    """

    def __init__(
        self,
        ctx: ProgramContext,
        ready: ReadyProgram,
        memories: Sequence[Lending] = (),  # see `Assembling`
        memory: RankMemory | None = None,
    ) -> None:
        self._progress, self._ready, self._program = ctx.progress, ready, ready.program
        self._device, self._memory = ctx.device, memory
        self._assembling = Assembling(memories or _memories(ctx, self._program))
        self._values = ready.values(self._assembling.is_lent)
        self._messages = Messages(ctx.connections, self._assembling)
        self._exchanging = exchanging(self._program)
        self._enqueued = 0  # supersteps so far

    def run(self, blocks: Sequence[Any]) -> list[list[Any]]:
        program, values = self._program, self._values
        values.add_inputs(zip(self._ready.inputs, blocks, strict=True))
        self._add_literals()
        self._record(blocks)
        self._progress.steps = len(program.supersteps)
        supersteps = zip(program.supersteps, self._ready.steps, strict=True)
        for number, (superstep, steps) in enumerate(supersteps):
            if number in self._exchanging:
                self._exchange(number, superstep)
            for step in steps:
                self._run(step)
            self._progress.step = number + 1
            self._enqueued += 1
            self._device.keep_up(self._enqueued)
        return [[values[key] for key in keys] for keys in program.outputs]

    def _add_literals(self) -> None:
        literals = self._ready.literals
        if self._ready.runs_again:
            self._values.add_inputs(literals.items())
            return
        for key, value in literals.items():
            self._values[key] = value
        literals.clear()  # freed after the last use, as all values
        self._program.literals.clear()

    def _exchange(self, number: int, superstep: Superstep) -> None:
        self._messages.exchange(number, superstep, self._values)
        if self._memory is not None:
            received = (item.key for items in superstep.receives.values() for item in items)
            self._record([self._values[key] for key in received if key in self._values])
        for items in superstep.sends.values():
            for item in items:
                self._values.use(item.key)

    def _record(self, values: Iterable[Any]) -> None:
        if self._memory is not None:
            for value in values:
                self._memory.record(value, self._values)

    def _run(self, step: ReadyStep) -> None:
        try:
            self._values[step.key] = value = self._call(step)
            if self._memory is not None:
                self._memory.record(value, self._values)
        except BaseException as exc:  # also SystemExit
            name_task(exc, step.key)
            raise

    def _use(self, step: ReadyStep) -> None:
        for key in step.reads:
            self._values.use(key)

    def _call(self, step: ReadyStep) -> Any:
        """Return the value of a step, and count the uses of those that it reads, once."""
        values, call = self._values, step.call
        if call is None:
            return self._assemble(step)
        try:
            if not step.overwrites:
                return call(values)
            assert isinstance(values, LiveValues), "the program has functions of users"
            return call({key: values.to_overwrite(key) for key in step.reads})
        finally:
            self._use(step)

    def _assemble(self, step: ReadyStep) -> Any:
        """Return an assembled block. Its sources are dropped before its function takes memory."""
        try:
            assembly = self._ready.assembly(step)
            assembled = self._assembling.finish(assembly, self._values)
        finally:
            self._use(step)
        block = assembly.block
        if block.epilogue is None:
            return assembled
        return block.epilogue(assembled[...], block.position)


class RankMemory:
    """Compares the sizes of a rank's values with those that are declared, and with the limit.

    Functions may return larger blocks than their array declares. Dask spills such blocks, ranks
    cannot.
    """

    def __init__(
        self,
        declared_bytes: int,  # most bytes of all values, as far as they are declared
        most_bytes: float | None,  # of all values, which Dask computes otherwise
        kind: Kind,  # of the arrays that count
        worker: Any,
    ) -> None:
        self._declared_bytes, self._most_bytes = declared_bytes, most_bytes
        self._kind, self._worker = kind, worker
        self._limit_bytes: int = worker.memory_manager.memory_limit or 0
        look_bytes = self._limit_bytes * _LOOK if most_bytes is None else most_bytes * _LOOK_OF_MOST
        self._look_bytes = max(_LEAST_LOOK_BYTES, look_bytes)
        self._new_bytes = 0.0  # since the last look

    @classmethod
    def for_program(
        cls, program: Program, most_bytes: float | None, kind: Kind
    ) -> RankMemory | None:
        worker, _ = current_worker()
        # Only a nanny ends a worker whose memory is full.
        if worker is None or (most_bytes is None and (worker.nanny is None or kind != "numpy")):
            return None
        if not worker.memory_manager.memory_limit:
            return None
        return cls(program.declared_bytes, most_bytes, kind, worker)

    def record(self, value: Any, values: Mapping[Key, Any]) -> None:
        """Record a new value among all values of the rank.

        Raises `MemoryLimitError` if they take too much.
        """
        self._new_bytes += size_of(value)
        if self._new_bytes >= self._look_bytes:
            self._new_bytes = 0.0
            self._check(values)

    def _check(self, values: Mapping[Key, Any]) -> None:
        size_bytes = sum(memory_bytes(values.values(), self._kind).values())
        if self._most_bytes is not None:
            if size_bytes > _SLACK * self._most_bytes:
                self._refuse(size_bytes, "")
        elif size_bytes > _SLACK * self._declared_bytes:
            process_bytes = self._worker.monitor.get_process_memory()
            if process_bytes > _FULL * self._limit_bytes:
                self._refuse(size_bytes, f", while its process uses {format_bytes(process_bytes)}")

    def _refuse(self, size_bytes: int, process: str) -> None:
        raise MemoryLimitError(
            f"expected values of at most {format_bytes(self._declared_bytes)} in a rank of a fused "
            f"graph, as its arrays declare, got {format_bytes(size_bytes)}{process}. The worker's "
            f"limit is {format_bytes(self._limit_bytes)}. Declare the sizes of blocks, "
            f"map_blocks(chunks=...), or compute by Dask's tasks, which spill.",
            size_bytes,
        )


def exchanging(program: Program) -> frozenset[int]:
    """Return the numbers of the supersteps with an exchange."""
    return frozenset(n for n, s in enumerate(program.supersteps) if s.sends or s.receives)


def _memories(ctx: ProgramContext, program: Program) -> Sequence[Lending]:
    """Return the memories of a rank's values. A collective call of all ranks."""
    reads = None
    if program.reads_memory and not ctx.connections.is_alone:
        reads = Reads(ctx.connections, ctx.reads_memory)
        reads.try_all()
    host = Lending(ctx.connections, reads)
    of_device = ctx.device.lending(ctx.connections)
    return (host,) if of_device is None else (host, of_device)


PREFIX = "p2p-fused"  # of the names of gangs and their arrays

_program_cache = KeptPrograms()  # of this process


@dataclass(frozen=True)
class _RunProgram:
    """The work of a rank: its program, pickled, so that only the rank's worker opens it."""

    program: bytes
    dtype: DType | None  # of the first array; None: unknown
    shape: tuple[float, ...] | None  # of the first array; None: unknown
    kind: Kind  # of the arrays
    runs_again: bool  # whether workers keep the program for later gangs
    most_bytes: float | None = None  # of its values; None: as they fit
    values: Mapping[int, Any] = field(default_factory=dict)  # of a call, by number of the argument
    context: ClassVar[Any] = ProgramContext

    def __call__(self, ctx: ProgramContext, blocks: Sequence[Any] = ()) -> list[list[Any]]:
        device_blocks = [block for block in blocks if ctx.device.holds(block)]
        with self._ready() as ready, ctx.device.running(device_blocks):
            values = [
                on_device(ctx.device, call_value, self.values[call_value.number])
                for call_value in ready.program.call_values.values()
            ]
            try:
                memory = RankMemory.for_program(ready.program, self.most_bytes, self.kind)
                outputs = Runner(ctx, ready, memory=memory).run([*blocks, *values])
            except (InputError, MemoryError):  # blocks unlike their declaration, or too many
                if self.most_bytes is not None:
                    _give_back()
                raise
            return [[output_of(ctx.device, x, blocks) for x in array] for array in outputs]

    def _ready(self) -> AbstractContextManager[ReadyProgram]:
        if self.runs_again:
            return _program_cache.running(self.program)
        return nullcontext(ReadyProgram(loads(self.program)))


def _give_back() -> None:
    worker: Any = get_worker()
    gang = worker.get_current_task()[0]

    async def ask() -> None:
        await getattr(worker.scheduler, GIVE_BACK)(gang=gang)  # Dask's tasks run in its place

    sync(worker.loop, ask)


def on_device(device: Host, of_call: CallValue, value: Any) -> Any:
    """Return a value of a call as the array that functions get."""
    return device.module.asarray(value) if of_call.kind == device.kind else value


def output_of(device: Host, value: Any, blocks: Sequence[Any] = ()) -> Any:
    """Return a value as an output block, which outlives the rank; an input block as it is."""
    is_input = any(value is block for block in blocks)
    return value if is_input or not device.holds(value) else device.block(value, value.dtype)


class RankProgram(NamedTuple):
    """The pickled program of a rank, and the keys of the blocks that it gets and returns."""

    body: Any
    inputs: tuple[Key, ...]
    outputs: tuple[tuple[Key, ...], ...]  # by array


@dataclass(frozen=True)
class FusedGang:
    """The work of a gang whose ranks run programs: see `GangWork`."""

    own_token: str
    ranks: Sequence[RankProgram]
    options: Options  # sent with the tasks
    arrays: Sequence[Declared]  # that it computes, as far as known
    arguments: tuple[str, ...] = ()  # names of arrays that stand for those of a call
    dask_tasks: Mapping[Key, Any] = field(default_factory=dict)  # tasks that stay with Dask
    prefix: ClassVar[str] = PREFIX

    def with_values(self, values: Mapping[int, Any]) -> FusedGang:
        if not values:
            return self
        token = tokenize(self.own_token, sorted(values.items()))
        bodies = (replace(rank.body, values=values) for rank in self.ranks)
        ranks = [rank._replace(body=body) for rank, body in zip(self.ranks, bodies, strict=True)]
        return replace(self, own_token=token, ranks=ranks)

    def tasks(self, gang: str, names: Sequence[str]) -> dict[Key, Any]:
        new_names = dict(zip(self.arguments, names, strict=True))

        def renamed(key: Any) -> Key:
            return (new_names[key[0]], *key[1:]) if name_of(key) in new_names else key

        ranks, bodies = RankGrid.in_line(len(self.ranks)), [rank.body for rank in self.ranks]
        blocks = ([List(*(TaskRef(renamed(key)) for key in rank.inputs))] for rank in self.ranks)
        return {**self.dask_tasks, **gang_tasks(gang, ranks, bodies, blocks, self.options)}

    def chunks(self, number: int) -> Chunks:
        return self.arrays[number].chunks

    def meta(self, number: int) -> Array:
        meta: Array = self.arrays[number].meta
        return meta

    def keys(self, name: str, number: int) -> list[list[Key]]:
        return [[(name, *key[1:]) for key in rank.outputs[number]] for rank in self.ranks]


@dataclass(frozen=True)
class _TasksLayer:
    """Tasks, or futures, of the blocks of an array, where arrays are expressions."""

    chunks: Chunks
    own_meta: Array  # an empty array like the blocks
    token: str  # name of the array
    own_tasks: Mapping[Key, Any]

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    def meta(self, first: Any) -> Array:
        return self.own_meta

    def name(self, token: str) -> str:
        return self.token

    def tasks(self, name: str, inputs: Sequence[Any]) -> Mapping[Key, Any]:
        return self.own_tasks


def array_of_tasks(
    like: DaskArray, name: str, chunks: Chunks, meta: Array, tasks: Mapping[Key, Any]
) -> DaskArray:
    """Return the array of some tasks, by key, or futures. Its library is that of `like`."""
    if is_expression(like):
        array: DaskArray = array_of_layer(like, _TasksLayer(chunks, meta, name, tasks), [])
    else:
        array = layered_array(name, tasks, chunks, meta, HighLevelGraph({}, {}))
    return array


def fused_gang(
    tasks: FusedTasks,
    programs: Sequence[Program],  # by rank
    kind: Kind,  # of the arrays
    options: Options,  # sent with the tasks
    names: Sequence[Any],  # parts of the token: gangs of the same tasks differ by them
    arrays: Sequence[Declared],  # that it computes, as far as known
    dask_tasks: Mapping[Key, Any] = MappingProxyType({}),  # tasks that stay with Dask
    most_bytes: float | None = None,  # of a rank's values, before Dask's tasks take over
    arguments: Sequence[str] | None = None,  # see `FusedGang`; None: the gang runs once
) -> FusedGang:
    """Return the gang that runs some programs."""
    # Clients with the same arrays may have found their tasks in another order.
    keys = str([list(tasks.nodes), [program.inputs for program in programs]])
    token = tokenize(PREFIX, list(names), len(programs), options, keys, most_bytes)
    dtype = arrays[0].dtype if arrays else None
    shape = tuple(map(sum, arrays[0].chunks)) if arrays else None
    runs_again = arguments is not None
    ranks = []
    for program in programs:
        body = _RunProgram(dumps(program), dtype, shape, kind, runs_again, most_bytes)
        ranks.append(RankProgram(body, program.inputs, program.outputs))
    return FusedGang(token, ranks, options, arrays, tuple(arguments or ()), dict(dask_tasks))
