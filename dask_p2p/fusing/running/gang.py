"""The tasks of a gang whose ranks run programs."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, TaskRef
from distributed.protocol.pickle import dumps

from dask_p2p.config import Options
from dask_p2p.fusing.planning.declared import Declared, DeclaredBlocks
from dask_p2p.fusing.planning.program import CallValue, Program
from dask_p2p.fusing.planning.tasks import FusedTasks, name_of
from dask_p2p.fusing.running.ready_program import KeptPrograms, ReadyProgram
from dask_p2p.fusing.running.runner import ProgramContext, RankMemory, Runner
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import expression_array, is_expression, layered_array
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plugins.gangs.scheduler import GIVE_BACK
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.gang.tasks import gang_tasks
from dask_p2p.types import Array, DaskArray, DType, Key, Kind

PREFIX = "p2p-fused"  # of the names of gangs and their arrays
_LEVEL = 1  # of compression: the fastest

_kept = KeptPrograms()  # of this process


@dataclass(frozen=True)
class _RunProgram:
    """The work of a rank: its program, packed, so that only the rank's worker opens it."""

    program: bytes
    dtype: DType | None  # of the first array; None: unknown
    shape: tuple[float, ...] | None  # of the first array; None: unknown
    kind: Kind  # of the arrays
    runs_again: bool  # whether workers keep the program for later gangs
    most_bytes: float | None = None  # of its values; None: as they fit
    values: Mapping[int, Any] = field(default_factory=dict)  # of a call, by number of the argument
    context: ClassVar[Any] = ProgramContext

    def __call__(self, ctx: ProgramContext, blocks: Sequence[Any] = ()) -> list[list[Any]]:
        own = [block for block in blocks if ctx.device.holds(block)]
        with self._ready() as ready, ctx.device.running(own):
            values = [
                on_device(ctx.device, each, self.values[each.number])
                for each in ready.program.call_values.values()
            ]
            try:
                memory = RankMemory.of(ready.program, self.most_bytes, self.kind)
                made = Runner(ctx, ready, memory=memory).run([*blocks, *values])
            except MemoryError:
                if self.most_bytes is not None:
                    _give_back()
                raise
            return [[output_of(ctx.device, value, blocks) for value in each] for each in made]

    def _ready(self) -> AbstractContextManager[ReadyProgram]:
        if self.runs_again:
            return _kept.running(self.program, unpacked)
        return nullcontext(ReadyProgram(unpacked(self.program)))


def _give_back() -> None:
    """Ask the scheduler to run Dask's tasks in place of the gang, whose attempt then ends."""
    from distributed import get_worker
    from distributed.utils import sync

    worker: Any = get_worker()
    gang = worker.get_current_task()[0]

    async def ask() -> None:
        await getattr(worker.scheduler, GIVE_BACK)(gang=gang)

    sync(worker.loop, ask)


def on_device(device: Host, of_call: CallValue, value: Any) -> Any:
    """Return a value of a call as the array that functions get."""
    return device.module.asarray(value) if of_call.kind == device.kind else value


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
    """The work of a gang whose ranks run programs: see `GangWork`."""

    own_token: str
    ranks: Sequence[RankProgram]
    options: Options  # sent with the tasks
    arrays: Sequence[Declared] = ()  # that it computes; empty: blocks under their own keys
    arguments: tuple[str, ...] = ()  # names of arrays that stand for those of a call
    kept: Mapping[Key, Any] = field(default_factory=dict)  # tasks that stay with Dask
    prefix: ClassVar[str] = PREFIX

    def with_values(self, values: Mapping[int, Any]) -> FusedGang:
        """Return the gang of a call with values, by number of the argument."""
        if not values:
            return self
        token = tokenize(self.own_token, sorted(values.items()))
        bodies = (replace(each.body, values=values) for each in self.ranks)
        ranks = [each._replace(body=body) for each, body in zip(self.ranks, bodies, strict=True)]
        return replace(self, own_token=token, ranks=ranks)

    def tasks(self, gang: str, names: Sequence[str]) -> dict[Key, Any]:
        """Return the tasks of its ranks and of the commit, and those that stay with Dask."""
        of = dict(zip(self.arguments, names, strict=True))

        def renamed(key: Any) -> Key:
            return (of[key[0]], *key[1:]) if name_of(key) in of else key

        ranks, bodies = RankGrid.in_line(len(self.ranks)), [each.body for each in self.ranks]
        blocks = ([List(*(TaskRef(renamed(key)) for key in each.inputs))] for each in self.ranks)
        return {**self.kept, **gang_tasks(gang, ranks, bodies, blocks, self.options)}

    def chunks(self, number: int) -> Chunks:
        """Return the chunks of one of the arrays."""
        return self.arrays[number].chunks

    def meta(self, number: int) -> Array:
        """Return an empty array like the blocks of one of the arrays."""
        made: Array = self.arrays[number].meta
        return made

    def keys(self, name: str, number: int) -> list[list[Key]]:
        """Return the keys of one of the arrays, which has this name, by rank."""
        return [[(name, *own[1:]) for own in each.outputs[number]] for each in self.ranks]


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
        """Return an empty array like the blocks."""
        return self.own_meta

    def name(self, token: str) -> str:
        """Return the name of the array, which identifies the tasks."""
        return self.token

    def tasks(self, name: str, inputs: Sequence[Any]) -> Mapping[Key, Any]:
        """Return all tasks."""
        return self.own_tasks


def array_of_tasks(
    like: DaskArray, name: str, chunks: Chunks, meta: Array, tasks: Mapping[Key, Any]
) -> DaskArray:
    """Return the array of some tasks, by key, or futures. Its library is that of `like`."""
    if is_expression(like):
        made: DaskArray = expression_array(like, _TasksLayer(chunks, meta, name, tasks), [])
    else:
        made = layered_array(name, tasks, chunks, meta, HighLevelGraph({}, {}))
    return made


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
    programs: Sequence[Program],
    first: DeclaredBlocks | None,  # blocks of the first array; None: unknown
    kind: Kind,  # of the arrays
    runs_again: bool = False,
    most_bytes: float | None = None,
) -> list[RankProgram]:
    """Return the programs of ranks, packed."""
    dtype = None if first is None else first.dtype
    shape = None if first is None else tuple(map(sum, first.chunks))
    how = dtype, shape, kind, runs_again, most_bytes
    return [
        RankProgram(_RunProgram(packed(program), *how), program.inputs, program.outputs)
        for program in programs
    ]


def fused_gang(
    tasks: FusedTasks,
    programs: Sequence[Program],  # by rank
    names: Sequence[Any],  # that distinguish gangs of the same tasks
    first: DeclaredBlocks | None,  # blocks of the first array; None: unknown
    kind: Kind,  # of the arrays
    options: Options,  # sent with the tasks
    arrays: Sequence[DaskArray] = (),  # that it computes; empty: blocks under their own keys
    kept: Mapping[Key, Any] = MappingProxyType({}),  # tasks that stay with Dask
    most_bytes: float | None = None,  # of a rank's values, before Dask's tasks take over
) -> FusedGang:
    """Return the gang that runs some programs."""
    # Clients with the same arrays may have found their tasks in another order.
    keys = str([list(tasks.nodes), [each.inputs for each in programs]])
    token = tokenize(PREFIX, list(names), len(programs), options, keys, most_bytes)
    declared = [Declared.of(x) for x in arrays]
    ranks = rank_programs(programs, first, kind, most_bytes=most_bytes)
    return FusedGang(token, ranks, options, declared, kept=dict(kept))
