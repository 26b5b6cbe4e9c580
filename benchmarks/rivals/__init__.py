"""Transposes of the same sharded matrix without Dask, each in its best form and checked.

They do not use this package, so they run wherever their own library runs.
"""
