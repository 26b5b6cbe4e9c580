"""Fourier transforms of Dask arrays. `dask_p2p.ops.fft` says how they are done."""

from dask_p2p.ops.fft import (
    fft,
    fft2,
    fftn,
    hfft,
    ifft,
    ifft2,
    ifftn,
    ihfft,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)
from dask_p2p.ops.fft_estimate import estimate
from dask_p2p.ops.frequencies import fftfreq, fftshift, ifftshift, rfftfreq

__all__ = [
    "estimate",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]
