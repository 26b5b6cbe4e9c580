"""Benchmarks of this package, of Dask's own methods, and of rivals outside Dask."""
