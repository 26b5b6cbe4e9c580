"""Names of the axes of frames, and coordinates along them, as xarray reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import InputError

#: Name of the axis of frames.
FRAME = "frame"
#: Names of numbers that are coordinates of the frames.
TIMES = "t", "time"


@dataclass(frozen=True)
class Coordinate:
    """Values along an axis of frames."""

    values: Any
    attributes: Mapping[str, Any]
    dim: str


def checked_dims(given: Any, ndim: int) -> tuple[str, ...]:
    """Return the names of all axes but that of frames. Raises `InputError` for other names."""
    dims = [f"dim_{axis}" for axis in range(ndim)] if given is None else given
    is_valid = isinstance(dims, Sequence) and len({*dims}) == len(dims) == ndim
    if not is_valid or not all(isinstance(name, str) and name != FRAME for name in dims):
        raise InputError(
            f"dims: expected {ndim} different names of axes, none of them {FRAME!r}, got "
            f"{given!r}. Give a name for each axis of the fields."
        )
    return tuple(dims)


def checked_coords(
    given: Any,
    axes: Mapping[str, int],  # lengths by name
    names: Collection[str],  # of the fields
) -> dict[str, Coordinate]:
    """Return coordinates by the name of their axis. Raises `InputError` for other values."""
    if not isinstance(given, Mapping):
        raise InputError(
            f"coords: expected a mapping of arrays by the names of axes, got "
            f"{type(given).__name__}. Give {{'y': latitudes}}."
        )
    found, lengths = {}, {FRAME: None, **axes}
    for name, values in dict(given).items():
        check_plain(f"coords[{name!r}]", values)
        array = np.asarray(values)
        length = lengths.get(name, -1)
        is_valid = array.ndim == 1 and array.dtype.kind in "biuf" and name not in names
        if not is_valid or length not in (None, len(array)):
            raise InputError(
                f"coords: expected one-dimensional arrays of numbers, as long as the axes "
                f"{[*lengths]}, got {name!r} with {array.dtype} of shape {array.shape}. Leave it "
                f"out, or convert it."
            )
        found[name] = Coordinate(array, dict(getattr(values, "attrs", {})), name)
    return found


def named_axes(version: int, dims: Sequence[str]) -> dict[str, Any]:
    """Return the keywords of a Zarr array whose axes have names, as xarray reads them."""
    if version == 2:
        return {"attributes": {"_ARRAY_DIMENSIONS": [*dims]}}
    return {"dimension_names": [*dims]}
