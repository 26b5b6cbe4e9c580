"""A gang as tasks of a Dask graph.

The graph has a task for each rank, a commit task that depends on all of them, and an output task
for each block. Because of the commit task, culling keeps all ranks, and all ranks run again when
any output is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index as as_int
from typing import Any, NamedTuple, Protocol

import dask
import numpy as np
from dask.base import tokenize, unpack_collections
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef

from dask_p2p.backends import BACKENDS, Backend, backend_for, backend_named
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import Options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks
from dask_p2p.graph import array_of_layer, check_one_library, is_expression, layered_array
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_known_array
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans.ranks import RankGrid, distribute_alike
from dask_p2p.plugins.placement import ranks_for, room
from dask_p2p.plugins.registration import cluster_workers
from dask_p2p.sections.api.outputs import Outputs
from dask_p2p.sections.api.rank_body import InputSpec, RankBody
from dask_p2p.sections.gang.rank import gang_tasks, name_of_gang, output_tasks
from dask_p2p.types import Array, DaskArray, Key


def section_arrays(
    prefix: str,  # of the new arrays' names, and thus of Dask's tasks
    function: Callable[..., Any],
    arrays: Sequence[DaskArray],  # in blocks of one kind
    inputs: Sequence[InputSpec],  # of these arrays
    ranks: RankGrid,  # decomposition of the first one
    outputs: Outputs,  # the arrays that are made
    options: Options,  # sent with the tasks
) -> tuple[DaskArray, ...]:
    """Return the lazy arrays that a gang makes, from inputs of graphs or of expressions.

    Each rank calls the function with a context and its `LocalBlocks`.
    """
    kind = backend_for(arrays[0]._meta).name if arrays else NUMPY.name
    section = Section(prefix, RankBody(function, ranks, tuple(inputs), outputs, kind), options)
    return tuple(gang_arrays(section, arrays, len(outputs.specs)))


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
        return [array_of_layer(inputs[0], layer, inputs) for layer in layers]
    gang = GangTasks.for_inputs(work, inputs)
    graph = HighLevelGraph.from_collections(gang.name, gang.tasks, dependencies=list(inputs))
    return [gang.array(number, graph) for number in range(count)]


class GangTasks(NamedTuple):
    """The tasks of a gang with inputs."""

    work: GangWork
    token: str  # part of all names
    name: str
    tasks: Mapping[Key, Any]  # of its ranks, and of the commit

    @classmethod
    def for_inputs(cls, work: GangWork, inputs: Sequence[Any] = ()) -> GangTasks:
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
        array: DaskArray = layered_array(name, tasks, layer.chunks, meta, graph, [self.name])
        return array


@dataclass(frozen=True)
class GangLayer:
    """The tasks of one of a gang's arrays, where arrays are expressions.

    All arrays of one gang share the tasks of its ranks, since the inputs determine their names.
    """

    work: GangWork
    number: int  # of the array

    @property
    def token(self) -> str:
        return f"{self.number}-{self.work.own_token}"

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        chunks: Any = self.work.chunks(self.number)  # not a number where it is unknown
        return tuple(chunks)

    def meta(self, first: Any) -> Array:
        return self.work.meta(self.number)

    def name(self, token: str) -> str:
        return f"{self.work.prefix}-{self.number}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, Task]:
        gang = GangTasks.for_inputs(self.work, inputs)
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
        ranks = self.body.ranks
        blocks = [
            [
                List(*(TaskRef((name, *index)) for index, _ in spec.blocks(rank)))
                for name, spec in zip(names, self.body.inputs, strict=True)
            ]
            for rank in range(ranks.size)
        ]
        return gang_tasks(gang, ranks, [self.body] * ranks.size, blocks, self.options)

    def chunks(self, number: int) -> tuple[tuple[float, ...], ...]:
        return self.body.outputs.specs[number].chunks(self.body.ranks)

    def meta(self, number: int) -> Array:
        output = self.body.outputs.specs[number]
        kind = NUMPY if output.is_numpy else backend_named(self.body.kind)
        return kind.empty((0,) * len(self.chunks(number)), np.dtype(output.dtype))

    def keys(self, name: str, number: int) -> Iterator[list[Key]]:
        ranks, output = self.body.ranks, self.body.outputs.specs[number]
        for rank in range(ranks.size):
            yield [(name, *index) for index in output.indices(ranks, rank)]


#: Least size of local blocks for several ranks on a worker by default: they share Python's lock.
#: Two ranks took 0.6 times as long as one for Gray-Scott's blocks of 1 MiB. For 16 KiB they took
#: 2.5 times as long (8c61f8c4, two cores of an AMD EPYC).
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Whole:
    """An array that each rank receives as a whole: a constant of `iterate`, or an array of `spmd`.

    Parameters
    ----------
    value : object
        A Dask array, whose blocks are sent to all ranks. In `iterate` also any computed value, such
        as a NumPy array with a table of coefficients.

    See Also
    --------
    iterate, spmd

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import Whole, spmd
    >>> def scaled(ctx, u, factors):
    ...     return u * factors.sum()
    >>> factors = Whole(da.ones(5))
    >>> spmd(scaled, da.ones(2), factors).compute(scheduler="sync")
    array([5., 5.])
    """

    value: Any


def input_spec(value: Any, first: DaskArray, ranks: RankGrid) -> InputSpec:
    """Return the spec of a `Whole`, or of an array with the chunks of the first one.

    Along some axes it may be longer at the end, or have one element. `ranks` divide the first one.
    """
    if isinstance(value, Whole):
        x = value.value
        return InputSpec(np.dtype(x.dtype), RankGrid(x.chunks, (1,) * x.ndim))
    pairs = list(zip(value.shape, first.shape, strict=True))
    repeated = tuple(axis for axis, (size, full_size) in enumerate(pairs) if size == 1 != full_size)
    extra = [max(0, size - full_size) if size != 1 else 0 for size, full_size in pairs]
    return InputSpec(np.dtype(value.dtype), ranks.extend(extra), repeated)


def check_computed(*values: Any) -> None:
    """Refuse lazy values where computed ones are required: `InputError`."""
    lazy, _ = unpack_collections(values)
    lazy += [value for value in values if type(value).__name__ == "Future"]  # distributed's class
    if lazy:
        raise InputError(
            f"expected computed constants and keywords, got {lazy[0]!r}. Compute it first, or "
            f"give a Dask array as a constant of iterate or an array of spmd, dask_p2p.Whole(x)."
        )


def check_decompositions(arrays: Sequence[DaskArray]) -> None:
    """Refuse arrays that cannot be divided between ranks.

    Raises `InputError` for an empty sequence, or if chunk sizes are unknown or
    differ. Raises `UnsupportedArrayError` if an array is no Dask array of NumPy or CuPy blocks, or
    if the arrays are of both kinds.
    """
    if not arrays:
        raise InputError("expected at least one Dask array after the function, got none.")
    check_one_library(arrays)
    for x in arrays:
        check_input(x, arrays[0])
        if x.shape != arrays[0].shape:
            raise InputError(
                f"expected arrays of the first one's shape, {arrays[0].shape}, got {x.shape}."
            )
        if x.chunks != arrays[0].chunks:
            raise InputError(
                f"expected arrays of the first one's chunks, {arrays[0].chunks}, got "
                f"{x.chunks}. Call x.rechunk first."
            )


def checked_inputs(
    values: Sequence[Any], ranks: RankGrid
) -> tuple[list[DaskArray], list[InputSpec]]:
    """Return arrays with one block for each local block where a shape is another than the first's.

    The decompositions of these are those of `Context.grid_of`. Raises `InputError` if the number
    of axes differs; otherwise the same errors as `check_decompositions`.
    """
    first = values[0]
    check_one_library([x.value if isinstance(x, Whole) else x for x in values])
    check_decompositions([x for x in values if getattr(x, "shape", None) == first.shape])
    arrays, specs = list[DaskArray](), list[InputSpec]()
    for value in values:
        x = value.value if isinstance(value, Whole) else value
        check_input(x, first)
        if isinstance(value, Whole) or x.shape == first.shape:
            spec = input_spec(value, first, ranks)
        elif x.ndim != first.ndim:
            raise InputError(
                f"expected arrays of {first.ndim} axes, like the first one, got one of shape "
                f"{x.shape}. Give each rank the whole array, dask_p2p.Whole(x), or add axes."
            )
        else:
            spec = InputSpec(np.dtype(x.dtype), distribute_alike(ranks, x.shape))
            chunks = tuple(tuple(n for n in sizes if n) or (0,) for sizes in spec.ranks.local_sizes)
            x = x if x.chunks == chunks else rechunk(x, chunks)
        arrays.append(x)
        specs.append(spec)
    return arrays, specs


def check_input(x: Any, first: DaskArray) -> None:
    """Refuse anything but a Dask array of known chunks, of the first array's library."""
    check_known_array(x)
    check_same_kind(backend_for(first._meta), x._meta, "an array")


def check_same_kind(backend: Backend, value: Any, name: str) -> None:
    """Refuse an array of a library other than the section's: `UnsupportedArrayError`."""
    library = type(value).__module__.partition(".")[0]
    if library in BACKENDS and library != backend.name and np.ndim(value):
        convert = "cupy.asarray" if backend.on_device else "cupy.asnumpy"
        raise UnsupportedArrayError(
            f"expected {backend.title} blocks, like the first array's, got {name} of "
            f"{BACKENDS[library].title}: a section computes with one library. Convert it first, "
            f"x.map_blocks({convert}), or {convert}(x) if it is no Dask array; or give numbers."
        )


def chosen_ranks(x: DaskArray, ranks: int | None, partition: Sequence[int] | None) -> RankGrid:
    """Return the decomposition of an array between ranks.

    Raises `InputError` if the number of ranks is invalid here, or if the array has no
    such axis.
    """
    on_device = backend_for(x._meta).on_device
    size_bytes = prod(x.shape) * x.dtype.itemsize  # expressions have no `nbytes`
    rank_limit = most_ranks(ranks, 0 if on_device else size_bytes)
    try:
        axes = list(range(x.ndim) if partition is None else map(as_int, partition))
    except TypeError:
        axes = [x.ndim]
    if not all(axis in range(-x.ndim, x.ndim) for axis in axes):
        raise InputError(
            f"partition: expected a tuple of axes of an array of {x.ndim} dimensions, got "
            f"{partition!r}."
        )
    divided = [axis % x.ndim for axis in axes]
    return RankGrid.at_most(x.chunks, rank_limit, divided)


def most_ranks(ranks: int | None, size_bytes: int = 0) -> int:
    """Return the largest number of ranks; by default the number that the workers can run at a time.

    By default each worker that has the annotated resources runs one, or more in its threads if the
    local blocks of an array of this size are large. The scheduler refuses a section with more ranks
    than can run. Raises `InputError` if the number is invalid here.
    """
    if ranks is not None:
        try:
            return checked_count("ranks", ranks=ranks)
        except InputError as exc:
            raise InputError(f"{exc} Leave ranks= out for the default.") from None
    needs = dask.get_annotations().get("resources")
    if not isinstance(needs, dict):  # perhaps a function of keys
        needs = {}
    threads = [
        min(worker["nthreads"], room(worker.get("resources", {}), needs))
        for worker in cluster_workers()
    ]
    able = [int(count) for count in threads if count >= 1]
    return ranks_for(able, size_bytes, _LEAST_BLOCK_BYTES)
