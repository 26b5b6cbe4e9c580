"""The option `p2p.fuse`: arrays that one gang computes, without a change of code.

Dask gets the function that optimises the graphs of arrays as the attribute `__dask_optimize__` of
their class. `Optimization` takes the place of this attribute. The client sends the scheduler an
expression for arrays that are expressions, and the scheduler makes its graph. `FusedExpression`
takes the place of this expression: its graph is that of a gang.

This module is imported with `dask.array`, so that its functions import other modules themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from dask_p2p.config import read_fuse_mode
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

_OF_ARRAYS = ("dask_array", "dask.array", "dask_p2p")  # packages of expressions that are arrays
_SEVERAL = ("_ExprSequence", "CompositeExpr", "CompositeFinalizeCompute", "FinalizeComputeArray")
_OF_CALL = ("workers", "resources", "retries", "user_priority")


def put_in_place_of_graphs() -> None:
    """Let the option count for all graphs of arrays of this process. Idempotent."""
    from dask.array.core import Array

    of_dask = vars(Array)["__dask_optimize__"]
    if not isinstance(of_dask, Optimization):
        Array.__dask_optimize__ = Optimization(of_dask)


def put_in_place_of_expressions(client: ModuleType) -> None:
    """Let the option count for expressions of this process. Idempotent."""
    of_dask: Any = client.Client._graph_to_futures  # private
    if hasattr(of_dask, "__wrapped__"):
        return

    @wraps(of_dask)
    def with_option(self: Any, expr: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        return of_dask(self, fused_expression(self, expr, keys, kwargs), keys, *args, **kwargs)

    client.Client._graph_to_futures = with_option


class Optimization:
    """The attribute `__dask_optimize__` of Dask arrays."""

    def __init__(self, of_dask: Any) -> None:
        self._of_dask = of_dask

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function that optimises graphs; Dask's own unless the option is set.

        Raises `UnsupportedArrayError` if the option is "on", and no gang can run
        the arrays.
        """
        from dask.array.optimization import optimize

        of_dask = self._of_dask.__get__(instance, owner)
        mode = read_fuse_mode()
        # Another function is that of the user's option `array_optimize`.
        if mode == "off" or of_dask is not optimize:
            return of_dask
        from dask_p2p.fusing.optimizer import optimizer_unless_dask

        return optimizer_unless_dask(mode, [instance]) or of_dask


@dataclass(frozen=True)
class FusedExpression:
    """Some arrays as Dask sends them to the scheduler, with the function that fuses them."""

    expr: Any
    keys: Sequence[Key]  # of the blocks, and of values made of all blocks
    optimizer: Any

    def __dask_graph__(self) -> Any:
        """Return the graph that Dask runs. Its tasks fail if it has to be fused, and cannot."""
        return self.optimizer.of_expression(self.expr, self.keys)

    def __dask_annotations__(self) -> Any:
        return self.expr.__dask_annotations__()


def fused_expression(client: Any, expr: Any, keys: Sequence[Key], of_call: Any) -> Any:
    """Return the expression that a client sends in place of another; the same if it is not fused.

    `of_call` are the client's arguments. Raises `UnsupportedArrayError` if the
    option is "on", and no gang can run the arrays.
    """
    mode = read_fuse_mode()
    arrays = [] if mode == "off" else arrays_of(expr)
    from dask_p2p.fusing.optimizer import optimizer_unless_dask
    from dask_p2p.plugins.registration import current_client

    if not arrays or current_client() is not client:
        return expr
    if mode == "auto" and any(of_call.get(name) for name in _OF_CALL):
        logger.debug("computes by Dask's tasks: %s would apply to ranks", ", ".join(_OF_CALL))
        return expr
    optimizer = optimizer_unless_dask(mode, arrays)
    return expr if optimizer is None else FusedExpression(expr, list(keys), optimizer)


def arrays_of(expr: Any) -> list[Any]:
    """Return the array expressions that an expression consists of; none if it has other parts."""
    arrays, stack = [], [expr]
    while stack:
        part = stack.pop()
        if type(part).__name__ in _SEVERAL:
            stack += part.dependencies()
        elif hasattr(part, "chunks") and type(part).__module__.startswith(_OF_ARRAYS):
            arrays.append(part)
        else:
            return []
    return arrays
