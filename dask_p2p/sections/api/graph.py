"""A gang as tasks of a Dask graph.

The graph has a task for each rank, a commit task that depends on all of them, and an output task
for each block. Because of the commit task, culling keeps all ranks, and all ranks run again when
any output is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from dask.array.core import new_da_object
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import List, Task, TaskRef

from dask_p2p.backends import backend_for, backend_named
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import Options
from dask_p2p.engine.task import RankTask
from dask_p2p.geometry import Chunks
from dask_p2p.graph.arrays import expression_array, is_expression
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.outputs import Outputs
from dask_p2p.sections.api.rank_body import InputSpec, RankBody
from dask_p2p.sections.gang.rank import run_rank
from dask_p2p.sections.gang.tasks import commit_of, commit_task, output_task
from dask_p2p.types import Array, DaskArray


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
    body = RankBody(function, ranks, inputs, outputs, kind)
    section = Section(prefix, body, options)
    if arrays and is_expression(arrays[0]):
        layers = [SectionLayer(section, number) for number in range(len(outputs.each))]
        return tuple(expression_array(arrays[0], layer, arrays) for layer in layers)
    names = [x.name for x in arrays]
    gang, tasks = section.tasks(names)
    graph = HighLevelGraph.from_collections(gang, tasks, dependencies=list(arrays))
    collections = []
    for number in range(len(outputs.each)):
        name = f"{prefix}-{number}-{section.token(names)}"
        output_tasks = MaterializedLayer(section.output_tasks(name, gang, number))
        all_tasks = {**graph.layers, name: output_tasks}
        whole = HighLevelGraph(all_tasks, {**graph.dependencies, name: {gang}})
        meta = section.meta(number)
        chunks = section.chunks(number)
        collections.append(new_da_object(whole, name, chunks, meta=meta, dtype=meta.dtype))
    return tuple(collections)


@dataclass(frozen=True)
class Section:
    """The work of a gang, without the names of its inputs."""

    prefix: str  # of the names of its arrays
    body: RankBody  # called by each rank
    options: Options  # sent with the tasks

    @cached_property
    def own_token(self) -> str:
        """Token without the inputs; random if the function has no other, so computed once."""
        return str(tokenize(self.prefix, self.body, self.options))

    def token(self, names: Sequence[str]) -> str:
        """Return a token that identifies the gang, from the names of its inputs."""
        return str(tokenize(self.own_token, list(names)))

    def tasks(self, names: Sequence[str]) -> tuple[str, dict[Any, Task]]:
        """Return the name of the gang, and the tasks of its ranks and of the commit."""
        gang, ranks = f"{self.prefix}-ranks-{self.token(names)}", self.body.ranks
        tasks: dict[Any, Task] = {}
        for rank in range(ranks.size):
            blocks = [
                List(*(TaskRef((name, *index)) for index, _ in of.blocks(ranks, rank)))
                for name, of in zip(names, self.body.inputs, strict=True)
            ]
            key, given = (gang, rank), (gang, rank, ranks, self.body, self.options)
            tasks[key] = RankTask(key, run_rank, *given, *blocks)
        commit = commit_task(gang, tasks)
        return gang, tasks | {commit.key: commit}

    def chunks(self, number: int) -> tuple[tuple[float, ...], ...]:
        """Return the chunks of one of the arrays."""
        return self.body.outputs.each[number].chunks(self.body.ranks)

    def meta(self, number: int) -> Array:
        """Return an empty array of the same kind as one of the arrays."""
        output = self.body.outputs.each[number]
        kind = NUMPY if output.is_numpy else backend_named(self.body.kind)
        return kind.empty((0,) * len(self.chunks(number)), np.dtype(output.dtype))

    def output_tasks(self, name: str, gang: str, number: int) -> dict[Any, Task]:
        """Return the output tasks of one of the arrays, one for each block."""
        tasks: dict[Any, Task] = {}
        ranks, commit = self.body.ranks, commit_of(gang)
        for rank in range(ranks.size):
            indices = self.body.outputs.each[number].indices(ranks, rank)
            for position, index in enumerate(indices):
                key = (name, *index)
                tasks[key] = output_task(key, commit, (gang, rank), number, position)
        return tasks


@dataclass(frozen=True)
class SectionLayer:
    """The tasks of one of a section's arrays, where arrays are expressions.

    All arrays of one section share the tasks of its ranks, since the inputs determine their names.
    """

    section: Section
    number: int  # of the array

    @property
    def token(self) -> str:
        """Token that identifies the array, without its inputs."""
        return f"{self.number}-{self.section.own_token}"

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        chunks: Any = self.section.chunks(self.number)  # not a number where it is unknown
        return tuple(chunks)

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks."""
        return self.section.meta(self.number)

    def name(self, token: str) -> str:
        """Return the name of the array."""
        return f"{self.section.prefix}-{self.number}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, Task]:
        """Return the tasks of the ranks, of the commit and of the array's blocks."""
        gang, tasks = self.section.tasks([x.name for x in inputs])
        return tasks | self.section.output_tasks(name, gang, self.number)


def whole_input(x: DaskArray) -> InputSpec:
    """Return the spec of an array that each rank receives as a whole."""
    return InputSpec(np.dtype(x.dtype), own=RankGrid(x.chunks, (1,) * x.ndim), is_whole=True)


def _input_spec(x: DaskArray, first: DaskArray) -> InputSpec:
    pairs = list(zip(x.shape, first.shape, strict=True))
    repeated = tuple(axis for axis, (size, whole) in enumerate(pairs) if size == 1 != whole)
    extra = tuple(max(0, size - whole) if size != 1 else 0 for size, whole in pairs)
    return InputSpec(np.dtype(x.dtype), repeated, extra if any(extra) else ())
