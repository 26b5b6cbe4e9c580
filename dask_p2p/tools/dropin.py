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
from threading import RLock
from typing import Any
from weakref import WeakSet

import dask.array as da
import numpy as np

from dask_p2p import fft
from dask_p2p.errors import InputError, P2PWarning, RegistrationError
from dask_p2p.ops.arguments import has_unknown_chunks, is_dask_array
from dask_p2p.ops.overlap import mapped
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plugins.registration import connection_of, current_client
from dask_p2p.types import DaskArray

_lock = RLock()
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what it was, what it is
_lasting = 0  # how many installations no `with` statement ends
_entered: set[Installation] = set()  # installations whose `with` statements run
_installations: WeakSet[Installation] = WeakSet()  # all that have not ended and are referred to
_lacking: WeakSet[Any] = WeakSet()  # connections to schedulers of clusters that cannot take part


class Installation(AbstractContextManager["Installation"]):
    """What `install` gives. It counts what this package does in Dask's place.

    As a context manager it ends with the `with` statement. Dask does all as before when the last
    installation of the process has ended.

    Attributes
    ----------
    counts : Counter
        How often Dask's functions were replaced, by their names: "rechunk", "map_overlap", "fft".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lasts = False  # whether it is one of `_lasting`
        self._depth = 0  # of its `with` statements that run

    @property
    def count(self) -> int:
        """All of `counts` together."""
        return self.counts.total()

    def uninstall(self) -> None:
        """End this installation, and no other. If it has ended, nothing changes."""
        global _lasting
        with _lock:
            _lasting -= self._lasts
            self._lasts, self._depth = False, 0
            _entered.discard(self)
            _installations.discard(self)
            _take_off_unless_needed()

    def __enter__(self) -> Installation:
        global _lasting
        with _lock:
            _put_in_place()
            _lasting -= self._lasts
            self._lasts = False
            self._depth += 1
            _entered.add(self)
            _installations.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        with _lock:
            if self._depth > 1:
                self._depth -= 1
            else:
                self.uninstall()

    def __repr__(self) -> str:
        verbs = ", ".join(f"{verb} {count}" for verb, count in self.counts.items())
        return f"<dask_p2p in Dask's place: {verbs or 'nothing yet'}>"


def install() -> Installation:
    """Put this package in Dask's place for p2p rechunks, `map_overlap`, and FFTs of cut axes.

    Code that calls ``x.rechunk(...)``, ``x.T.rechunk(...)``, ``xarray.DataArray.chunk(...)`` or
    ``x.map_overlap(...)`` stays as it is, and gives arrays of the same values, chunks, dtype and
    type of blocks. From now on, this package does every rechunk of this process that goes by Dask's
    method ``p2p``. Dask chooses that where it is named, or with a client above a certain size of
    the graph. Rechunks by tasks still go by tasks. Functions of ``da.fft`` take axes that are cut.

    Returns
    -------
    Installation
        A context manager that ends this installation. Without a `with` statement the installation
        lasts until its ``uninstall()``, or `dask_p2p.uninstall`. Its ``count`` is the number of
        calls that this package took since then; its ``counts`` has them by function.

    Notes
    -----
    A process counts the installations of all its threads and libraries. Dask does all as before
    when the last one has ended.

    Some arrays still go Dask's own way: masked or sparse blocks, NumPy arrays of unknown chunk
    sizes, and all arrays on a cluster that lacks the package, with one warning. Blocks must have
    the dtype and the shape of their array; if not, a `BlockMismatchError` names the block.

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
    global _lasting
    installation = Installation()
    with _lock:
        _put_in_place()
        installation._lasts = True
        _lasting += 1
        _installations.add(installation)
    return installation


def uninstall() -> None:
    """End all installations but those whose `with` statements run.

    If no such statement runs, Dask does all as before `install`. Arrays that were made in between
    do not change.
    """
    global _lasting
    with _lock:
        for installation in list(_installations):
            if installation not in _entered:
                installation.uninstall()
        _lasting = 0  # others of them are kept by nobody
        _take_off_unless_needed()


def _put_in_place() -> None:
    """Replace Dask's functions: all of them, or none if there is an error."""
    if _replaced:
        return
    try:
        _replace_all()
    except BaseException:
        _take_off_unless_needed()
        raise


def _replace_all() -> None:
    import distributed.shuffle

    _replace(distributed.shuffle, "rechunk_p2p", partial(tried, "rechunk", rechunked))
    is_expression = da._array_expr_enabled()
    where = "dask.array._array_expr._overlap" if is_expression else "dask.array.overlap"
    for owner in (da, import_module(where)):
        _replace(owner, "map_overlap", partial(tried, "map_overlap", overlapped))
    transforms = import_module("dask.array.fft")
    for name in fft.__all__:
        if not name.endswith(("fft", "fft2", "fftn")):
            continue  # frequencies, and their order: the same whatever is cut
        _replace(transforms, name, partial(tried, "fft", _transformed, getattr(fft, name)))
    if is_expression:
        # Imports parts of Dask that are private as yet, so it is itself imported only here.
        from dask_p2p.tools import expressions

        _replace(expressions.ArrayExpr, "rechunk", expressions.rechunked)
        _replace(expressions.Rechunk, "_lower", expressions.lowered)


def _take_off_unless_needed() -> None:
    if _lasting or _entered:
        return
    for owner, name, original, replacement in _replaced:
        if getattr(owner, name) is replacement:  # no other code has replaced it
            setattr(owner, name, original)
    _replaced.clear()
    _lacking.clear()


def _replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Put a function in the place of Dask's; where it gives None, Dask's is called."""
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # Others may have wrapped this one, and still call it after `uninstall`.
        result = make(*args, **kwargs) if _replaced else None
        return original(*args, **kwargs) if result is None else result

    setattr(owner, name, replacement)
    _replaced.append((owner, name, original, replacement))


def tried(verb: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make an array, and count that by a verb.

    The result is None if this package does not take the arguments, or cannot be used.
    """
    connection = connection_of(current_client())
    if connection in _lacking:
        return None
    try:
        result = make(*args, **kwargs)
    except InputError:
        return None
    except RegistrationError as exc:
        if connection is not None:
            _lacking.add(connection)
        warnings.warn(f"dask_p2p: Dask's own way is used: {exc}", P2PWarning, stacklevel=4)
        return None
    if result is not None:
        with _lock:
            for installation in _installations:
                installation.counts[verb] += 1
    return result


def rechunked(x: DaskArray, chunks: Any, **_: Any) -> Any:
    """Rechunk an array, in the place of `distributed.shuffle.rechunk_p2p`.

    Of its other arguments nothing is needed: they say how Dask merges blocks before.
    """
    if has_unknown_chunks(x) and isinstance(x._meta, np.ndarray):
        return None
    return rechunk(x, chunks)


def overlapped(
    func: Callable[..., Any],
    /,
    *args: Any,
    depth: Any = None,
    boundary: Any = None,
    trim: bool = True,
    align_arrays: bool = True,
    allow_rechunk: bool = True,
    **kwargs: Any,
) -> Any:
    """Map a function over blocks with rims, in the place of `dask.array.map_overlap`.

    All other keywords are for the function, or for `dask.array.map_blocks`. Where blocks are
    smaller than their rims, arrays are cut as Dask cuts them.
    """
    return mapped(
        func,
        args,
        kwargs,
        depth,
        boundary,
        trim=trim,
        align_arrays=align_arrays,
        allow_rechunk=bool(allow_rechunk),
    )


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
