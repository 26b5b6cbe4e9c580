"""The lazy array of a plan as an expression of array-expr, Dask's query planning for arrays.

Dask decides at the import of `dask.array` whether arrays are expressions. This module uses private
parts of Dask, and is only imported if arrays are expressions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dask.array._array_expr._blockwise import Elemwise
from dask.array._array_expr._expr import ArrayExpr, unify_chunks_expr
from dask.array.utils import meta_from_array

from dask_p2p.engine.task import AssembleTask
from dask_p2p.geometry import Chunks
from dask_p2p.graph.layer import assemble_tasks, output_spec


class PlannedExpr(ArrayExpr):  # type: ignore[misc]
    """An array whose blocks are assembled from blocks of other arrays.

    The operands are a `Plan`, `Options`, the prefix of the name, a `Epilogue` or None, and then the
    expressions of the other arrays. Tasks are made when Dask requests the graph, since planning may
    first replace the other arrays by equal ones with another name.
    """

    _parameters: tuple[str, ...] = ("plan", "options", "prefix", "epilogue")

    @cached_property
    def _name(self) -> str:
        return f"{self.prefix}-{self.deterministic_token}"

    @cached_property
    def chunks(self) -> Chunks:
        chunks: Chunks = self.plan.chunks if self.epilogue is None else self.epilogue.chunks
        return chunks

    @cached_property
    def _meta(self) -> Any:
        meta = self.dependencies()[0]._meta if self.epilogue is None else self.epilogue.meta
        return meta_from_array(meta, len(self.chunks), meta.dtype)

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        # Align the chunks of `x.T + y` here. Dask 2026.7.1 does not, because it counts the indices
        # of the axes as operands.
        if not isinstance(parent, Elemwise):
            return None
        _, operands, changed = unify_chunks_expr(*parent.args)
        options = parent.operands[: len(parent._parameters)]
        return Elemwise(*options, *operands) if changed else None

    def _layer(self) -> dict[Any, AssembleTask]:
        arrays = self.dependencies()
        names = tuple(array._name for array in arrays)
        output = output_spec(names, arrays[0], self.options, self.epilogue)
        return assemble_tasks(self._name, self.plan, output)
