"""Graphs that are not fused, each with an error that names the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dask_p2p.backends import backend_for
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import FuseError, InputError, UnsupportedArrayError
from dask_p2p.fusing.planning.tasks import FusedTasks, ReadGraph
from dask_p2p.graph.libraries import check_one_library
from dask_p2p.ops.arguments import check_array
from dask_p2p.types import DaskArray, Kind

#: Annotations of layers that a gang cannot follow for some of its tasks only.
ANNOTATIONS = ("workers", "allow_other_workers", "resources", "retries", "priority")


def check_arrays(arrays: Sequence[DaskArray]) -> None:
    """Refuse arrays of unsuitable blocks.

    Raises `InputError` without an array, and `UnsupportedArrayError` for an argument that is no
    Dask array of NumPy or CuPy blocks, or has Python objects.
    """
    if not arrays:
        raise InputError("expected at least one Dask array, got none. Call fused(x).")
    for x in arrays:
        check_array(x)
        backend_for(x._meta)  # raises its error for other blocks
        _check_dtype(x.dtype, f"array {x.name}")
    check_one_library(arrays)


def kind_of(kinds: Iterable[Kind], read: ReadGraph) -> Kind:
    """Return the kind of the blocks that ranks compute with: CuPy's if any of them are.

    `kinds` are those of some arrays in the graph.
    """
    nodes = read.tasks.nodes.values()
    assembled = {node.output.kind for node in nodes if isinstance(node, AssembleTask)}
    return "cupy" if "cupy" in {*kinds, *assembled} else "numpy"


def kinds_of(arrays: Iterable[DaskArray]) -> set[Kind]:
    """Return the kinds of the blocks of arrays."""
    return {backend_for(x._meta).name for x in arrays}


def check_tasks(read: ReadGraph) -> None:
    """Refuse tasks that ranks cannot run: `FuseError`, or `UnsupportedArrayError` for blocks."""
    for key, task in read.kept.items():
        if isinstance(task, AssembleTask) and task.output.dtype is None:
            raise FuseError(
                f"expected no peer-to-peer rechunk of Dask before a task that stays with Dask, got "
                f"the task {key!r}. Call dask_p2p.rechunk, or x.rechunk(..., method='tasks')."
            )
    for key, node in read.tasks.nodes.items():
        # A dtype of None is known when the task runs.
        if isinstance(node, AssembleTask) and node.output.dtype is not None:
            _check_dtype(node.output.dtype, f"task {key!r}")


def check_annotations(layers: Mapping[str, Any], tasks: FusedTasks) -> None:
    """Refuse layers that Dask has to run under conditions of their own: `FuseError`."""
    for name, layer in layers.items():
        found = {k: v for k, v in (layer.annotations or {}).items() if k in ANNOTATIONS}
        if found and any(key in tasks.nodes for key in layer):
            values = ", ".join(f"{key}={value!r}" for key, value in found.items())
            raise FuseError(
                f"layer {name!r} is annotated with {values}, which one gang for all tasks cannot "
                f"honour. Build the array outside of dask.annotate. Annotate only the call of "
                f"fused."
            )


def _check_dtype(dtype: Any, where: str) -> None:
    if dtype.hasobject:
        raise UnsupportedArrayError(
            f"{where}: expected a dtype without Python objects in a fused graph, got {dtype}. "
            f"Convert it, x.astype(...), or compute it without fused."
        )
