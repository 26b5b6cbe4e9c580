"""A gang as tasks of a Dask graph.

The graph has a task for each rank, a commit task that depends on all of them, and an output task
for each block. Because of the commit task, culling keeps all ranks, and all ranks run again when
any output is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef

from dask_p2p.backends import backend_for, backend_named
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import Options
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import expression_array, is_expression, layered_array
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.outputs import Outputs
from dask_p2p.sections.api.rank_body import InputSpec, RankBody
from dask_p2p.sections.gang.tasks import gang_tasks, name_of_gang, output_tasks
from dask_p2p.types import Array, DaskArray, Key


def section_arrays(
    prefix: str,  # of the new arrays' names, and thus of Dask's tasks
    function: Callable[..., Any],
    arrays: Sequence[DaskArray],  # of like chunks, or of length 1; in blocks of one kind
    ranks: RankGrid,  # decomposition of the arrays
    outputs: Outputs,  # the arrays that are made
    options: Options,  # sent with the tasks
    others: Mapping[int, RankGrid] = MappingProxyType({}),  # decompositions of other shapes
    wholes: Collection[int] = (),  # numbers of the arrays that each rank receives as a whole
) -> tuple[DaskArray, ...]:
    """Return the lazy arrays that a gang makes, from inputs of graphs or of expressions.

    Each rank calls the function with a context and its `LocalBlocks`.
    """
    inputs = tuple(
        whole_input(x)
        if n in wholes
        else InputSpec(x.dtype, own=others[n])
        if n in others
        else _input_spec(x, arrays[0])
        for n, x in enumerate(arrays)
    )
    kind = backend_for(arrays[0]._meta).name if arrays else NUMPY.name
    section = Section(prefix, RankBody(function, ranks, inputs, outputs, kind), options)
    return tuple(gang_arrays(section, arrays, len(outputs.each)))


class GangWork(Protocol):
    """The work of a gang, without the names of its inputs."""

    @property
    def prefix(self) -> str:
        """Prefix of the names of its arrays."""

    @property
    def own_token(self) -> str:
        """Token without the inputs."""

    def chunks(self, number: int) -> Any:
        """Return the chunks of one of the arrays."""

    def meta(self, number: int) -> Array:
        """Return an empty array like the blocks of one of the arrays."""

    def tasks(self, gang: str, names: Sequence[str]) -> Mapping[Key, Any]:
        """Return the tasks of the gang, which has this name and inputs of these names."""

    def keys(self, name: str, number: int) -> Iterable[Iterable[Key]]:
        """Return the keys of the blocks of one of the arrays, which has this name: by rank."""


def gang_arrays(work: GangWork, inputs: Sequence[DaskArray], count: int) -> list[DaskArray]:
    """Return the lazy arrays that a gang makes, from inputs of graphs or of expressions."""
    if inputs and is_expression(inputs[0]):
        layers = [GangLayer(work, number) for number in range(count)]
        return [expression_array(inputs[0], layer, inputs) for layer in layers]
    gang = GangTasks.of(work, inputs)
    graph = HighLevelGraph.from_collections(gang.name, gang.tasks, dependencies=list(inputs))
    return [gang.array(number, graph) for number in range(count)]


class GangTasks(NamedTuple):
    """The tasks of a gang with inputs."""

    work: GangWork
    token: str  # part of all names
    name: str
    tasks: Mapping[Key, Any]  # of its ranks, and of the commit

    @classmethod
    def of(cls, work: GangWork, inputs: Sequence[Any] = ()) -> GangTasks:
        """Return the gang for arrays or expressions."""
        names = [x.name for x in inputs]
        token = str(tokenize(work.own_token, names))
        name = name_of_gang(work.prefix, token)
        return cls(work, token, name, work.tasks(name, names))

    def array(self, number: int, graph: HighLevelGraph) -> DaskArray:
        """Return one of its arrays; the graph has the gang, and all that it reads."""
        layer = GangLayer(self.work, number)
        name = layer.name(self.token)
        tasks = output_tasks(self.name, number, self.work.keys(name, number))
        meta = layer.meta(None)
        made: DaskArray = layered_array(name, tasks, layer.chunks, meta, graph, [self.name])
        return made


@dataclass(frozen=True)
class GangLayer:
    """The tasks of one of a gang's arrays, where arrays are expressions.

    All arrays of one gang share the tasks of its ranks, since the inputs determine their names.
    """

    work: GangWork
    number: int  # of the array

    @property
    def token(self) -> str:
        """Token that identifies the array, without its inputs."""
        return f"{self.number}-{self.work.own_token}"

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        chunks: Any = self.work.chunks(self.number)  # not a number where it is unknown
        return tuple(chunks)

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks."""
        return self.work.meta(self.number)

    def name(self, token: str) -> str:
        """Return the name of the array."""
        return f"{self.work.prefix}-{self.number}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, Task]:
        """Return the tasks of the ranks, of the commit and of the array's blocks."""
        gang = GangTasks.of(self.work, inputs)
        keys = self.work.keys(name, self.number)
        return {**gang.tasks, **output_tasks(gang.name, self.number, keys)}


@dataclass(frozen=True)
class Section:
    """The work of a gang that calls a function of local blocks: see `GangWork`."""

    prefix: str  # of the names of its arrays
    body: RankBody  # called by each rank
    options: Options  # sent with the tasks

    @cached_property
    def own_token(self) -> str:
        """Token without the inputs; random if the function has no other, so computed once."""
        return str(tokenize(self.prefix, self.body, self.options))

    def tasks(self, gang: str, names: Sequence[str]) -> dict[Key, Task]:
        """Return the tasks of its ranks and of the commit."""
        ranks = self.body.ranks
        blocks = [
            [
                List(*(TaskRef((name, *index)) for index, _ in of.blocks(ranks, rank)))
                for name, of in zip(names, self.body.inputs, strict=True)
            ]
            for rank in range(ranks.size)
        ]
        return gang_tasks(gang, ranks, [self.body] * ranks.size, blocks, self.options)

    def chunks(self, number: int) -> tuple[tuple[float, ...], ...]:
        """Return the chunks of one of the arrays."""
        return self.body.outputs.each[number].chunks(self.body.ranks)

    def meta(self, number: int) -> Array:
        """Return an empty array of the same kind as one of the arrays."""
        output = self.body.outputs.each[number]
        kind = NUMPY if output.is_numpy else backend_named(self.body.kind)
        return kind.empty((0,) * len(self.chunks(number)), np.dtype(output.dtype))

    def keys(self, name: str, number: int) -> Iterator[list[Key]]:
        """Yield the keys of one of the arrays, by rank."""
        ranks, output = self.body.ranks, self.body.outputs.each[number]
        for rank in range(ranks.size):
            yield [(name, *index) for index in output.indices(ranks, rank)]


def whole_input(x: DaskArray) -> InputSpec:
    """Return the spec of an array that each rank receives as a whole."""
    return InputSpec(np.dtype(x.dtype), own=RankGrid(x.chunks, (1,) * x.ndim), is_whole=True)


def _input_spec(x: DaskArray, first: DaskArray) -> InputSpec:
    pairs = list(zip(x.shape, first.shape, strict=True))
    repeated = tuple(axis for axis, (size, whole) in enumerate(pairs) if size == 1 != whole)
    extra = tuple(max(0, size - whole) if size != 1 else 0 for size, whole in pairs)
    return InputSpec(np.dtype(x.dtype), repeated, extra if any(extra) else ())
