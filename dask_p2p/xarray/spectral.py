"""The accessor's methods for spectra, by names of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import xarray as xr

from dask_p2p.xarray.densities import Window, density, detrended, windowed
from dask_p2p.xarray.spectra import of_each, spectrum, undone

T = TypeVar("T", xr.DataArray, xr.Dataset)


class Spectral(Generic[T]):
    """Methods of arrays with evenly spaced coordinates.

    In a dataset they apply to each array that has the dimensions. Arrays that have none of them do
    not change.
    """

    _given: Any

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
        AxesError
            If a dimension does not exist, or an array of a dataset has only some of the dimensions.
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
        options = (shift, true_phase, true_amplitude, prefix)
        return self._of_each(dim, real_dim, lambda a: spectrum(a, dim, real_dim, *options))

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

        The result has an even number of elements along `real_dim`. Its coordinates are centred on
        the attribute `direct_lag` of the frequencies, or on zero. Times are in seconds. For other
        parameters and errors see `fft`.
        """
        options = (true_phase, true_amplitude, prefix)
        return self._of_each(dim, real_dim, lambda a: undone(a, dim, real_dim, *options), prefix)

    def power_spectrum(
        self,
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        scaling: str = "density",
        detrend: str | None = None,
        window: Window | None = None,
        shift: bool = True,
        prefix: str = "freq_",
    ) -> T:
        """Return the squares of the amplitudes of an array's spectrum, as densities by default.

        Parameters
        ----------
        dim, real_dim, shift, prefix
            As for `fft`. With `real_dim` each value includes the frequency of the other sign, so
            sums over half of the frequencies are the same.
        scaling : {"density", "spectrum"}, optional
            "density": the sum over all frequencies, times their spacing, is the mean square of the
            array. Its units are the squared units of the array over the units of the frequencies:
            K² s for temperatures over times. "spectrum": the sum is the mean square, in the squared
            units of the array. A wave of amplitude A has A² / 4 at each of its two frequencies, or
            A² / 2 with `real_dim`.
        detrend : {"constant", "linear"}, optional
            Trend to subtract first: see `detrend`.
        window : str or callable, optional
            Window to multiply by: see `window`. Densities are divided by the mean square of its
            values, and "spectrum" by the square of their mean.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            The power spectrum, of real numbers. It has no attributes, because units change.

        Raises
        ------
        AxesError, InputError, UnsupportedArrayError
            As for `fft`, `detrend` and `window`.

        Examples
        --------
        >>> import numpy as np
        >>> x = np.arange(8) / 8
        >>> wave = xr.DataArray(3 * np.cos(2 * np.pi * 2 * x), {"x": x}, ["x"])
        >>> wave.p2p.power_spectrum(real_dim="x", scaling="spectrum").values.round(9)
        array([0. , 0. , 4.5, 0. , 0. ])
        """
        options = (scaling, detrend, window, shift, prefix)
        return self._of_each(dim, real_dim, lambda a: density(a, None, dim, real_dim, *options))

    def cross_spectrum(
        self: Spectral[xr.DataArray],
        other: xr.DataArray,
        dim: Hashable | Sequence[Hashable] | None = None,
        real_dim: Hashable | None = None,
        *,
        scaling: str = "density",
        detrend: str | None = None,
        window: Window | None = None,
        shift: bool = True,
        prefix: str = "freq_",
    ) -> xr.DataArray:
        """Return the spectrum of an array times the conjugate spectrum of another one.

        Parameters
        ----------
        other : xarray.DataArray
            The array whose spectrum is conjugated. Dimensions, sizes and labels have to agree.
        dim, real_dim, scaling, detrend, window, shift, prefix
            As for `power_spectrum`. The units have the product of the arrays' units in place of the
            square.

        Returns
        -------
        xarray.DataArray
            The cross spectrum, of complex numbers. `scipy.signal.csd` returns its conjugate.

        Raises
        ------
        AxesError, InputError, UnsupportedArrayError
            As for `power_spectrum`, or if `other` does not agree.
        """
        return density(self._given, other, dim, real_dim, scaling, detrend, window, shift, prefix)

    def detrend(
        self,
        dim: Hashable | Sequence[Hashable] | None = None,
        kind: str = "constant",
    ) -> T:
        """Subtract the mean or the linear trend along dimensions, which may be chunked.

        Parameters
        ----------
        dim : hashable or sequence of hashable, optional
            Dimensions of the trend. By default all.
        kind : {"constant", "linear"}, optional
            Trend: the mean, or the linear function of the coordinates with the least squares (a
            plane for two dimensions). NaN in the array makes its whole trend NaN.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            The array without its trend, in the same units.

        Raises
        ------
        AxesError, InputError, UnsupportedArrayError
            If a dimension or `kind` is unknown, a coordinate has neither numbers nor times, or the
            array has units, such as those of pint.

        Examples
        --------
        >>> a = xr.DataArray([1.0, 3.0, 5.0], dims="x")
        >>> a.p2p.detrend().values, a.p2p.detrend(kind="linear").values
        (array([-2.,  0.,  2.]), array([0., 0., 0.]))
        """
        return self._of_each(dim, None, lambda a: detrended(a, dim, kind))

    def window(
        self,
        dim: Hashable | Sequence[Hashable] | None = None,
        window: Window = "hann",
    ) -> T:
        """Multiply by a window along dimensions, so that the ends of the array fade out.

        Parameters
        ----------
        dim : hashable or sequence of hashable, optional
            Dimensions with a window. By default all.
        window : {"hann", "hamming", "blackman"} or callable, optional
            Periodic window. A function of the number of elements returns their factors, such as
            ``lambda n: scipy.signal.get_window("flattop", n)``.

        Returns
        -------
        xarray.DataArray or xarray.Dataset
            The array times the window, in the same units.

        Raises
        ------
        AxesError, InputError, UnsupportedArrayError
            If a dimension or the window is unknown, or the array has units, such as those of pint.

        Examples
        --------
        >>> xr.DataArray([2.0, 2.0, 2.0, 2.0], dims="x").p2p.window().values
        array([0., 1., 2., 1.])
        """
        return self._of_each(dim, None, lambda a: windowed(a, dim, window))

    def _of_each(
        self, dim: Any, real_dim: Any, transform: Callable[[Any], Any], prefix: str = ""
    ) -> Any:
        if isinstance(self._given, xr.Dataset):
            return of_each(self._given, dim, real_dim, transform, prefix)
        return transform(self._given)
