"""The accessor's methods for spectra, by names of dimensions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import xarray as xr

from dask_p2p.xarray.spectra import spectrum, undone

T = TypeVar("T", xr.DataArray, xr.Dataset)


class Spectral(Generic[T]):
    """Methods of arrays with evenly spaced coordinates; datasets are refused."""

    _given: Any

    def fft(
        self: Spectral[xr.DataArray],
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        shift: bool = True,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> xr.DataArray:
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
            Whether to multiply sums by the spacing, as in an integral.
        prefix : str, optional
            Prefix of the new dimensions' names.

        Returns
        -------
        xarray.DataArray
            The spectrum. Its frequencies have the attributes `spacing` and `direct_lag`, the middle
            of the transformed coordinate.

        Raises
        ------
        AxesError
            If a dimension does not exist.
        InputError
            If a coordinate is not evenly spaced, or has neither numbers nor times.
        UnsupportedArrayError
            If the input is not an array of numbers, or has units, such as those of pint.

        Examples
        --------
        >>> wave = xr.DataArray([1.0, 0.0, -1.0, 0.0], {"x": [0.0, 0.5, 1.0, 1.5]}, ["x"])
        >>> found = wave.p2p.fft()
        >>> found.freq_x.values, abs(found).values
        (array([-1. , -0.5,  0. ,  0.5]), array([0., 1., 0., 1.]))
        """
        return spectrum(self._given, dim, real_dim, shift, true_phase, true_amplitude, prefix)

    def ifft(
        self: Spectral[xr.DataArray],
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        true_phase: bool = True,
        true_amplitude: bool = True,
        prefix: str = "freq_",
    ) -> xr.DataArray:
        """Invert `fft` along dimensions of the spectrum, by default all that have the prefix.

        The result has an even number of elements along `real_dim`. Its coordinates are centred on
        the attribute `direct_lag` of the frequencies, or on zero. Times are in seconds. For other
        parameters and errors see `fft`.
        """
        return undone(self._given, dim, real_dim, true_phase, true_amplitude, prefix)
