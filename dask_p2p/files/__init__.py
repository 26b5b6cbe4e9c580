"""Transposes of the user's own files, ``.npy`` and Zarr, larger than memory too.

::

    job = prepare("in.npy", "out.zarr", (2, 0, 1))  # checks; writes nothing
    summary = transpose_file(job, client)

`tiling` plans the passes, in integers; `npy` and `zarr_io` (with `zarr_metadata` and `zarr_groups`)
read and write boxes; `output` keeps the output's name free of half-written work, `writers` knows
who still writes, and `space` whether all of it can fit; `execute` runs one pass on the workers;
`job` puts these together.
"""

from __future__ import annotations

from dask_p2p.files.job import Job, Summary, prepare, transpose_file

__all__ = ["Job", "Summary", "prepare", "transpose_file"]
