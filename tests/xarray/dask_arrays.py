"""Plugin for pytest: these tests with `dask_array` in the place of `dask.array`.

`test_dask_array` has pytest load it, in a process of its own.
"""

import dask
import dask.array
import dask_array.xarray


def pytest_configure():
    """Make xarray cut arrays by `dask_array`, with the options that Dask has without it."""
    dask.config.set({"array.rechunk.threshold": 4})
    dask_array.xarray.register()


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "cupy_xarray" not in item.name]  # which knows Dask's only
    for item in items:
        if getattr(item.module, "da", None) is dask.array:
            item.module.da = dask_array
