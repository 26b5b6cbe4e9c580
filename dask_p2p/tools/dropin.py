"""`install`: code that uses Dask's own functions uses this package without a change.

`dask.array.rechunk` chooses between two methods, tasks and the peer-to-peer shuffle, and has no
place for a third. So the function of the second method is replaced where Dask looks it up. The
layer that it makes cannot be replaced when a graph is optimised: by then Dask has merged blocks by
tasks, the dtype is no longer known, and the scheduler would have to import the optimiser of all
arrays. `map_overlap` is replaced in `dask.array`, and in the module where its methods and Dask's
other functions look it up. Functions of `dask.array.fft` are replaced there, for arrays that they
refuse: where an axis to be transformed is cut.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib import import_module
from threading import Lock
from typing import Any
from weakref import WeakSet

import dask.array as da
import numpy as np

from dask_p2p import fft
from dask_p2p.errors import InputError, P2PWarning, RegistrationError
from dask_p2p.ops.arguments import has_unknown_chunks, is_dask_array
from dask_p2p.ops.overlap import map_overlap
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plugins.registration import connection_of, current_client
from dask_p2p.types import DaskArray

_lock = Lock()
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what it was, what it is
_installations: WeakSet[Installation] = WeakSet()  # those that count
_lacking: WeakSet[Any] = WeakSet()  # connections to schedulers of clusters that cannot take part


class Installation(AbstractContextManager["Installation"]):
    """What `install` gives. It counts what this package does in Dask's place.

    As a context manager it uninstalls at its end, unless it was installed before.

    Attributes
    ----------
    counts : Counter
        How often Dask's functions were replaced, by their names: "rechunk", "map_overlap", "fft".
    """

    def __init__(self, is_first: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._is_first = is_first

    @property
    def count(self) -> int:
        """All of `counts` together."""
        return self.counts.total()

    def __exit__(self, *_: Any) -> None:
        _installations.discard(self)
        if self._is_first:
            uninstall()

    def __repr__(self) -> str:
        verbs = ", ".join(f"{verb} {count}" for verb, count in self.counts.items())
        return f"<dask_p2p in Dask's place: {verbs or 'nothing yet'}>"


def install() -> Installation:
    """Have Dask use this package for peer-to-peer rechunks, `map_overlap`, and FFTs of cut axes.

    Code that calls ``x.rechunk(...)``, ``x.T.rechunk(...)``, ``xarray.DataArray.chunk(...)`` or
    ``x.map_overlap(...)`` stays as it is, and gives arrays of the same values, dtype and type of
    blocks. From now on, this package does every rechunk of this process for which Dask chooses its
    method ``p2p``: because it is named, or by itself, with a client and above a certain size of the
    graph. Rechunks by tasks still go by tasks. Functions of ``da.fft`` take axes that are cut.
    Calling it again changes nothing.

    Returns
    -------
    Installation
        A context manager that uninstalls at its end, unless it was installed before. Its ``count``
        says how often this package took Dask's place since then, its ``counts`` by which function.

    Notes
    -----
    Chunks are the same too, but for rims that are wider than blocks: Dask merges such blocks, this
    package leaves them.

    What this package does not take still goes Dask's own way: arrays of masked or sparse blocks,
    NumPy arrays of unknown chunk sizes, and all arrays on a cluster that lacks the package, with
    one warning. Blocks must have the dtype and the shape that their array says; if not, a
    `BlockMismatchError` names the block.

    For programs that cannot be changed, set the options ``p2p.install: true`` and
    ``distributed.client.preload: [dask_p2p.preload]``.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> with install() as used:
    ...     y = x.rechunk((6, 1), method="p2p")
    >>> y.name.partition("-")[0], y.chunks
    ('p2p', ((6,), (1, 1, 1, 1)))
    >>> used.count, used
    (1, <dask_p2p in Dask's place: rechunk 1>)
    """
    import distributed.shuffle

    with _lock:
        installation = Installation(is_first=not _replaced)
        _installations.add(installation)
        if _replaced:
            return installation
        _replace("rechunk", distributed.shuffle, "rechunk_p2p", rechunked)
        is_expression = da._array_expr_enabled()
        where = "dask.array._array_expr._overlap" if is_expression else "dask.array.overlap"
        for owner in (da, import_module(where)):
            _replace("map_overlap", owner, "map_overlap", map_overlap)
        transforms = import_module("dask.array.fft")
        for name in fft.__all__:
            if not name.endswith(("fft", "fft2", "fftn")):
                continue  # frequencies, and their order: the same whatever is cut
            _replace("fft", transforms, name, partial(_transformed, getattr(fft, name)))
        if is_expression:
            from dask.array._array_expr._rechunk import Rechunk

            _replace("rechunk", Rechunk, "_lower", _lowered)
    return installation


def uninstall() -> None:
    """Have Dask do all as before `install`. Arrays that were made in between stay as they are."""
    with _lock:
        for owner, name, original, replacement in _replaced:
            if getattr(owner, name) is replacement:  # no other code has replaced it
                setattr(owner, name, original)
        _replaced.clear()
        _lacking.clear()


def _replace(verb: str, owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Put a function in the place of Dask's; where it gives None, Dask's is called."""
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # Others may have wrapped this one, and still call it after `uninstall`.
        result = _tried(make, *args, **kwargs) if _replaced else None
        if result is None:
            return original(*args, **kwargs)
        with _lock:
            for installation in _installations:
                installation.counts[verb] += 1
        return result

    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement))


def _tried(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make an array; None if this package does not take what is given, or cannot be used."""
    connection = connection_of(current_client())
    if connection in _lacking:
        return None
    try:
        return make(*args, **kwargs)
    except InputError:
        return None
    except RegistrationError as exc:
        if connection is not None:
            _lacking.add(connection)
        warnings.warn(f"dask_p2p: Dask's own way is used: {exc}", P2PWarning, stacklevel=4)
        return None


def rechunked(x: DaskArray, chunks: Any, **_: Any) -> Any:
    """Rechunk an array, in the place of `distributed.shuffle.rechunk_p2p`.

    Of its other arguments nothing is needed: they say how Dask merges blocks before.
    """
    if has_unknown_chunks(x) and isinstance(x._meta, np.ndarray):
        return None
    return rechunk(x, chunks)


def _transformed(
    function: Any,
    a: DaskArray,
    s: Any = None,
    axes: Any = None,
    norm: Any = None,
    *,
    n: Any = None,
    axis: Any = None,
) -> Any:
    """Transform an array along axes of which one is cut; Dask does it where they are whole."""
    if not is_dask_array(a):
        return None
    is_along_one = function.__name__.endswith("fft")
    s, axes = s if n is None else n, axes if axis is None else axis
    if axes is None:  # with lengths Dask takes the first ones, NumPy the last ones
        few = {"t": (-1,), "2": (-2, -1)}.get(function.__name__[-1])
        axes = few or range(a.ndim if s is None else len(s))
    along = tuple(np.atleast_1d(axes))
    if all(-a.ndim <= axis < a.ndim and len(a.chunks[axis]) == 1 for axis in along):
        return None
    return function(a, s, along[0] if is_along_one else along, norm)


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
    return rechunk(new_collection(expr.array), after).expr
