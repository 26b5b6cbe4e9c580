"""Power spectra, cross spectra, trends and windows of DataArrays.

Names and scalings are those of xrft and scipy. `docs/coming-from.md` lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import xarray as xr
from dask.array.utils import meta_from_array

from dask_p2p.errors import InputError
from dask_p2p.xarray.spectra import along, ascending, checked_dims, numbers, spectrum
from dask_p2p.xarray.variables import as_dask, check_labels

#: Name of a window, or a function of its length that returns its values.
Window: TypeAlias = str | Callable[[int], Any]

_SCALINGS = ("density", "spectrum")
_TRENDS = ("constant", "linear")
_COSINES = {"hann": (0.5, 0.5), "hamming": (0.54, 0.46), "blackman": (0.42, 0.5, 0.08)}


def detrended(a: Any, dim: Any, kind: str) -> Any:
    """See `dask_p2p.xarray.P2PAccessor.detrend`."""
    _check_known("kind", kind, _TRENDS)
    dims = checked_dims(a, dim, None, list(a.dims))
    axes = [a.get_axis_num(name) for name in dims]
    x = as_dask(a.variable, a.name)
    y = x - _mean(x, axes)
    for name, axis in zip(dims, axes, strict=True) if kind == "linear" else ():
        # On a grid the centred coordinates are orthogonal, so each slope can be fitted alone.
        centred = numbers(a, name) - numbers(a, name).mean()
        if not centred.any():
            continue
        values = centred / abs(centred).max()
        positions = along(x, axis, values)
        slope = _mean(x * positions, axes) / float((values**2).mean())
        y = y - slope * positions
    return _with_values(a, y)


def _mean(x: Any, axes: Sequence[int]) -> Any:
    """Return the mean along axes, which stay with one element.

    `dask_array` declares NumPy blocks for reductions of all arrays, and its mean fails for CuPy's.
    """
    total = x.sum(axes, keepdims=True)
    meta = meta_from_array(x._meta, x.ndim, total.dtype)
    return total.map_blocks(_itself, meta=meta) / prod(x.shape[axis] for axis in axes)


def _itself(block: Any) -> Any:
    return block


def windowed(a: Any, dim: Any, window: Window) -> Any:
    """See `dask_p2p.xarray.P2PAccessor.window`."""
    dims = checked_dims(a, dim, None, list(a.dims))
    x = as_dask(a.variable, a.name)
    for name in dims:
        x = x * along(x, a.get_axis_num(name), _values(window, a.sizes[name]))
    return _with_values(a, x)


def density(
    a: Any,
    other: Any,
    dim: Any,
    real_dim: Any,
    scaling: str,
    detrend: str | None,
    window: Window | None,
    shift: bool,
    prefix: str,
) -> Any:
    """See `power_spectrum` and `cross_spectrum` of `dask_p2p.xarray.P2PAccessor`.

    Without an `other` array it is the power spectrum.
    """
    _check_known("scaling", scaling, _SCALINGS)
    _check_known("detrend", detrend, (*_TRENDS, None))
    dims = checked_dims(a, dim, real_dim, list(a.dims))

    def transformed(one: Any) -> Any:
        one = ascending(one, dims)
        one = one if detrend is None else detrended(one, dims, detrend)
        one = one if window is None else windowed(one, dims, window)
        return spectrum(one, dims, real_dim, shift, False, True, prefix)

    s = transformed(a)
    y = s.data * s.data.conj()
    y = y.real if other is None else s.data * transformed(_like(a, other)).data.conj()
    if real_dim is not None:
        y = y * along(y, a.get_axis_num(real_dim), _twins(a.sizes[real_dim]))
    spacings = {name: s[f"{prefix}{name}"].attrs["spacing"] for name in dims}
    y = y * _factor({name: a.sizes[name] for name in dims}, spacings, scaling, window)
    # Without attributes, which may be units of the amplitude.
    return xr.DataArray(y, s.coords, s.dims).rename(a.name)


def _like(a: Any, other: Any) -> Any:
    """Return the other array with the order of dimensions of the first; labels must agree."""
    if not isinstance(other, xr.DataArray) or {*other.dims} != {*a.dims}:
        got = other.dims if isinstance(other, xr.DataArray) else type(other).__name__
        raise InputError(
            f"other: expected a DataArray with the dimensions {a.dims}, got {got}. Broadcast it "
            "first: xarray.broadcast."
        )
    check_labels(a, other, "other: expected the sizes and labels of the first array")
    return other.transpose(*a.dims)


def _twins(n: int) -> Any:
    """Return the number of frequencies that each one stands for in a transform of real numbers.

    Zero, and half of the sampling rate, have no twin of the other sign.

    >>> _twins(4).tolist(), _twins(5).tolist()
    ([1.0, 2.0, 1.0], [1.0, 2.0, 2.0])
    """
    twins = np.full(n // 2 + 1, 2.0)
    twins[0] = 1
    if n % 2 == 0:
        twins[-1] = 1
    return twins


def _factor(
    sizes: dict[Hashable, int], spacings: dict[Hashable, float], scaling: str, window: Window | None
) -> float:
    """Return the factor that turns squares of integrals into densities or squares of amplitudes."""
    factor = 1.0
    for name, n in sizes.items():
        values = np.ones(1) if window is None else _values(window, n)
        if scaling == "density":
            factor *= spacings[name] / float((values**2).mean())
        else:
            factor *= (spacings[name] / float(values.mean())) ** 2
    return factor


def _values(window: Window, n: int) -> Any:
    """Return the values of a periodic window; 1 for a single element.

    >>> _values("hann", 4).round(9).tolist()
    [0.0, 0.5, 1.0, 0.5]
    """
    if isinstance(window, str):
        _check_known("window", window, tuple(_COSINES), " Or pass a function of the length.")
        angles = 2 * np.pi * np.arange(n) / n if n > 1 else np.array([np.pi])
        return sum((-1) ** k * of * np.cos(k * angles) for k, of in enumerate(_COSINES[window]))
    values = np.asarray(window(n), float)
    if values.shape != (n,):
        raise InputError(
            f"window: expected a function that returns {n} numbers for n={n}, got an array of "
            f"shape {values.shape}. Return one number for each element."
        )
    return values


def _check_known(name: str, given: Any, known: Sequence[str | None], more: str = "") -> None:
    if not isinstance(given, str | None) or given not in known:
        listed = ", ".join(map(repr, known))
        raise InputError(
            f"{name}: expected one of {listed}, got {given!r}. Use one of these.{more}"
        )


def _with_values(a: Any, y: Any) -> Any:
    result = a.copy(deep=False, data=y)
    result.encoding = {}  # the encoding belongs to other values
    return result
