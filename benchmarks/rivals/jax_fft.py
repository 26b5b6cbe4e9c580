"""JAX: the Fourier transform of an array in slabs by `shard_map`, left in slabs of axis 1.

    python -m benchmarks.rivals.jax_fft --gpus 2 --size 1024
    python -m benchmarks.rivals.jax_fft --gpus 2 --shape 2048 2048 1024 --real

Prints the seconds of each repeat. One process drives all GPUs.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser
from functools import partial
from typing import Any

from benchmarks.rivals.common import run_program

__all__ = ["WAY", "main", "seconds"]

WAY = "JAX shard_map"
_TIMEOUT_S = 180
_TOLERANCE = 1e-4  # of the largest value


def seconds(shape: tuple[int, ...], is_real: bool, gpus: int, times_s: list[float]) -> float:
    """Return the seconds of one transform: the next in `times_s`, which a process fills if empty.

    The process allocates memory when it needs some, because workers may hold most of the GPU.
    """
    if not times_s:
        arguments = "--gpus", gpus, "--shape", *shape, *["--real"] * is_real
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        times_s += run_program("jax_fft", *arguments, timeout_s=_TIMEOUT_S, **environment)[
            "times_s"
        ]
    return times_s.pop(0)


def transform_of(mesh: Any, is_real: bool) -> Any:
    """Return a compiled function of an array in slabs along axis 0."""
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import PartitionSpec

    def transform(slab: Any) -> Any:
        slab = jnp.fft.rfft(slab, axis=2) if is_real else jnp.fft.fft(slab, axis=2)
        slab = jnp.fft.fft(slab, axis=1)
        slab = lax.all_to_all(slab, "x", split_axis=1, concat_axis=0, tiled=True)
        return jnp.fft.fft(slab, axis=0)

    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec(None, "x")}
    return jax.jit(jax.shard_map(transform, mesh=mesh, **specs))


def plane_wave(shape: tuple[int, ...], is_real: bool) -> Any:
    """Return a wave with one element at 1, 2, 3 in its spectrum (for reals, in the half kept)."""
    from jax import numpy as jnp

    x = jnp.ones((), "c8")
    for axis, length in enumerate(shape):
        turns = (axis + 1) * 2j * jnp.pi / length * jnp.arange(length)
        x = x * jnp.exp(turns).reshape([-1 if a == axis else 1 for a in range(3)])
    return x.real if is_real else x.astype("c8")


def error_of(y: Any, peak: float) -> Any:
    """Return the largest difference of a spectrum from the plane wave's."""
    import jax
    from jax import numpy as jnp

    places = [jax.lax.broadcasted_iota("int32", y.shape, axis) == axis + 1 for axis in range(3)]
    expected = jnp.where(places[0] & places[1] & places[2], peak, 0)
    return jnp.abs(y - expected).max()


def main() -> None:
    """Time the transform, and print the seconds as JSON."""
    arguments = ArgumentParser()
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument(
        "--size", type=int, default=1024, help="side of a cube, instead of --shape"
    )
    arguments.add_argument("--shape", type=int, nargs=3)
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

    mesh = Mesh(np.array(jax.devices()[: options.gpus]), ("x",))
    shape = tuple(options.shape or [options.size] * 3)
    lies = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.jit(lambda: plane_wave(shape, options.real), out_shardings=lies)()
    run = transform_of(mesh, options.real)
    peak = np.prod(shape, dtype="f8") / (2 if options.real else 1)
    error = jax.jit(partial(error_of, peak=peak))(run(x)) / peak
    if not error < _TOLERANCE:
        raise ValueError(f"values differ by {error:g} of the largest one")
    times_s = []
    for _ in range(options.repeats):
        start_s = time.perf_counter()
        run(x).block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    print(json.dumps({"jax": jax.__version__, "times_s": times_s}), flush=True)


if __name__ == "__main__":
    main()
