"""The layer of a plan: one task for each output block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from dask.array.utils import meta_from_array
from dask.tokenize import normalize_token, tokenize

from dask_p2p.backends import backend_for
from dask_p2p.config import Options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, Blocks
from dask_p2p.geometry import Chunks, Index, block_indices
from dask_p2p.plans import Plan
from dask_p2p.plugins.registration import on_missing_plugin
from dask_p2p.types import Array
from dask_p2p.versioned import named_fields


class LazyLayer(Protocol):
    """The tasks of an array, made when the names of its inputs are known.

    An optimiser may replace inputs by equal ones with other names and equal chunks.
    """

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""

    @property
    def token(self) -> str:
        """Token that identifies the layer, without its inputs."""

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks; `first` is the first input, or None."""

    def name(self, token: str) -> str:
        """Return the name of the array; `token` identifies the layer and its inputs."""

    def tasks(self, name: str, inputs: Sequence[Any]) -> Mapping[Any, Any]:
        """Return the tasks by key; `inputs` are arrays or expressions."""


class LayerArray:
    """An array of a `LazyLayer`, its first operand; a base of the libraries' expressions.

    The other operands are its inputs. Tasks are made when Dask requests the graph, since planning
    may first replace the inputs by equal ones with another name.
    """

    _parameters = ("lazy_layer",)
    # Parameters, and attributes of all expressions.
    lazy_layer: LazyLayer
    deterministic_token: str
    dependencies: Callable[[], list[Any]]

    @cached_property
    def _name(self) -> str:
        return self.lazy_layer.name(self.deterministic_token)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        return self.lazy_layer.chunks

    @cached_property
    def _meta(self) -> Any:
        meta = self.lazy_layer.meta(next(iter(self.dependencies()), None))
        return meta_from_array(meta, len(self.chunks), meta.dtype)

    def _layer(self) -> Mapping[Any, Any]:
        return self.lazy_layer.tasks(self._name, self.dependencies())


@dataclass(frozen=True)
class Epilogue:
    """A function that each task applies to its assembled block."""

    function: Callable[[Any, Index], Any]  # function of the assembled block and its index
    chunks: Chunks  # chunks of the function's results
    meta: Array  # empty array of the results' type and dtype

    def __dask_tokenize__(self) -> Any:
        # By default Dask would copy a CuPy array to the host, twice, and pickle the class.
        kind = type(self.meta)
        meta = (kind.__module__, kind.__qualname__, self.meta.shape, self.meta.dtype)
        return normalize_token((named_fields(self.function), self.chunks, meta))


@dataclass(frozen=True)
class PlannedLayer:
    """The tasks that assemble the blocks of a plan."""

    prefix: str  # prefix of the array's name, and so of its tasks
    plan: Plan
    options: Options  # sent with the tasks
    epilogue: Epilogue | None = None

    @cached_property
    def token(self) -> str:
        """Token of the layer; random if the function has no other, so it is computed once."""
        values = map(named_fields, (self.plan, self.options, self.epilogue))
        return str(tokenize(self.prefix, *values))

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    @property
    def chunks(self) -> Chunks:
        """Chunks of the array."""
        return self.plan.chunks if self.epilogue is None else self.epilogue.chunks

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks, perhaps of another number of dimensions."""
        return first._meta if self.epilogue is None else self.epilogue.meta

    def name(self, token: str) -> str:
        """Return the name of the array."""
        return f"{self.prefix}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Any, AssembleTask]:
        """Return the tasks, by key, that assemble the blocks."""
        (x,) = inputs
        output = output_spec(x, self.options, self.epilogue)
        return assemble_tasks(name, self.plan, output)


def output_spec(x: Any, options: Options, epilogue: Epilogue | None) -> OutputSpec:
    """Return the properties that all output blocks share; `x` is the input, or its expression."""
    after = (None, None) if epilogue is None else (epilogue.function, epilogue.chunks)
    return OutputSpec((x.name,), x.dtype, backend_for(x._meta).name, options, *after)


def assemble_tasks(name: str, plan: Plan, output: OutputSpec) -> dict[Any, AssembleTask]:
    """Return the tasks, by key, that assemble a plan's output blocks. The output has this name."""
    shared: dict[tuple[Index, ...], Blocks] = {}
    tasks = {}
    for index in block_indices(plan.chunks):
        key = (name, *index)
        sources = plan.sources(index)
        blocks = shared.get(sources)
        if blocks is None:
            blocks = shared[sources] = Blocks(*map(output.key, sources))
        tasks[key] = AssembleTask.of(key, plan, index, output, blocks, on_missing=on_missing_plugin)
    return tasks
