"""A gang's arrays as expressions of array-expr, Dask's query planning for arrays.

Like `dask_p2p.graph.expression`, this module is imported only where arrays are expressions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dask_p2p.geometry import Chunks
from dask_p2p.graph.expression import PlannedExpr


class SectionExpr(PlannedExpr):
    """One of the arrays that a gang makes.

    The operands are a `Section`, the number of the array, and then the expressions of the inputs.
    All arrays of one section share the tasks of its ranks, since the inputs determine their names.
    """

    _parameters = ("section", "number")

    @cached_property
    def _name(self) -> str:
        return f"{self.section.prefix}-{self.number}-{self.deterministic_token}"

    @cached_property
    def chunks(self) -> Chunks:
        chunks: Chunks = self.section.chunks(self.number)
        return chunks

    @cached_property
    def _meta(self) -> Any:
        return self.section.meta(self.number)

    def _layer(self) -> dict[Any, Any]:
        gang, tasks = self.section.tasks([array._name for array in self.dependencies()])
        both: dict[Any, Any] = tasks | self.section.output_tasks(self._name, gang, self.number)
        return both
