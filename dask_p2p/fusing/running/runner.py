"""A rank runs its program: exchanges and tasks, superstep by superstep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dask.utils import format_bytes

from dask_p2p.engine.task import current_worker
from dask_p2p.errors import MemoryLimitError
from dask_p2p.fusing.planning.program import Program, Superstep
from dask_p2p.fusing.running.assembling import Assembling, name_task
from dask_p2p.fusing.running.messages import Messages
from dask_p2p.fusing.running.ready_program import ReadyProgram, ReadyStep
from dask_p2p.fusing.running.values import LiveValues, memory_bytes, size_of
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.lending import HostLending, Lending
from dask_p2p.sections.exchange.regions import Reads
from dask_p2p.sections.gang.checkpoints import Checkpoints
from dask_p2p.sections.gang.progress import Progress
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.one_rank import ONE_RANK
from dask_p2p.types import Key, Kind

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
        self._used: ReadyStep | None = None  # the last step whose values are counted

    def run(self, blocks: Sequence[Any]) -> list[list[Any]]:
        """Return the output blocks of this rank by array, from the blocks of its inputs."""
        program, values = self._program, self._values
        values.add_inputs(zip(self._ready.inputs, blocks, strict=True))
        self._add_literals()
        self._record(blocks)
        self._progress.steps = len(program.supersteps)
        each = zip(program.supersteps, self._ready.steps, strict=True)
        for number, (superstep, steps) in enumerate(each):
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
            self._values[step.key] = value = self._value(step)
            if self._memory is not None:
                self._memory.record(value, self._values)
        except BaseException as exc:  # also SystemExit
            name_task(exc, step.key)
            raise
        if step.assembly is None:
            self._use(step)

    def _use(self, step: ReadyStep) -> None:
        """Count the uses of the values that a step has read."""
        self._used = step
        for key in step.reads:
            self._values.use(key)

    def _value(self, step: ReadyStep) -> Any:
        values, call = self._values, step.call
        if call is None:
            return self._assembled(step)
        if step.overwrites:
            assert isinstance(values, LiveValues), "the program has functions of users"
            return call({key: values.to_overwrite(key) for key in step.reads})
        return call(values)

    def _assembled(self, step: ReadyStep) -> Any:
        """Return an assembled block. Its sources are dropped before its function takes memory."""
        assembly = self._ready.assembly(step)
        made = self._assembling.finish(assembly, self._values)
        self._use(step)
        block = assembly.block
        return made if block.epilogue is None else block.epilogue(made[...], block.position)


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
    def of(cls, program: Program, most_bytes: float | None, kind: Kind) -> RankMemory | None:
        """Return the memory of a rank; None if nothing limits it."""
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
    host = HostLending(ctx.connections, reads)
    of_device = ctx.device.lending(ctx.connections)
    return (host,) if of_device is None else (host, of_device)
