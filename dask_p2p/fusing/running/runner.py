"""A rank runs its program: exchanges and tasks, superstep by superstep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_p2p.fusing.planning.program import AssembleStep, Program, Superstep
from dask_p2p.fusing.running.assembling import Assembling, in_task
from dask_p2p.fusing.running.functions import Functions
from dask_p2p.fusing.running.messages import Messages
from dask_p2p.fusing.running.values import LiveValues
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.lending import HostLending, Lending
from dask_p2p.sections.exchange.regions import Reads
from dask_p2p.sections.gang.progress import Progress
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.one_rank import ONE_RANK


class ProgramContext:
    """The context of a rank that runs a program: its connections, and its supersteps so far."""

    def __init__(
        self,
        ranks: Any,  # grid of all ranks
        rank: int = 0,
        connections: Connections = ONE_RANK,  # to the other ranks
        checkpoints: Any = None,  # unused, since a program has no state
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,
    ) -> None:
        self.rank, self.connections, self.device = rank, connections, device
        self.reads_memory = reads_memory and not connections.is_alone
        self.progress = Progress()


class Runner:
    """The values of one rank, and the execution of its program.

    Making it is a collective call of all ranks, unless they have opened the memories.
    """

    def __init__(
        self,
        ctx: ProgramContext,
        program: Program,
        memories: Sequence[Lending] = (),  # see `Assembling`
    ) -> None:
        self._progress, self._program = ctx.progress, program
        self._functions, self._device = Functions(), ctx.device
        self._assembling = Assembling(memories or _memories(ctx, program))
        self._values = LiveValues(program.uses, self._assembling.is_lent)
        self._messages = Messages(ctx.connections, self._assembling)
        self._exchanging = exchanging(program)
        self._enqueued = 0  # supersteps so far

    def run(self, blocks: Sequence[Any]) -> list[list[Any]]:
        """Return the output blocks of this rank by array, from the blocks of its inputs."""
        program, values = self._program, self._values
        values.add_inputs(zip(program.inputs, blocks, strict=True))
        self._add_literals()
        self._progress.steps = len(program.supersteps)
        for number, superstep in enumerate(program.supersteps):
            if number in self._exchanging:
                self._exchange(number, superstep)
            for step in superstep.steps:
                self._run(step)
            self._progress.step = number + 1
            self._enqueued += 1
            self._device.keep_up(self._enqueued)
        return [[values[key] for key in keys] for keys in program.outputs]

    def _add_literals(self) -> None:
        literals = self._program.literals
        for key, value in literals.items():
            self._values[key] = value
        literals.clear()  # freed after the last use, as all values

    def _exchange(self, number: int, superstep: Superstep) -> None:
        self._messages.exchange(number, superstep, self._values)
        for items in superstep.sends.values():
            for item in items:
                self._values.use(item.key)

    def _run(self, step: Any) -> None:
        if isinstance(step, AssembleStep):
            self._assemble(step)
            return
        values, read = self._values, step.dependencies
        if self._functions.is_of_user(step):
            step = self._functions.fresh(step)
            arguments = {key: values.to_overwrite(key) for key in read}
        else:
            arguments = {key: values[key] for key in read}
        with in_task(step.key):
            values[step.key] = step(arguments)
        for key in read:
            values.use(key)

    def _assemble(self, step: AssembleStep) -> None:
        key, epilogue = step.block.key, step.block.epilogue
        if epilogue is not None and self._functions.is_of_user(epilogue):
            own = self._functions.fresh(epilogue)
            if own is not epilogue:
                step = step._replace(block=step.block._replace(epilogue=own))
        with in_task(key):
            self._values[key] = self._assembling.finish(step, self._values)
        for _, each in step.local:
            self._values.use(each)


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
