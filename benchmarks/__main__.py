"""``python -m benchmarks``: transposes measured and checked. See `benchmarks.bench`."""

from __future__ import annotations

from benchmarks.bench import bench

bench(prog_name="python -m benchmarks")
