"""JAX: the Fourier transform of a cube in slabs by `shard_map`, left in slabs of the second axis.

    python -m benchmarks.rivals.jax_fft --gpus 2 --size 1024

Prints seconds of a transform, of all repeats. One process drives all GPUs.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser
from typing import Any

__all__ = ["main"]


def transform_of(devices: Any, is_real: bool) -> Any:
    """Return a compiled function of an array in slabs along axis 0."""
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    def transform(slab: Any) -> Any:
        slab = jnp.fft.rfft(slab, axis=2) if is_real else jnp.fft.fft(slab, axis=2)
        slab = jnp.fft.fft(slab, axis=1)
        slab = lax.all_to_all(slab, "x", split_axis=1, concat_axis=0, tiled=True)
        return jnp.fft.fft(slab, axis=0)

    mesh = Mesh(np.array(devices), ("x",))
    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec(None, "x")}
    return jax.jit(jax.shard_map(transform, mesh=mesh, **specs))


def main() -> None:
    """Time it, and print the seconds as JSON."""
    arguments = ArgumentParser()
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--size", type=int, default=1024)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--real", action="store_true")
    arguments.add_argument("--cpu", action="store_true")
    options = arguments.parse_args()
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.gpus}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()[: options.gpus]
    run = transform_of(devices, options.real)
    lies = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    make = jax.jit(
        lambda: jax.numpy.ones((options.size,) * 3, "f4" if options.real else "c8"),
        out_shardings=lies,
    )
    x = make()
    run(x).block_until_ready()
    found = []
    for _ in range(options.repeats):
        start_s = time.perf_counter()
        run(x).block_until_ready()
        found.append(time.perf_counter() - start_s)
    print(json.dumps({"jax": jax.__version__, "transform_s": found}), flush=True)


if __name__ == "__main__":
    main()
