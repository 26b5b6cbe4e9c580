"""Fourier transforms of DataArrays with their coordinates: ``a.p2p.fft`` and ``ifft``.

Names, order, spacing and attributes of coordinates are those of xrft. `docs/coming-from.md` lists
the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from dask_p2p import fft as transforms
from dask_p2p.backends import backend_for
from dask_p2p.errors import InputError
from dask_p2p.graph import functions_of
from dask_p2p.xarray.variables import as_dask, check_data, check_dimensions, host_values

_EVEN = 1e-3  # largest difference of spacings, relative to their mean


@dataclass(frozen=True)
class _Dimension:
    """A transformed dimension; times are in seconds."""

    name: Hashable  # name of the result's dimension
    number: int
    values: Any  # coordinate of the result
    factor: Any  # factors of the spectrum's elements along this dimension
    attrs: dict[str, Any]


def transform(
    a: Any,
    dim: Any,
    real_dim: Any,
    shift: bool,
    true_phase: bool,
    true_amplitude: bool,
    prefix: str,
) -> Any:
    """See `dask_p2p.xarray.P2PAccessor.fft`."""
    dims = _checked_dims(a, dim, real_dim, list(a.dims))
    values = {name: _read_numbers(a, name) for name in dims if a.sizes[name]}
    descending = [name for name in values if values[name][-1] < values[name][0]]  # as latitudes are
    a = a.isel(dict.fromkeys(descending, slice(None, None, -1)))
    axes = []
    for name in dims:
        first, step = _measure_spacing(_read_numbers(a, name), a[name])
        n = a.sizes[name]
        is_real = name == real_dim
        frequencies = np.fft.rfftfreq(n, step) if is_real else np.fft.fftfreq(n, step)
        if shift and not is_real:
            frequencies = np.fft.fftshift(frequencies)
        factor = np.exp(-2j * np.pi * frequencies * first) if true_phase else np.ones(1)
        attrs: dict[str, Any] = {"spacing": 1 / (n * step), "direct_lag": first + n // 2 * step}
        if units := "s" if a[name].dtype.kind in "mM" else a[name].attrs.get("units"):
            attrs["units"] = f"1/({units})"
        amplitude = step if true_amplitude else 1.0
        number = a.get_axis_num(name)
        axes.append(_Dimension(f"{prefix}{name}", number, frequencies, factor * amplitude, attrs))
    every = [axis.number for axis in axes]
    transform = transforms.fftn if real_dim is None else transforms.rfftn
    y = transform(as_dask(a.variable, a.name), axes=every)
    shifted = every if real_dim is None else every[:-1]
    if shift and shifted:
        y = transforms.fftshift(y, shifted)
    return _assign_coords(a, _scale(y, axes), axes)


def invert(
    a: Any, dim: Any, real_dim: Any, true_phase: bool, true_amplitude: bool, prefix: str
) -> Any:
    """See `dask_p2p.xarray.P2PAccessor.ifft`."""
    spectral_dims = [name for name in a.dims if str(name).startswith(prefix)]
    dims = _checked_dims(a, dim, real_dim, spectral_dims)
    axes, shifted, lengths = [], [], []
    for name in dims:
        number, is_real, size = a.get_axis_num(name), name == real_dim, a.sizes[name]
        frequencies, in_order = _read_frequencies(a, name, 0 if is_real else size // 2)
        if in_order and not is_real:
            shifted.append(number)
        n = 2 * (size - 1) if is_real else size
        step = 1 / (n * abs(frequencies[1] - frequencies[0]))
        start = a[name].attrs.get("direct_lag", 0.0) - n // 2 * step
        factor = np.exp(2j * np.pi * frequencies * start) if true_phase else np.ones(1)
        amplitude = 1 / step if true_amplitude else 1.0
        values = start + step * np.arange(n)
        title = str(name).removeprefix(prefix)
        axes.append(_Dimension(title, number, values, factor * amplitude, {"spacing": step}))
        lengths.append(n)
    y = _scale(as_dask(a.variable, a.name), axes)
    if shifted:
        y = transforms.ifftshift(y, shifted)
    transform = transforms.ifftn if real_dim is None else transforms.irfftn
    y = transform(y, lengths, [axis.number for axis in axes])
    return _assign_coords(a, y, axes)


def transform_dataset(
    ds: Any, dim: Any, real_dim: Any, transform: Callable[[Any], Any], prefix: str = ""
) -> Any:
    """Return a dataset with the transforms of the arrays that have the dimensions.

    Without dimensions they are all arrays with a dimension that has the prefix. Raises `InputError`
    if no array, or an array of several dimensions only some, has the dimensions.
    """
    chosen_dims = {*_listed(dim or ()), *([] if real_dim is None else [real_dim])}
    arrays = {}
    for name, a in ds.data_vars.items():
        of_array = chosen_dims or {name for name in a.dims if str(name).startswith(prefix)}
        if of_array.isdisjoint(a.dims):
            continue
        if not of_array <= {*a.dims}:
            raise InputError(
                f"expected arrays with all of the dimensions dim={dim!r}, real_dim={real_dim!r} or "
                f"with none of them, got {name!r} with {a.dims}. Drop it: ds.drop_vars({name!r})."
            )
        arrays[name] = transform(a)
    if not arrays:
        check_dimensions(chosen_dims, tuple(ds.sizes))
        raise InputError(
            f"expected dimensions of {tuple(ds.sizes)}, got dim={dim!r}, real_dim={real_dim!r}."
        )
    gone = {d for name, a in arrays.items() for d in ds[name].dims if d not in a.dims}
    coords = {name: x for name, x in ds.coords.items() if gone.isdisjoint(x.dims)}
    return xr.Dataset({name: arrays.get(name, ds[name]) for name in ds}, coords, ds.attrs)


def _checked_dims(a: Any, dim: Any, real_dim: Any, every: Sequence[Hashable]) -> list[Hashable]:
    """Return the dimensions to transform; the one of real numbers is last."""
    names = every if dim is None else _listed(dim)
    dims = [name for name in names if name != real_dim]
    dims += [] if real_dim is None else [real_dim]
    check_dimensions(dims, a.dims)
    if not dims or len({*dims}) < len(dims):
        raise InputError(
            f"expected dimensions of {a.dims}, each once, got dim={dim!r}, real_dim={real_dim!r}."
        )
    return dims


def _listed(dim: Any) -> list[Hashable]:
    return [dim] if isinstance(dim, str) else list(dim)


def _read_frequencies(a: Any, name: Hashable, zero: int) -> tuple[Any, bool]:
    """Return frequencies, and whether they ascend. `zero` is the index of 0 in ascending order."""
    n, values = a.sizes[name], _read_numbers(a, name)
    in_order = bool(n) and values[0] < values[-1]
    first, step = _measure_spacing(values if in_order else np.fft.fftshift(values), a[name])
    if abs(first + zero * step) > _EVEN * step:
        raise InputError(
            f"expected frequencies along {name!r} with 0 at index {zero} in ascending order, got "
            f"{host_values(a[name].variable)[:4]}... Use the frequencies of a.p2p.fft."
        )
    frequencies = step * (np.arange(n) - zero)
    return frequencies if in_order else np.fft.ifftshift(frequencies), in_order


def _measure_spacing(values: Any, coordinate: Any) -> tuple[float, float]:
    labels, name = host_values(coordinate.variable), coordinate.name
    step = (values[-1] - values[0]) / (values.size - 1) if values.size > 1 else 0.0
    # Rounded numbers are not exactly evenly spaced.
    rounding = np.spacing(abs(labels).max()) if labels.dtype.kind == "f" and labels.size else 0
    steps = np.diff(values)
    if not step > 0 or not (steps > 0).all() or abs(steps - step).max() > _EVEN * step + rounding:
        raise InputError(
            f"expected a coordinate {name!r} of at least two values at even distances, got "
            f"{labels[:4]}... Interpolate the array, or drop the coordinate: a.drop_vars({name!r})."
        )
    return float(values[0]), float(step)


def _read_numbers(a: Any, name: Hashable) -> Any:
    """Return a coordinate as float64; times as seconds after the first one."""
    if not isinstance(a[name].variable, xr.IndexVariable):
        check_data(a[name].variable.data, name)
    values = host_values(a[name].variable)
    kind = values.dtype.kind
    try:
        if kind in "mM":
            return (values - values[:1]) / np.timedelta64(1, "s")
        if kind == "O" and all(hasattr(value, "calendar") for value in values):  # cftime's
            return np.array([after.total_seconds() for after in values - values[:1]])
    except TypeError:  # calendars differ
        kind = "O"
    if kind not in "iuf":
        raise InputError(
            f"expected a coordinate {name!r} of numbers or times, got {values[:4]} of "
            f"{values.dtype}. Drop it, a.drop_vars({name!r}), or convert it to numbers."
        )
    return values.astype(float)


def _scale(x: Any, axes: Sequence[_Dimension]) -> Any:
    x = x * float(np.prod([axis.factor[0] for axis in axes if axis.factor.size == 1]))
    module = backend_for(x._meta).module
    for axis in axes:
        if axis.factor.size > 1:
            dtype = np.result_type(x.dtype, np.complex64)
            dtype = dtype if np.iscomplexobj(axis.factor) else np.zeros(0, dtype).real.dtype
            chunks = x.chunks[axis.number]
            factor = functions_of(x).from_array(axis.factor.astype(dtype), chunks=chunks)
            factor = factor.map_blocks(module.asarray, meta=module.empty(0, dtype))
            x = x * factor.reshape(-1, *(1,) * (x.ndim - axis.number - 1))
    return x


def _assign_coords(a: Any, y: Any, axes: Sequence[_Dimension]) -> Any:
    names = {a.dims[axis.number]: axis.name for axis in axes}
    coords = {name: x for name, x in a.coords.items() if names.keys().isdisjoint(x.dims)}
    new = {axis.name: (axis.name, axis.values, axis.attrs) for axis in axes}
    dims = [names.get(name, name) for name in a.dims]
    result = xr.DataArray(y, {**coords, **new}, dims, attrs=a.attrs)
    return result.rename(a.name)  # also of an array without a name
