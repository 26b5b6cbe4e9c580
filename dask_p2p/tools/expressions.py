"""Rechunks of array-expr expressions, since Dask's ``p2p`` raises NotImplementedError for them.

Dask chooses a method when it computes, which may be after `uninstall`. So a rechunk that is made
after `install` is either this package's or a `LateRechunk`, which handles a later choice.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dask.array._array_expr._collection import new_collection
from dask.array._array_expr._expr import ArrayExpr
from dask.array._array_expr._rechunk import Rechunk
from dask.array.rechunk import _choose_rechunk_method

from dask_p2p.ops.rechunk import rechunk
from dask_p2p.tools.taken import method_of, tried

__all__ = ["ArrayExpr", "Rechunk", "lowered", "rechunked"]


class LateRechunk(Rechunk):  # type: ignore[misc]
    """Rechunk whose method Dask chooses when it computes; this package runs ``p2p``."""

    @cached_property
    def _name(self) -> str:
        return f"p2p-late-{super()._name}"

    def _lower(self) -> Any:
        made = lowered(self)
        return super()._lower() if made is None else made


def rechunked(expr: Any, *args: Any, **kwargs: Any) -> Any:
    """Rechunk an expression, in place of `ArrayExpr.rechunk`."""
    if expr.ndim and not any(expr.shape):
        return None
    asked = LateRechunk(expr, *args, **kwargs)
    if asked.chunks == expr.chunks:
        return expr
    made = lowered(asked)
    return asked if made is None and asked.method is None else made


def lowered(asked: Any) -> Any:
    """Return this package's rechunk of an expression if its method is now ``p2p``, else None.

    It replaces `Rechunk._lower`, which raises NotImplementedError for ``p2p``.
    """
    before, after = asked.array.chunks, asked.chunks
    method = asked.method or method_of(_choose_rechunk_method, before, after, asked.threshold)
    if before == after or method != "p2p":
        return None
    return tried("rechunk", _by_this_package, asked)


def _by_this_package(asked: Any) -> Any:
    return rechunk(new_collection(asked.array), asked.chunks).expr
