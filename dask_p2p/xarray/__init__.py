"""Accessors of xarray: ``a.p2p.transpose("y", "x")``, ``a.p2p.chunk({"x": 1000})`` and so on.

Importing this module adds them to arrays and datasets:

>>> import dask.array
>>> import xarray
>>> import dask_p2p.xarray
>>> a = xarray.DataArray(dask.array.ones((6, 4), chunks=(2, 4)), dims=("x", "y"))
>>> a.p2p.transpose("y", "x").chunksizes
Frozen({'y': (2, 1, 1), 'x': (6,)})
>>> a.p2p.chunk(x=-1, y=2).chunksizes
Frozen({'x': (6,), 'y': (2, 2)})
>>> int(a.p2p.map_overlap(lambda block: block * 2, {"x": 1}, {"x": "periodic"}).sum())
48
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import xarray as xr

from dask_p2p.errors import AxesError, ChunksError
from dask_p2p.ops.arguments import check_names
from dask_p2p.ops.overlap import map_overlap
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.ops.transpose import transpose
from dask_p2p.xarray.by_name import by_dimension, iterated, named_in_errors
from dask_p2p.xarray.spectra import spectrum, undone
from dask_p2p.xarray.variables import as_dask, changed, chunked, in_memory, sizes_by_name, with_data

__all__ = ["P2PAccessor"]

T = TypeVar("T", xr.DataArray, xr.Dataset)


@xr.register_dataarray_accessor("p2p")
@xr.register_dataset_accessor("p2p")
class P2PAccessor(Generic[T]):
    """Operations of this package by names of dimensions.

    Coordinates that are Dask arrays are moved like the data; those in memory stay there.

    To type checkers ``a.p2p`` is of any type, since xarray adds it when it runs. The results of
    ``P2PAccessor(a)``, which does the same, have types.

    Parameters
    ----------
    given : xarray.DataArray or xarray.Dataset
        The array or dataset that it is the accessor of.
    """

    def __init__(self, given: T) -> None:
        self._given: Any = given

    def transpose(self, *dims: Any, chunks: Mapping[Any, Any] | None = None) -> T:
        """Transpose Dask arrays by `dask_p2p.transpose`, and arrays in memory as xarray does.

        Parameters
        ----------
        *dims : hashable or ``...``
            Names of the dimensions in their new order, ``...`` for all that are not named. By
            default the order is reversed.
        chunks : mapping of hashable to int, str, tuple or Resampler, optional
            Chunks of the result by dimension. By default those of `dask_p2p.transpose`. An array
            keeps its chunks if its order stays and none of its dimensions is named.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            With the coordinates and attributes of the array or dataset given. Encodings lose the
            chunks of the file that was read, where blocks or the order of dimensions change.

        Raises
        ------
        AxesError
            If `dims` are not the dimensions.
        ChunksError
            If `chunks` has a name that is no dimension's, or does not fit.
        UnsupportedArrayError
            If an array has units, as those of pint have, or is another one around a Dask array; or
            if blocks are masked, sparse or otherwise more than bytes.
        """
        sizes = self._sizes(chunks or {})
        try:
            result = self._given.transpose(*dims)
        except ValueError as exc:
            raise AxesError(
                f"expected the dimensions {self._dims} in any order, or `...` for those that are "
                f"not named, got {dims}: {exc}."
            ) from exc

        def change(before: Any, after: Any, name: Hashable) -> Any:
            wanted = {i: sizes[dim] for i, dim in enumerate(after.dims) if dim in sizes}
            if in_memory(before) or (before.dims == after.dims and not wanted):
                return after
            axes = [before.dims.index(dim) for dim in after.dims]
            with named_in_errors(after.dims, wanted):
                data = transpose(as_dask(before, name), axes, chunks=wanted or None)
            return after.copy(deep=False, data=data)

        return changed(self._given, result, change)

    def chunk(self, chunks: Any = None, **chunks_kwargs: Any) -> T:
        """Cut Dask arrays into other chunks by `dask_p2p.rechunk`, and others as xarray does.

        Parameters
        ----------
        chunks : mapping of hashable to int, str, tuple or Resampler; or one for all, optional
            Chunks of the result by dimension. Dimensions that are not named keep their chunks. A
            resampler, such as `xarray.groupers.TimeResampler`, gives each of its groups a block.
        **chunks_kwargs
            The same, by keywords.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            As of `transpose`.

        Raises
        ------
        ChunksError, UnsupportedArrayError
            As of `transpose`.
        """
        sizes = {**self._sizes({} if chunks is None else chunks), **self._sizes(chunks_kwargs)}

        def change(before: Any, _: Any, name: Hashable) -> Any:
            if in_memory(before):
                named = {dim: sizes[dim] for dim in before.dims if dim in sizes}
                return chunked(before, named, name)
            wanted = {i: sizes[dim] for i, dim in enumerate(before.dims) if dim in sizes}
            if not wanted:
                return before
            with named_in_errors(before.dims, wanted):
                return before.copy(deep=False, data=rechunk(as_dask(before, name), wanted))

        return changed(self._given, self._given, change)

    def map_overlap(
        self,
        func: Callable[..., Any],
        /,
        depth: Mapping[Any, Any] | int,
        boundary: Any = None,
        **kwargs: Any,
    ) -> T:
        """Map a function over blocks with rims of their neighbours, by `dask_p2p.map_overlap`.

        Arrays in memory are taken as one block. Arrays of a dataset that have no dimension with
        rims stay as they are, and so do coordinates.

        Parameters
        ----------
        func : callable
            Takes a block with its rims, and returns an array of its shape.
        depth : mapping of hashable to int or pair; or int for all
            Widths of the rims by dimension, in elements. Dimensions that are not named have none.
        boundary : mapping of hashable to str or scalar; or one for all, optional
            What lies beyond the ends, by dimension: see `dask_p2p.map_overlap`.
        **kwargs
            Of `dask_p2p.map_overlap`, and of `func`.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            As of `transpose`.

        Raises
        ------
        InputError
            If `depth` or `boundary` has a name that is no dimension's, or a rim is wider than the
            array.
        UnsupportedArrayError
            As of `transpose`.
        """
        widths = by_dimension(self._dims, "depth", depth)
        kinds = by_dimension(self._dims, "boundary", boundary)

        def change(before: Any, _: Any, name: Hashable) -> Any:
            rims = {i: widths[dim] for i, dim in enumerate(before.dims) if dim in widths}
            if not rims:
                return before
            beyond = {i: kinds[dim] for i, dim in enumerate(before.dims) if dim in kinds}
            with named_in_errors(before.dims, rims, beyond):
                x = as_dask(before, name)
                y = map_overlap(func, x, depth=rims, boundary=beyond, **kwargs)
            after = before.copy(deep=False, data=y)
            after.encoding = {}  # of other values
            return after

        return with_data(self._given, self._given, change)

    @overload
    def iterate(
        self: P2PAccessor[xr.DataArray],
        func: Callable[..., Any],
        /,
        depth: Any,
        steps: int,
        *,
        fields: Sequence[xr.DataArray],
        **kwargs: Any,
    ) -> tuple[xr.DataArray, ...]: ...

    @overload
    def iterate(
        self,
        func: Callable[..., Any],
        /,
        depth: Any,
        steps: int,
        *,
        fields: Any = ...,
        **kwargs: Any,
    ) -> T: ...

    def iterate(
        self,
        func: Callable[..., Any],
        /,
        depth: Any,
        steps: int,
        *,
        fields: Any = None,
        boundary: Any = "periodic",
        constants: Any = (),
        **kwargs: Any,
    ) -> Any:
        """Apply a function of blocks with rims again and again, by `dask_p2p.iterate`.

        Arrays in memory are taken as one block.

        Parameters
        ----------
        func : callable
            ``func(*fields, *constants, out=out)``, of NumPy arrays with the order of dimensions of
            the newest field: see `dask_p2p.iterate`.
        depth : mapping of hashable to int or pair; or int for all; or list of these
            Widths of the rims by dimension, in elements; in a list for each field. Dimensions that
            are not named have none.
        steps : int
            How often `func` is applied, at most.
        fields : sequence, optional
            Levels of time, the newest first. Of a dataset: the names of its arrays. Of an array,
            which is the newest itself: those before it, as DataArrays.
        boundary : mapping of hashable to str or scalar; or one for all, optional
            What lies beyond the ends, by dimension. Those that are not named have "none".
        constants : sequence, optional
            What `func` reads in each step: names of the dataset's variables, or of the array's
            coordinates; DataArrays; or values, which are given as they are. DataArrays are
            repeated along dimensions that they lack.
        **kwargs
            Of `dask_p2p.iterate`, and of `func`.

        Returns
        -------
        xarray.DataArray, tuple of them or xarray.Dataset
            With the coordinates and attributes of what was given. A dataset has the fields
            replaced; of an array with `fields` there is one for each.

        Raises
        ------
        InputError
            If a name is no dimension's, or no variable's, or labels of dimensions differ.
        ChunksError, UnsupportedArrayError, BlockMismatchError, SectionError
            As `dask_p2p.iterate` raises them.

        Examples
        --------
        >>> def smooth(u, out):
        ...     out[:] = (u[:-2] + u[2:]) / 2
        >>> a = xr.DataArray([0.0, 0, 4, 0, 0, 0], dims="x").chunk(x=3)
        >>> a.p2p.iterate(smooth, {"x": 1}, 2).values
        array([1., 0., 2., 0., 1., 0.])
        """
        count = sum(len(of) if isinstance(of, (list, tuple)) else 1 for of in (fields, constants))
        is_before = fields is not None and isinstance(self._given, xr.DataArray)
        check_names(func, count + is_before, type(self).iterate, locals())
        return iterated(self._given, func, depth, steps, fields, boundary, constants, kwargs)

    def fft(
        self: P2PAccessor[xr.DataArray],
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        shift: bool = True,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> xr.DataArray:
        """Transform an array along dimensions, by `dask_p2p.fft`, with frequencies as coordinates.

        Where a coordinate descends, the array is turned round first: the order of its elements
        makes no difference.

        Parameters
        ----------
        dim : hashable or sequence of hashable, optional
            The dimensions. By default all.
        real_dim : hashable, optional
            Along this one real numbers are transformed to half as many complex ones.
        shift : bool, optional
            Whether frequencies are in ascending order. If not, those of `fft` stay, and less moves.
        true_phase : bool, optional
            Whether phases are those at the origin of coordinates, not at the first element. Times,
            those of cftime too, count in seconds, and the first one is their origin.
        true_amplitude : bool, optional
            Whether sums are multiplied by distances of elements: an integral.
        prefix : str, optional
            Of the new dimensions' names.

        Returns
        -------
        xarray.DataArray
            Its frequencies have the attributes `spacing`, and `direct_lag`: the middle of the
            coordinate that was transformed.

        Raises
        ------
        AxesError
            If there is no such dimension.
        InputError
            If a coordinate is not evenly spaced, or has neither numbers nor times.
        UnsupportedArrayError
            If it is no array, or none of numbers, or has units as those of pint have.

        Examples
        --------
        >>> wave = xr.DataArray([1.0, 0.0, -1.0, 0.0], {"x": [0.0, 0.5, 1.0, 1.5]}, ["x"])
        >>> found = wave.p2p.fft()
        >>> found.freq_x.values, abs(found).values
        (array([-1. , -0.5,  0. ,  0.5]), array([0., 1., 0., 1.]))
        """
        return spectrum(self._given, dim, real_dim, shift, true_phase, true_amplitude, prefix)

    def ifft(
        self: P2PAccessor[xr.DataArray],
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> xr.DataArray:
        """Undo `fft`. Dimensions are those of the spectrum, by default all that have the prefix.

        Along `real_dim` there comes an even number of elements. Coordinates lie about the attribute
        `direct_lag` of the frequencies, or about zero; times are seconds. For other parameters
        and errors see `fft`.
        """
        return undone(self._given, dim, real_dim, true_phase, true_amplitude, prefix)

    @property
    def _dims(self) -> tuple[Hashable, ...]:
        return tuple(self._given.sizes)

    def _sizes(self, chunks: Any) -> dict[Hashable, Any]:
        return sizes_by_name(by_dimension(self._dims, "chunks", chunks, ChunksError), self._given)
