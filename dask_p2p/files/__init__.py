"""Transposes of the user's own files, ``.npy`` and Zarr, larger than memory too.

::

    job = prepare("in.npy", "out.zarr", (2, 0, 1))  # checks; writes nothing
    summary = transpose_file(job, client)

`job` checks a request; `tiling` plans its passes, in integers; `npy` and `zarr_io` read and write
boxes; `output` keeps the output's name free of half-written work; `execute` carries it all out.
"""

from __future__ import annotations

from dask_p2p.files.execute import Summary, transpose_file
from dask_p2p.files.job import Job, prepare

__all__ = ["Job", "Summary", "prepare", "transpose_file"]
