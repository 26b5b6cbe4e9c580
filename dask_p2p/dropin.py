"""`install`: code that rechunks by Dask's own methods uses this package without a change.

`dask.array.rechunk` chooses between two methods, tasks and the peer-to-peer shuffle, and has no
place for a third. So the function of the second method is replaced where Dask looks it up. The
layer that it makes cannot be replaced when a graph is optimised: by then Dask has merged blocks by
tasks, the dtype is no longer known, and the scheduler would have to import the optimiser of all
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import Lock
from typing import Any

import dask.array as da
import numpy as np

from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.ops.arguments import check_array, has_unknown_chunks
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.types import DaskArray

__all__ = ["install", "uninstall"]

_lock = Lock()
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what it was, what it is


def install() -> ExitStack:
    """Have Dask rechunk by this package where it would use its own peer-to-peer shuffle.

    Code that calls ``x.rechunk(...)``, ``x.T.rechunk(...)`` or ``xarray.DataArray.chunk(...)``
    stays as it is, and gives arrays of the same values, chunks, dtype and type of blocks. From now
    on, this package does every rechunk of this process for which Dask chooses its method ``p2p``:
    because it is named, or by itself, with a client and above a certain size of the graph. Rechunks
    by tasks still go by tasks. Calling it again changes nothing.

    Returns
    -------
    ExitStack
        A context manager that uninstalls at its end, unless it was installed before.

    Notes
    -----
    Arrays that this package does not take, of masked or sparse blocks, still go Dask's own way, and
    so do NumPy arrays of unknown chunk sizes. Blocks must have the dtype and the shape that their
    array says; if not, a `BlockMismatchError` names the block.

    For programs that cannot be changed, set the options ``p2p.install: true`` and
    ``distributed.client.preload: [dask_p2p.preload]``.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> with install():
    ...     y = x.rechunk((6, 1), method="p2p")
    >>> y.name.partition("-")[0], y.chunks
    ('p2p', ((6,), (1, 1, 1, 1)))
    """
    import distributed.shuffle

    at_exit = ExitStack()
    with _lock:
        if _replaced:
            return at_exit
        _replace(distributed.shuffle, "rechunk_p2p", _rechunked)
        if da._array_expr_enabled():
            from dask.array._array_expr._rechunk import Rechunk

            _replace(Rechunk, "_lower", _lowered)
    at_exit.callback(uninstall)
    return at_exit


def uninstall() -> None:
    """Have Dask rechunk as before `install`. Arrays that were made in between stay as they are."""
    with _lock:
        for owner, name, original, replacement in _replaced:
            if getattr(owner, name) is replacement:  # not somebody else's since
                setattr(owner, name, original)
        _replaced.clear()


def _replace(owner: Any, name: str, decide: Callable[..., Any]) -> None:
    """Put a function in the place of Dask's; where it gives None, Dask's is called."""
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # Others may have wrapped this one, and still call it after `uninstall`.
        result = decide(*args, **kwargs) if _replaced else None
        return original(*args, **kwargs) if result is None else result

    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement))


def _rechunked(x: DaskArray, chunks: Any, **_: Any) -> Any:
    """Rechunk an array, in the place of `distributed.shuffle.rechunk_p2p`.

    Of its other arguments nothing is needed: they say how Dask merges blocks before.
    """
    if has_unknown_chunks(x) and isinstance(x._meta, np.ndarray):
        return None
    return _checked_rechunk(x, chunks)


def _checked_rechunk(x: DaskArray, chunks: Any) -> Any:
    try:
        check_array(x)
    except UnsupportedArrayError:
        return None
    return rechunk(x, chunks)


def _lowered(expr: Any) -> Any:
    """Rechunk an expression, where `Rechunk._lower` raises NotImplementedError for ``p2p``."""
    from dask.array._array_expr._collection import new_collection
    from dask.array.rechunk import _choose_rechunk_method

    before, after = expr.array.chunks, expr.chunks
    if before == after:
        return None
    method = expr.method or _choose_rechunk_method(before, after, threshold=expr.threshold)
    if method != "p2p":
        return None
    y = _checked_rechunk(new_collection(expr.array), after)
    return None if y is None else y.expr
