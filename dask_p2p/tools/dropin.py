"""`install`: redirects calls of Dask's functions to this package, for unchanged code.

`dask.array.rechunk` chooses between two methods, tasks and the peer-to-peer shuffle, and has no
hook for a third. So `install` replaces the function of the second method where Dask looks it up.
Replacing its layer during graph optimisation would be too late: by then Dask has merged blocks by
tasks, and the dtype is lost. The scheduler would also have to import the optimiser of all arrays.

`install` replaces `map_overlap` in `dask.array`, and in the module where array methods and other
functions of Dask look it up. It replaces functions of `dask.array.fft` for arrays that Dask's
functions reject: those with several blocks along a transformed axis. It replaces `store` and
`to_zarr`, so that tasks write whole units of Zarr arrays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from importlib import import_module
from typing import Any, Literal

import dask.array as da
import numpy as np

from dask_p2p import fft
from dask_p2p.errors import InputError
from dask_p2p.graph import is_dask_array
from dask_p2p.loading import call_when_imported
from dask_p2p.ops.arguments import has_unknown_chunks
from dask_p2p.ops.overlap import map_with_halos
from dask_p2p.ops.rechunk import rechunk as own_rechunk
from dask_p2p.tools import zarr_stores
from dask_p2p.tools.zarr_stores import ACTIVE, LACKING, LOCK, is_taken_in_any_case, try_replace
from dask_p2p.types import DaskArray

_restoring = ExitStack()  # restores all functions, and waits for no further imports of packages


class Installation(AbstractContextManager["Installation"]):
    """The result of `install`: a context manager that counts the calls this package has taken.

    It ends with its `with` statement. When the last installation of the process ends, Dask's
    functions are restored.

    Attributes
    ----------
    counts : Counter
        Number of calls taken in place of Dask, by function: "rechunk", "map_overlap", "fft", and
        "store" for arrays that were rechunked before they are written to Zarr.
    """

    def __init__(self, rechunk: str = "p2p") -> None:
        self.counts: Counter[str] = Counter()
        self.takes_all = rechunk == "all"  # rechunks, not only those that Dask would move by p2p
        self.depth = 0  # number of its running `with` statements

    @property
    def count(self) -> int:
        """Sum of `counts`."""
        return self.counts.total()

    def uninstall(self) -> None:
        """End this installation only; no effect if it has ended."""
        with LOCK:
            self.depth = 0
            ACTIVE.discard(self)
            if not ACTIVE:
                _restoring.close()
                LACKING.clear()

    def __enter__(self) -> Installation:
        with LOCK:
            _activate(self)
            self.depth += 1
        return self

    def __exit__(self, *_: Any) -> None:
        with LOCK:
            if self.depth > 1:
                self.depth -= 1
            else:
                self.uninstall()

    def __repr__(self) -> str:
        verbs = ", ".join(f"{verb} {count}" for verb, count in self.counts.items())
        return f"<dask_p2p in Dask's place: {verbs or 'nothing yet'}>"


def install(*, rechunk: Literal["p2p", "all"] = "p2p") -> Installation:
    """Use this package in place of Dask for p2p rechunks, `map_overlap`, FFTs and Zarr stores.

    Code that calls ``x.rechunk(...)``, ``x.T.rechunk(...)``, ``xarray.DataArray.chunk(...)`` or
    ``x.map_overlap(...)`` needs no change. Its results have the same values, chunks, dtype and
    block type.

    From now on, this package runs every rechunk of this process that uses Dask's method ``p2p``.
    Dask uses it if the caller requests it, or with a client if the graph exceeds a certain size.
    Rechunks by tasks remain Dask's. Functions of ``da.fft`` accept axes with several blocks. The
    exchange includes a lazy transpose before such a rechunk, as in ``x.T.rechunk(...)``.

    Each task of ``da.store`` and ``to_zarr`` writes whole chunks, or shards, of a Zarr array. Where
    blocks do not fit them, one exchange makes larger or smaller ones.

    Parameters
    ----------
    rechunk : {"p2p", "all"}, optional
        Rechunks to take. "all": with a client, also those that Dask would do by tasks, unless they
        name this method or only split blocks. Default: those that use the method ``p2p``.

    Returns
    -------
    Installation
        A context manager that ends this installation. Without a `with` statement the installation
        lasts until its ``uninstall()``, or `dask_p2p.uninstall`. Its ``count`` is the number of
        calls that this package has taken since then; its ``counts`` has them by function.

    Raises
    ------
    InputError
        If `rechunk` has another value.

    See Also
    --------
    uninstall : End all installations.
    explain : The decision to fuse a graph.

    Notes
    -----
    A process counts the installations of all its threads and libraries. When the last one ends,
    Dask's functions are restored.

    Dask's own functions still handle masked or sparse blocks, NumPy arrays of unknown chunk sizes,
    and all arrays on a cluster that lacks the package (with one warning). Blocks must have the
    dtype and the shape of their array; if not, a `BlockMismatchError` names the block.

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
    if rechunk not in ("p2p", "all"):
        raise InputError(
            f"expected rechunk='p2p' or 'all', got {rechunk!r}. Leave it out for 'p2p'."
        )
    installation = Installation(rechunk)
    with LOCK:
        _activate(installation)
    return installation


def uninstall() -> None:
    """End all installations except those inside their `with` statements.

    If no such statement is running, Dask's functions are restored. Arrays that were made before do
    not change.

    See Also
    --------
    install : Use this package in place of Dask.

    Examples
    --------
    >>> used = install()
    >>> uninstall()
    """
    with LOCK:
        for installation in [*ACTIVE]:
            if not installation.depth:
                installation.uninstall()


def _activate(installation: Installation) -> None:
    """Begin an installation. The first one replaces all functions, or none if an error occurs."""
    is_first = not ACTIVE
    ACTIVE.add(installation)
    if is_first:
        try:
            _replace_all()
        except BaseException:
            installation.uninstall()
            raise


def _replace_all() -> None:
    import distributed.shuffle

    _replace(distributed.shuffle, "rechunk_p2p", partial(try_replace, "rechunk", rechunked))
    # `da.rechunk` is the function, not the module.
    _replace(
        sys.modules["dask.array.rechunk"],
        "_choose_rechunk_method",
        lambda before, after, **_: "p2p" if is_taken_in_any_case(before, after) else None,
    )
    is_expression = da._array_expr_enabled()
    where = "dask.array._array_expr._overlap" if is_expression else "dask.array.overlap"
    for owner in (da, import_module(where)):
        _replace(owner, "map_overlap", partial(try_replace, "map_overlap", overlapped))
    for name in fft.__all__:
        if name.endswith(("fft", "fft2", "fftn")):  # Dask has frequencies and shifts for all chunks
            transform = partial(try_replace, "fft", _transform_cut_axes, getattr(fft, name))
            _replace(import_module("dask.array.fft"), name, transform)
    if not is_expression:  # there Dask has no function of these
        _replace_stores(da, import_module("dask.array.core"))
        _restoring.callback(call_when_imported("xarray", _replace_writers))
    _restoring.callback(call_when_imported("dask_array", _replace_package_stores))
    if is_expression:
        from dask.array._array_expr._expr import ArrayExpr  # private

        _replace(ArrayExpr, "rechunk", _rechunk_expression, calls_original=True)


def _replace_stores(*owners: Any) -> None:
    for owner in owners:
        for function in (zarr_stores.store, zarr_stores.to_zarr):
            _replace(owner, function.__name__, function, calls_original=True)


def _replace_writers(package: Any) -> None:
    with LOCK:
        if ACTIVE:  # not uninstalled by another thread
            for owner in (package.Dataset, package.DataArray):
                _replace(owner, "to_zarr", zarr_stores.xarray_to_zarr, calls_original=True)


def _replace_package_stores(package: Any) -> None:
    """Replace public functions of the package `dask_array`, which xarray calls too."""
    with LOCK:
        if ACTIVE:  # not uninstalled by another thread
            _replace_stores(package, package.io)


def _replace(
    owner: Any, name: str, make: Callable[..., Any], *, calls_original: bool = False
) -> None:
    """Replace a function of Dask.

    If the replacement returns None, Dask's function is called. With `calls_original` the
    replacement calls it: it is the first argument.
    """
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # Other code may have wrapped this function, and still call it after `uninstall`.
        if ACTIVE and calls_original:
            return make(original, *args, **kwargs)
        result = make(*args, **kwargs) if ACTIVE else None
        return original(*args, **kwargs) if result is None else result

    def restore() -> None:
        if getattr(owner, name) is replacement:  # not replaced by other code
            setattr(owner, name, original)

    setattr(owner, name, replacement)
    _restoring.callback(restore)


def rechunked(x: DaskArray, chunks: Any, **_: Any) -> Any:
    """Rechunk an array, in place of `distributed.shuffle.rechunk_p2p`.

    The other arguments are not needed: they control how Dask first merges blocks.
    """
    if has_unknown_chunks(x) and isinstance(x._meta, np.ndarray):
        return None
    return own_rechunk(x, chunks)


def _rechunk_expression(original: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
    """Rechunk an expression, in place of `ArrayExpr.rechunk`.

    The method is chosen now. Dask would choose it when it computes, perhaps after `uninstall`, and
    its own ``p2p`` raises NotImplementedError for expressions.
    """
    rechunk = original(expr, *args, **kwargs)
    if rechunk.chunks == expr.chunks:
        return expr
    choose = sys.modules["dask.array.rechunk"]._choose_rechunk_method
    method = rechunk.method or choose(expr.chunks, rechunk.chunks, threshold=rechunk.threshold)
    if method == "p2p":
        x = da.Array(expr)
        result = try_replace("rechunk", own_rechunk, x, rechunk.chunks)
        if result is not None:
            return result.expr
    return rechunk if rechunk.method else rechunk.substitute_parameters({"method": "tasks"})


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
    """Map a function over blocks with halos, in place of `dask.array.map_overlap`.

    All other keywords are for the function, or for `dask.array.map_blocks`. If blocks are smaller
    than their halo, arrays are rechunked as Dask does it.
    """
    options = {"trim": trim, "align_arrays": align_arrays, "allow_rechunk": bool(allow_rechunk)}
    return map_with_halos(func, args, kwargs, depth, boundary, **options)


def _transform_cut_axes(
    function: Any,
    a: DaskArray,
    s: Any = None,
    axes: Any = None,
    norm: Any = None,
    *,
    n: Any = None,
    axis: Any = None,
) -> Any:
    """Transform an array if one of the axes has several blocks; None leaves it to Dask."""
    if not is_dask_array(a):
        return None
    is_along_one = function.__name__.endswith("fft")
    s, axes = s if n is None else n, axes if axis is None else axis
    if axes is None:  # if lengths are given, Dask takes the first axes, NumPy the last ones
        default_axes = {"t": (-1,), "2": (-2, -1)}.get(function.__name__[-1])
        axes = default_axes or range(a.ndim if s is None else len(s))
    along = tuple(np.atleast_1d(axes))
    if all(-a.ndim <= axis < a.ndim and len(a.chunks[axis]) == 1 for axis in along):
        return None
    return function(a, s, along[0] if is_along_one else along, norm)
