"""All code that replaces or reads private parts of Dask; see `tests/plugins/test_canary.py`."""
