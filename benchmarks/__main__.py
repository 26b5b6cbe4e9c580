"""``python -m benchmarks``: measured and checked transposes. See `benchmarks.bench`."""

from __future__ import annotations

from dask_p2p.errors import needs

with needs("rich", "bench"):
    from benchmarks.bench import bench

bench(prog_name="python -m benchmarks")
