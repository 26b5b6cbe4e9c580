"""Benchmarks of this package, of Dask's own ways, and of rivals outside Dask."""
