"""JAX: `a.T` of a matrix whose rows are sharded over all GPUs, with the same sharding.

    python -m benchmarks.rivals.sharded_jax --gpus 8 --size 65536 --size 131072

One process drives all GPUs. Two forms are tried: `jit` with the shardings of input and output, left
to XLA's partitioner, and an explicit all-to-all under `shard_map`. The faster form is reported.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.rivals.common import Case, cases, emit, parser, read, row, time_forms

WAY = "JAX"


def prepare(options: Namespace) -> None:
    """Set the environment variables that JAX reads on import."""
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.gpus}"
    # The largest matrices take half of a GPU: input, output, and the two sides of the all-to-all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("JAX_ENABLE_X64", "1")  # complex128, and indices beyond 2**31


def values(case: Case, transposed: bool) -> Any:
    """Make this GPU's slab of the matrix, or of its transpose, under `shard_map`.

    XLA fuses this expression into its consumer, so its integers are never stored.
    """
    import jax.numpy as jnp
    from jax import lax

    shape = (case.rows, case.size)
    rows = lax.broadcasted_iota(jnp.int64, shape, 0) + lax.axis_index("gpus") * case.rows
    columns = lax.broadcasted_iota(jnp.int64, shape, 1)
    index = columns * case.size + rows if transposed else rows * case.size + columns
    return (index % case.modulus).astype(case.dtype)


def measure(case: Case, devices: Any) -> dict[str, Any]:
    """Time the transpose of one matrix, and check it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("gpus",))
    spec = PartitionSpec("gpus", None)
    by_rows = NamedSharding(mesh, spec)
    on_slabs = partial(jax.shard_map, mesh=mesh, out_specs=spec)
    x = jax.jit(on_slabs(partial(values, case, False), in_specs=()))().block_until_ready()

    def exchanged(slab: Any) -> Any:
        return lax.all_to_all(slab, "gpus", split_axis=1, concat_axis=0, tiled=True).T

    def count_wrong(slab: Any) -> Any:
        return jnp.sum(slab != values(case, True), dtype=jnp.int64).reshape(1, 1)

    ways = {
        "jit with shardings": jax.jit(lambda a: a.T, in_shardings=by_rows, out_shardings=by_rows),
        "shard_map with all_to_all": jax.jit(on_slabs(exchanged, in_specs=spec)),
    }

    def seconds(way: Callable[[Any], Any]) -> float:
        """Time one run; its result is released afterwards."""
        start_s = time.perf_counter()
        way(x).block_until_ready()
        return time.perf_counter() - start_s

    timing = time_forms({name: partial(seconds, way) for name, way in ways.items()}, case.repeats)

    y = ways[timing.form](x)
    if y.shape != x.shape or y.dtype != x.dtype or not y.sharding.is_equivalent_to(by_rows, 2):
        sys.exit(f"the result is {y.dtype} of {y.shape}, sharded as {y.sharding}")
    wrong_count = jax.jit(on_slabs(count_wrong, in_specs=spec))(y)
    return row(WAY, case, timing, int(wrong_count.sum()), versions={"jax": jax.__version__})


def main() -> None:
    """Read the command line, measure."""
    options = read(parser(__doc__))
    prepare(options)
    import jax

    devices = jax.devices("cpu" if options.cpu else "gpu")
    if len(devices) < options.gpus:
        sys.exit(f"expected {options.gpus} GPUs, JAX finds {len(devices)}")
    for case in cases(options):
        emit(measure(case, devices[: options.gpus]), options.json)


if __name__ == "__main__":
    main()
