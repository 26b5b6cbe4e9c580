"""Everything that replaces or reads a private part of Dask: `tests/plugins/test_canary.py`."""
