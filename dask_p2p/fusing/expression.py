"""Fused arrays as expressions of array-expr, Dask's query planning for arrays.

Like `dask_p2p.graph.expression`, this module is imported only where arrays are expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dask.core import flatten

from dask_p2p.geometry import Chunks
from dask_p2p.graph.expression import PlannedExpr
from dask_p2p.types import DaskArray, Key


@dataclass(frozen=True)
class GangLayer:
    """The tasks of a gang, and of its inputs, that several arrays share."""

    token: str  # of the gang
    tasks: Mapping[Key, Any]

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token


class FusedExpr(PlannedExpr):
    """One of the arrays of a fused graph, whose tasks are made already."""

    _parameters = ("gang_layer", "outputs", "own_name", "own_chunks", "own_meta")

    @cached_property
    def _name(self) -> str:
        return str(self.own_name)

    @cached_property
    def chunks(self) -> Chunks:
        chunks: Chunks = self.own_chunks
        return chunks

    @cached_property
    def _meta(self) -> Any:
        return self.own_meta

    def _layer(self) -> dict[Any, Any]:
        return {**self.gang_layer.tasks, **self.outputs.tasks}


def lowered(arrays: Sequence[DaskArray]) -> tuple[dict[Key, Any], list[list[Key]]]:
    """Return the graph of arrays after Dask's planning, and the keys of each array's blocks."""
    graph: dict[Key, Any] = {}
    keys = []
    for x in arrays:
        expr = x.expr.optimize()
        graph |= expr.__dask_graph__()
        keys.append(list(flatten(expr.__dask_keys__())))
    return graph, keys
