"""The tasks of a gang whose ranks run programs."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import List, Task, TaskRef
from distributed.protocol.pickle import dumps

from dask_p2p.config import Options
from dask_p2p.engine.task import RankTask
from dask_p2p.fusing.planning.program import Program
from dask_p2p.fusing.planning.tasks import FusedTasks
from dask_p2p.fusing.running.ready_program import KeptPrograms, ReadyProgram
from dask_p2p.fusing.running.runner import ProgramContext, Runner
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import expression_array, is_expression
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.gang.rank import run_rank
from dask_p2p.sections.gang.tasks import commit_of, commit_task, output_task
from dask_p2p.types import Array, DaskArray, DType, Key, Kind

_PREFIX = "p2p-fused"  # of the names of gangs
_LEVEL = 1  # of compression: the fastest

_kept = KeptPrograms()  # of this process


@dataclass(frozen=True)
class _RunProgram:
    """The work of a rank: its program, packed, so that only the rank's worker opens it."""

    program: bytes
    dtype: DType | None  # of the first array; None: unknown
    kind: Kind  # of the arrays
    runs_again: bool  # whether workers keep the program for later gangs

    @staticmethod
    def context(*given: Any, **options: Any) -> ProgramContext:
        """Return the context of a rank: see `ProgramContext`."""
        return ProgramContext(*given, **options)

    def __call__(self, ctx: ProgramContext, blocks: Sequence[Any] = ()) -> list[list[Any]]:
        own = [block for block in blocks if ctx.device.holds(block)]
        with self._ready() as ready, ctx.device.running(own):
            made = Runner(ctx, ready).run(blocks)
            return [[output_of(ctx.device, value, blocks) for value in each] for each in made]

    def _ready(self) -> AbstractContextManager[ReadyProgram]:
        if self.runs_again:
            return _kept.running(self.program, unpacked)
        return nullcontext(ReadyProgram(unpacked(self.program)))


def output_of(device: Host, value: Any, blocks: Sequence[Any] = ()) -> Any:
    """Return a value as an output block, which outlives the rank; an input block as it is."""
    is_input = any(value is block for block in blocks)
    return value if is_input or not device.holds(value) else device.block(value, value.dtype)


class RankProgram(NamedTuple):
    """The packed program of a rank, and the keys of the blocks that it gets and returns."""

    body: Any
    inputs: tuple[Key, ...]
    outputs: tuple[tuple[Key, ...], ...]  # by array


@dataclass(frozen=True)
class FusedGang:
    """The tasks of a gang that computes some arrays."""

    token: str  # of the gang, and part of all names
    name: str
    tasks: dict[Key, Task]  # of the ranks, and the commit task
    ranks: Sequence[RankProgram]

    @property
    def commit(self) -> Key:
        """Key of the commit task."""
        (key,) = commit_of(self.name).items
        return cast(Key, key)

    def outputs(self, number: int, name: str | None = None) -> dict[Key, Task]:
        """Return the output tasks of one array, under its own keys or as the array `name`."""
        tasks = {}
        commit = commit_of(self.name)
        for rank, program in enumerate(self.ranks):
            for position, own in enumerate(program.outputs[number]):
                key = own if name is None else (name, *own[1:])
                tasks[key] = output_task(key, commit, (self.name, rank), number, position)
        return tasks


@dataclass(frozen=True)
class FusedLayer:
    """The tasks of one of the arrays of a gang, where arrays are expressions."""

    chunks: Chunks
    own_meta: Array  # an empty array like the blocks
    own_name: str
    shared: Mapping[Key, Any]  # tasks of the gang and of its inputs
    outputs: Mapping[Key, Any]  # output tasks of the array

    @property
    def token(self) -> str:
        """Token that identifies the array."""
        return self.own_name

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks."""
        return self.own_meta

    def name(self, token: str) -> str:
        """Return the name of the array, which identifies the gang."""
        return self.own_name

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Key, Any]:
        """Return all tasks."""
        return {**self.shared, **self.outputs}


def array_of_tasks(
    like: DaskArray, name: str, chunks: Chunks, meta: Array, tasks: Mapping[Key, Any]
) -> DaskArray:
    """Return the array of some tasks, by key, or futures. Its library is that of `like`."""
    if is_expression(like):
        made: DaskArray = expression_array(like, FusedLayer(chunks, meta, name, {}, tasks), [])
        return made
    graph = HighLevelGraph({name: MaterializedLayer(tasks)}, {name: set()})
    return new_da_object(graph, name, chunks, meta=meta, dtype=meta.dtype)


def packed(program: Program) -> bytes:
    """Return a program as bytes. Keys and plans repeat, so that they take a quarter compressed."""
    text: bytes = dumps(program)
    literals_bytes = sum(getattr(each, "nbytes", 0) for each in program.literals.values())
    # Arrays would take long, and hardly be smaller.
    return text if 2 * literals_bytes > len(text) else zlib.compress(text, _LEVEL)


def unpacked(text: bytes) -> Program:
    """Return the program that `packed` has made into bytes."""
    is_compressed = text[:1] != pickle.PROTO
    program: Program = pickle.loads(zlib.decompress(text) if is_compressed else text)
    return program


def rank_programs(
    programs: Sequence[Program], dtype: DType | None, kind: Kind, runs_again: bool = False
) -> list[RankProgram]:
    """Return the programs of ranks, packed. `dtype` is that of the first array, if it is known."""
    return [
        RankProgram(_RunProgram(packed(each), dtype, kind, runs_again), each.inputs, each.outputs)
        for each in programs
    ]


def fused_gang(
    tasks: FusedTasks,
    programs: Sequence[Program],  # by rank
    names: Sequence[Any],  # that distinguish gangs of the same tasks
    dtype: DType | None,  # of the first array; None: unknown
    kind: Kind,  # of the arrays
    options: Options,  # sent with the tasks
) -> FusedGang:
    """Return the gang that runs some programs."""
    # Clients with the same arrays may have found their tasks in another order.
    token = tokenize(_PREFIX, list(names), len(programs), options, str(list(tasks.nodes)))
    return gang_of(token, rank_programs(programs, dtype, kind), options)


def gang_of(
    token: str,
    programs: Sequence[RankProgram],  # by rank
    options: Options,
    renamed: Callable[[Key], Key] = lambda key: key,  # returns the keys of inputs
) -> FusedGang:
    """Return the gang with a token that runs packed programs."""
    gang, ranks = name_of_gang(token), RankGrid(((1,) * len(programs),), (len(programs),))
    made: dict[Key, Task] = {}
    for rank, program in enumerate(programs):
        blocks = List(*(TaskRef(renamed(each)) for each in program.inputs))
        key = (gang, rank)
        made[key] = RankTask(key, run_rank, gang, rank, ranks, program.body, options, blocks)
    commit = commit_task(gang, made)
    return FusedGang(token, gang, {**made, commit.key: commit}, programs)


def name_of_gang(token: str) -> str:
    """Return the name of the gang with a token."""
    return f"{_PREFIX}-ranks-{token}"


def name_of_output(gang: FusedGang, number: int) -> str:
    """Return the name of one of the arrays that a gang computes."""
    return f"{output_prefix(number)}-{gang.token}"


def output_prefix(number: int) -> str:
    """Return the beginning of the names of arrays that gangs compute, by their number."""
    return f"{_PREFIX}-{number}"
