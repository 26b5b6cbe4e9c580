"""Accessors of xarray: ``a.p2p.transpose("y", "x")`` and ``a.p2p.chunk({"x": 1000})``.

Importing this module adds them to arrays and datasets:

>>> import dask.array
>>> import xarray
>>> import dask_p2p.xarray
>>> a = xarray.DataArray(dask.array.ones((6, 4), chunks=(2, 4)), dims=("x", "y"))
>>> a.p2p.transpose("y", "x").chunksizes
Frozen({'y': (2, 1, 1), 'x': (6,)})
>>> a.p2p.chunk(x=-1, y=2).chunksizes
Frozen({'x': (6,), 'y': (2, 2)})
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import xarray as xr

from dask_p2p.errors import AxesError, ChunksError
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.ops.transpose import transpose

__all__ = ["P2PAccessor"]


@xr.register_dataarray_accessor("p2p")
@xr.register_dataset_accessor("p2p")
class P2PAccessor:
    """What this package does by names of dimensions.

    Coordinates that are Dask arrays are moved like the data; those in memory stay there.

    Parameters
    ----------
    given : xarray.DataArray or xarray.Dataset
        What it is the accessor of.
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def transpose(self, *dims: Any, chunks: Mapping[Any, Any] | None = None) -> Any:
        """Transpose Dask arrays by `dask_p2p.transpose`, and what is in memory as xarray does.

        Parameters
        ----------
        *dims : hashable or ``...``
            Names of the dimensions in their new order, ``...`` for all that are not named. By
            default the order is reversed.
        chunks : mapping of hashable to int, str or tuple, optional
            Chunks of the result by dimension. By default those of `dask_p2p.transpose`; arrays of
            which no dimension is named, and whose order stays, keep theirs.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            With the coordinates and attributes of what was given.

        Raises
        ------
        AxesError
            If `dims` are not the dimensions.
        ChunksError
            If `chunks` has a name that is no dimension's, or does not fit.
        UnsupportedArrayError
            If blocks are masked, sparse or otherwise more than bytes.
        """
        sizes = self._checked(chunks or {})
        try:
            result = self._given.transpose(*dims)
        except ValueError as exc:
            raise AxesError(
                f"expected the dimensions {self._dims} in any order, or `...` for those that are "
                f"not named, got {dims}: {exc}."
            ) from exc

        def change(before: Any, after: Any) -> Any:
            wanted = {i: sizes[dim] for i, dim in enumerate(after.dims) if dim in sizes}
            if after.chunks is None or (before.dims == after.dims and not wanted):
                return after
            axes = [before.dims.index(dim) for dim in after.dims]
            return after.copy(deep=False, data=transpose(before.data, axes, chunks=wanted or None))

        return self._changed(result, change)

    def chunk(self, chunks: Any = None, **chunks_kwargs: Any) -> Any:
        """Cut Dask arrays into other chunks by `dask_p2p.rechunk`, and others as xarray does.

        Parameters
        ----------
        chunks : mapping of hashable to int, str or tuple; or int or str for all, optional
            Chunks of the result by dimension. Dimensions that are not named stay as they are.
        **chunks_kwargs
            The same, by keywords.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            With the coordinates and attributes of what was given.

        Raises
        ------
        ChunksError
            If `chunks` has a name that is no dimension's, or does not fit.
        UnsupportedArrayError
            If blocks are masked, sparse or otherwise more than bytes.
        """
        by_name = {} if chunks is None else chunks
        if not isinstance(by_name, Mapping):
            by_name = dict.fromkeys(self._dims, by_name)
        sizes = self._checked({**by_name, **chunks_kwargs})

        def change(before: Any, _: Any) -> Any:
            if before.chunks is None:
                return before.chunk({dim: sizes[dim] for dim in before.dims if dim in sizes})
            wanted = {i: sizes[dim] for i, dim in enumerate(before.dims) if dim in sizes}
            return before.copy(deep=False, data=rechunk(before.data, wanted))

        return self._changed(self._given, change)

    @property
    def _dims(self) -> tuple[Hashable, ...]:
        return tuple(self._given.sizes)

    def _checked(self, chunks: Mapping[Any, Any]) -> Mapping[Any, Any]:
        unknown = [name for name in chunks if name not in self._dims]
        if unknown:
            raise ChunksError(
                f"expected chunks of the dimensions {self._dims}, got some of {unknown}. Give them "
                f"by the names of dimensions, like {{{next(iter(self._dims), 'x')!r}: 1000}}."
            )
        return chunks

    def _changed(self, result: Any, change: Callable[[Any, Any], Any]) -> Any:
        """Return `result` with its variables changed, which are given as they were and are."""
        given = self._given
        coords = [name for name, of in given.coords.items() if of.chunks is not None]
        result = result.assign_coords(
            {name: change(given[name].variable, result[name].variable) for name in coords}
        )
        if isinstance(given, xr.DataArray):
            return result.copy(deep=False, data=change(given.variable, result.variable).data)
        names = given.data_vars
        return result.assign(
            {name: change(given[name].variable, result[name].variable) for name in names}
        )
