"""A plan as a lazy Dask array: one layer with one task per output block."""
