"""The xarray accessor: ``a.p2p.transpose("y", "x")``, ``a.p2p.chunk({"x": 1000})`` and so on.

Importing this module adds it to arrays and datasets:

>>> import dask_p2p.xarray
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from dask_p2p.errors import InputError, needs
from dask_p2p.ops.arguments import check_names
from dask_p2p.ops.overlap import map_overlap
from dask_p2p.ops.rechunk import rechunk, transpose
from dask_p2p.tools.dropin import install

with needs("xarray", "xarray"):
    import xarray as xr
    from xarray.groupers import Resampler

from dask_p2p.xarray.by_name import (
    add_chunks_of_shards,
    by_dimension,
    iterate_by_name,
    make_regular,
    name_axes,
)
from dask_p2p.xarray.spectra import invert, transform, transform_dataset
from dask_p2p.xarray.variables import (
    as_dask,
    change_data,
    change_variables,
    check_dimensions,
    chunk_variable,
    is_in_memory,
    sizes_of_groups,
)

__all__ = ["P2PAccessor"]

T = TypeVar("T", xr.DataArray, xr.Dataset)


@xr.register_dataarray_accessor("p2p")
@xr.register_dataset_accessor("p2p")
class P2PAccessor(Generic[T]):
    """Operations of this package by names of dimensions.

    In a dataset `fft` and `ifft` apply to each array that has the dimensions. Arrays that have none
    of them do not change.

    Coordinates that are Dask arrays are rechunked and transposed like the data. Coordinates in
    memory stay in memory.

    Type checkers see ``a.p2p`` as `Any`, since xarray adds it at run time. Results of
    ``P2PAccessor(a)``, which is equivalent, have types.

    Parameters
    ----------
    given : xarray.DataArray or xarray.Dataset
        The array or dataset to operate on.

    See Also
    --------
    dask_p2p.install : The same exchanges in xarray's own methods.

    Examples
    --------
    >>> import dask.array as da
    >>> import xarray as xr
    >>> import dask_p2p.xarray
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> a = xr.DataArray(x, dims=("x", "y"))
    >>> a.p2p.transpose("y", "x").chunksizes
    Frozen({'y': (2, 1, 1), 'x': (6,)})
    >>> a.p2p.chunk(x=-1, y=2).chunksizes
    Frozen({'x': (6,), 'y': (2, 2)})
    >>> twice = a.p2p.map_overlap(lambda block: 2 * block, {"x": 1})
    >>> int(twice.sum())
    48
    """

    def __init__(self, given: T) -> None:
        self._data = given

    def transpose(self, *dims: Any, chunks: Mapping[Any, Any] | None = None) -> T:
        """Transpose Dask arrays by `dask_p2p.transpose`, and arrays in memory as xarray does.

        Parameters
        ----------
        *dims : hashable or ``...``
            Names of the dimensions in their new order. ``...`` stands for all dimensions that are
            not named. By default the order is reversed.
        chunks : mapping of hashable to int, str, tuple or Resampler, optional
            Chunks of the result by dimension. The default is that of `dask_p2p.transpose`. An array
            keeps its chunks if its order does not change and none of its dimensions is named.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            The result, with the coordinates and attributes of the input. If blocks or the order of
            dimensions change, encodings lose the chunks of the file that was read.

        Raises
        ------
        InputError
            If `dims` are not the dimensions.
            Also if `chunks` names an unknown dimension, or sizes do not fit.
        UnsupportedArrayError
            If an array has units, such as those of pint, or wraps a Dask array. If blocks are
            masked, sparse, or have data that are more than plain bytes.
        """
        sizes = self._sizes(chunks or {})
        check_dimensions([dim for dim in dims if dim is not ...], self._dims)
        try:
            result = self._data.transpose(*dims)
        except ValueError as exc:
            raise InputError(
                f"expected the dimensions {self._dims} in any order, with `...` for dimensions "
                f"that are not named, got {dims}: {exc}."
            ) from exc

        def change(before: Any, after: Any, name: Hashable) -> Any:
            axis_sizes = {i: sizes[dim] for i, dim in enumerate(after.dims) if dim in sizes}
            if is_in_memory(before) or (before.dims == after.dims and not axis_sizes):
                return after
            axes = [before.dims.index(dim) for dim in after.dims]
            with name_axes(after.dims, axis_sizes):
                data = transpose(as_dask(before, name), axes, chunks=axis_sizes or None)
            return after.copy(deep=False, data=data)

        return change_variables(self._data, result, change)

    def chunk(self, chunks: Any = None, **chunks_kwargs: Any) -> T:
        """Rechunk Dask arrays by `dask_p2p.rechunk`, and arrays in memory as xarray does.

        Parameters
        ----------
        chunks : mapping of hashable to int, str, tuple or Resampler; or one for all, optional
            Chunks of the result by dimension. Dimensions that are not named keep their chunks. A
            resampler, such as `xarray.groupers.TimeResampler`, makes one block of each group.
        **chunks_kwargs
            The same, as keywords.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            As for `transpose`.

        Raises
        ------
        InputError, UnsupportedArrayError
            As for `transpose`.
        """
        sizes = {**self._sizes({} if chunks is None else chunks), **self._sizes(chunks_kwargs)}

        def change(before: Any, _: Any, name: Hashable) -> Any:
            if is_in_memory(before):
                named = {dim: sizes[dim] for dim in before.dims if dim in sizes}
                return chunk_variable(before, named, name)
            axis_sizes = {i: sizes[dim] for i, dim in enumerate(before.dims) if dim in sizes}
            if not axis_sizes:
                return before
            with name_axes(before.dims, axis_sizes):
                return before.copy(deep=False, data=rechunk(as_dask(before, name), axis_sizes))

        return change_variables(self._data, self._data, change)

    def map_overlap(
        self,
        func: Callable[..., Any],
        /,
        depth: Mapping[Any, Any] | int,
        boundary: Any = None,
        **kwargs: Any,
    ) -> T:
        """Map a function over blocks with halos, by `dask_p2p.map_overlap`.

        An array in memory is one block. Coordinates do not change, nor do arrays of a dataset
        without a dimension in `depth`.

        Parameters
        ----------
        func : callable
            A function of a block with its halo. It returns an array of the same shape.
        depth : mapping of hashable to int or pair; or int for all
            Widths of the halo by dimension, in elements. Dimensions that are not named have none.
        boundary : mapping of hashable to str or scalar; or one for all, optional
            Values beyond the ends by dimension: see `dask_p2p.map_overlap`.
        **kwargs
            Keywords of `dask_p2p.map_overlap` and of `func`.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            As for `transpose`.

        Raises
        ------
        InputError
            If `depth` or `boundary` names an unknown dimension, or a halo is wider than the array.
        UnsupportedArrayError
            As for `transpose`.
        """
        widths = by_dimension(self._dims, "depth", depth)
        kinds = by_dimension(self._dims, "boundary", boundary)

        def change(before: Any, _: Any, name: Hashable) -> Any:
            by_axis = {i: widths[dim] for i, dim in enumerate(before.dims) if dim in widths}
            if not by_axis:
                return before
            beyond = {i: kinds[dim] for i, dim in enumerate(before.dims) if dim in kinds}
            with name_axes(before.dims, by_axis, beyond):
                x = as_dask(before, name)
                y = map_overlap(func, x, depth=by_axis, boundary=beyond, **kwargs)
            after = before.copy(deep=False, data=y)
            after.encoding = {}  # the encoding belongs to other values
            return after

        return change_data(self._data, self._data, change)

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
        """Apply a function of blocks with halos repeatedly, by `dask_p2p.iterate`.

        An array in memory is one block.

        Parameters
        ----------
        func : callable
            A function that is called as ``func(*fields, *constants, out=out)``. The arrays have the
            order of dimensions of the newest field: see `dask_p2p.iterate`.
        depth : mapping of hashable to int or pair; or int for all; or list of these
            Widths of the halo by dimension, in elements. A list has one entry for each field.
            Dimensions that are not named have no halo.
        steps : int
            The largest number of steps.
        fields : sequence or mapping, optional
            Time levels, the newest first. For a dataset: names of its arrays. For an array, which
            is the newest level itself: the earlier levels, as DataArrays. A mapping has coupled
            fields of a dataset: by the name of the function's parameter the name of an array, or a
            list of them for time levels.
        boundary : mapping of hashable to str or scalar; or one for all, optional
            Values beyond the ends by dimension. Dimensions that are not named have "none".
        constants : sequence or mapping, optional
            Further arguments that `func` reads in each step: names of the dataset's variables or of
            the array's coordinates, DataArrays, or values. DataArrays are repeated along dimensions
            that they lack. Values are passed unchanged. A mapping by name if `fields` is one.
        **kwargs
            Keywords of `dask_p2p.iterate` and of `func`. Frames of ``save=`` have the dimensions of
            the fields, their coordinates of numbers and times, and the names of the parameters.

        Returns
        -------
        xarray.DataArray, tuple of them or xarray.Dataset
            The result, with the coordinates and attributes of the input. In a dataset it replaces
            the fields, and records of ``record=`` are further variables. For an array with `fields`
            it is a tuple of all time levels.

        Raises
        ------
        InputError
            If no dimension or variable has a name, or if labels of dimensions differ.
        InputError, UnsupportedArrayError, BlockMismatchError, SectionError
            As `dask_p2p.iterate` raises them.

        Examples
        --------
        >>> def smooth(u, out):
        ...     out[:] = (u[:-2] + u[2:]) / 2
        >>> a = xr.DataArray([0.0, 0, 4, 0, 0, 0], dims="x").chunk(x=3)
        >>> a.p2p.iterate(smooth, {"x": 1}, 2).values
        array([1., 0., 2., 0., 1., 0.])
        """
        lists = (value for value in (fields, constants) if isinstance(value, (list, tuple)))
        count = 2 + sum(len(values) - 1 for values in lists)
        is_before = fields is not None and isinstance(self._data, xr.DataArray)
        check_names(func, count + is_before, type(self).iterate, locals())
        return iterate_by_name(self._data, func, depth, steps, fields, boundary, constants, kwargs)

    def to_zarr(self, store: Any = None, *, chunks: Any = None, **kwargs: Any) -> Any:
        """Write to a Zarr store, rechunked to chunks of one size along each dimension if needed.

        Zarr has such chunks only, and the last one may be smaller. Each task writes whole chunks of
        the store, or whole shards. One exchange makes blocks for them. With ``append_dim`` or
        ``region`` the first block may be the rest of a chunk. So only one program at a time may
        write to a chunk. CuPy blocks are copied to host memory after the exchange.

        Parameters
        ----------
        store : path or store
            As for xarray's ``to_zarr``.
        chunks : mapping of hashable to int or str; or one for all, optional
            Chunks of the store by dimension, as for `chunk`, where `encoding` has none. The default
            for blocks of several sizes is the size that moves the fewest elements.
        **kwargs
            Keywords of xarray's ``to_zarr``. ``safe_chunks`` is False by default.

        Returns
        -------
        zarr store, or dask.delayed.Delayed
            As xarray's ``to_zarr`` returns it.

        Raises
        ------
        InputError
            If `chunks` names an unknown dimension, or chunks of several sizes. If chunk
            sizes of an array are unknown.
        ConfigError
            If zarr is not installed.
        UnsupportedArrayError
            As for `transpose`.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> a = xr.DataArray(range(10), dims="x", name="a")
        >>> a = a.chunk(x=(3, 3, 2, 2))
        >>> with TemporaryDirectory() as folder:
        ...     _ = a.p2p.to_zarr(folder, consolidated=False)
        ...     xr.open_zarr(folder, consolidated=False).a.chunksizes
        Frozen({'x': (3, 3, 3, 1)})
        """
        with needs("zarr", "zarr"):
            import zarr  # noqa: F401  # before blocks move
        sizes = self._sizes({} if chunks is None else chunks)
        encoding = add_chunks_of_shards(kwargs.pop("encoding", None) or {}, self._data, sizes)
        region: Any = kwargs.get("region") or {}
        existing_dims = {*(region if isinstance(region, Mapping) else self._dims)}
        if kwargs.get("append_dim") is not None:
            existing_dims.add(kwargs["append_dim"])
        kwargs.setdefault("safe_chunks", False)  # blocks get whole units where they are stored
        with install():
            return make_regular(self._data, sizes, encoding, existing_dims).to_zarr(
                store, encoding=encoding or None, **kwargs
            )

    def fft(
        self,
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        shift: bool = True,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> T:
        """Transform an array along dimensions, by `dask_p2p.fft`, with frequencies as coordinates.

        If a coordinate descends, the array is reversed first. So the direction of a coordinate
        does not change the result.

        Parameters
        ----------
        dim : hashable or sequence of hashable, optional
            Dimensions to transform. By default all.
        real_dim : hashable, optional
            Dimension for a transform of real numbers, which returns half of the frequencies.
        shift : bool, optional
            Whether to sort frequencies in ascending order. Without it they keep the order of
            `numpy.fft.fft`, and less data moves.
        true_phase : bool, optional
            Whether phases refer to the origin of the coordinates, and not to the first element.
            Times, also those of cftime, count in seconds, and the first one is their origin.
        true_amplitude : bool, optional
            Whether to multiply sums by the spacing, as in an integral. The units of the amplitude
            are then those of the array times those of the coordinate: K s for temperatures over
            times. Without it they are those of the array.
        prefix : str, optional
            Prefix of the new dimensions' names.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            The spectrum. Its frequencies have the attributes `spacing` and `direct_lag`, the middle
            of the transformed coordinate.

        Raises
        ------
        InputError
            If a dimension does not exist, or an array of a dataset has only some of the dimensions.
            Also if a coordinate is not evenly spaced, or has neither numbers nor times.
        UnsupportedArrayError
            If the input is not an array of numbers, or has units, such as those of pint.

        Examples
        --------
        >>> x = [0.0, 0.5, 1.0, 1.5]
        >>> wave = xr.DataArray([1.0, 0.0, -1.0, 0.0], {"x": x}, ["x"])
        >>> spectrum = wave.p2p.fft()
        >>> spectrum.freq_x.values, abs(spectrum).values
        (array([-1. , -0.5,  0. ,  0.5]), array([0., 1., 0., 1.]))
        """
        options = (shift, true_phase, true_amplitude, prefix)
        return self._transformed(dim, real_dim, lambda a: transform(a, dim, real_dim, *options))

    def ifft(
        self,
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> T:
        """Invert `fft` along dimensions of the spectrum, by default all that have the prefix.

        Parameters
        ----------
        dim, real_dim, true_phase, true_amplitude, prefix
            The arguments of `fft`, with dimensions of the spectrum.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            Its number of elements along `real_dim` is even. Its coordinates are centred on the
            attribute `direct_lag` of the frequencies, or on zero. Times are in seconds.

        Raises
        ------
        InputError, UnsupportedArrayError
            The errors of `fft`.
        """
        options = (true_phase, true_amplitude, prefix)
        return self._transformed(
            dim, real_dim, lambda a: invert(a, dim, real_dim, *options), prefix
        )

    def __repr__(self) -> str:
        lines: list[str] = [
            f"  {name:15} {(method.__doc__ or '').partition(chr(10))[0]}"
            for name, method in vars(P2PAccessor).items()
            if callable(method) and not name.startswith("_")
        ]
        return "\n".join([f"<methods of dask_p2p for this {type(self._data).__name__}>", *lines])

    @property
    def _dims(self) -> tuple[Hashable, ...]:
        return tuple(self._data.sizes)

    def _sizes(self, chunks: Any) -> dict[Hashable, Any]:
        return {
            dim: sizes_of_groups(self._data[dim], size) if isinstance(size, Resampler) else size
            for dim, size in by_dimension(self._dims, "chunks", chunks).items()
        }

    def _transformed(
        self, dim: Any, real_dim: Any, transform: Callable[[Any], Any], prefix: str = ""
    ) -> Any:
        if isinstance(self._data, xr.Dataset):
            return transform_dataset(self._data, dim, real_dim, transform, prefix)
        return transform(self._data)
