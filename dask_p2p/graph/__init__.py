"""A plan as a lazy Dask array: one layer, one task an output block."""
