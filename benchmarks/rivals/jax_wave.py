"""JAX: the wave of `benchmarks.sections_gpu` by `shard_map`, with halos from `ppermute`.

    python -m benchmarks.rivals.jax_wave --gpus 2 --size 512 --steps 200

Prints the seconds of a step in each repeat. One process drives all GPUs.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser
from typing import Any

from benchmarks.rivals.wave import COEFFICIENTS, FACTOR, RADIUS

__all__ = ["main"]


def steps_of(size: int, gpus: int, steps: int, devices: Any) -> Any:
    """Return a compiled function of (newest, previous) fields that makes `steps` steps."""
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    up = [(i, (i + 1) % gpus) for i in range(gpus)]
    down = [(after, before) for before, after in up]

    def step(_: Any, levels: Any) -> Any:
        u, before = levels
        first = lax.ppermute(u[-RADIUS:], "x", up)
        last = lax.ppermute(u[:RADIUS], "x", down)
        padded = jnp.concatenate([first, u, last])

        def at(axis: int, by: int) -> Any:
            return jnp.roll(u, -by, axis) if axis else padded[RADIUS + by :][: len(u)]

        total = 3 * COEFFICIENTS[0] * u
        for by, factor in enumerate(COEFFICIENTS[1:], 1):
            for axis in range(3):
                total = total + factor * (at(axis, -by) + at(axis, by))
        return 2 * u - before + FACTOR * total, u

    def all_steps(u: Any, before: Any) -> Any:
        return lax.fori_loop(0, steps, step, (u, before))

    specs = (spec, spec)
    return jax.jit(jax.shard_map(all_steps, mesh=mesh, in_specs=specs, out_specs=specs))


def main() -> None:
    """Time the steps, and print the seconds as JSON."""
    arguments = ArgumentParser()
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--size", type=int, default=512)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--cpu", action="store_true")
    options = arguments.parse_args()
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.gpus}"
    import jax
    from jax import numpy as jnp

    shape = (options.gpus * options.size, options.size, options.size)
    run = steps_of(options.size, options.gpus, options.steps, jax.devices()[: options.gpus])
    levels = run(jnp.ones(shape, "f4"), jnp.ones(shape, "f4"))
    jax.block_until_ready(levels)
    times_s = []
    for _ in range(options.repeats):
        start_s = time.perf_counter()
        levels = run(*levels)
        jax.block_until_ready(levels)
        times_s.append((time.perf_counter() - start_s) / options.steps)
    print(json.dumps({"jax": jax.__version__, "times_s": times_s}), flush=True)


if __name__ == "__main__":
    main()
