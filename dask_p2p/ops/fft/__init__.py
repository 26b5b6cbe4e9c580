"""Fourier transforms of Dask arrays: stages, local transforms, estimates."""
