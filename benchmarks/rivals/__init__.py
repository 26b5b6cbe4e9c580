"""Transposes of the same sharded matrix without Dask, each in its best form and checked.

They know nothing of this package, so that they run wherever their own library does.
"""
