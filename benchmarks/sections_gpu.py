"""Wave steps, transposes and Fourier transforms in sections on GPUs, compared with rivals.

    timeout 240 python -m benchmarks.sections_gpu --json FILE
    python -m benchmarks.sections_gpu --size 0 --side 65536 --workers 1
    python -m benchmarks.sections_gpu --size 0 --cube 512 --cube 1024
    python -m benchmarks.sections_gpu --size 0 --shape 2048 2048 1024 --workers 4
    python -m benchmarks.sections_gpu --cpu --size 32 --steps 20 --side 512 --cube 64

The wave is a 25-point stencil in float32 on one cube a GPU, with a periodic boundary. The halo lies
along the first axis; along the others the kernel wraps around. The time of a step of `iterate` is
the difference between a long run and a run of 10 steps, divided by the number of steps between
them: both contain the start of the section, and the checks of its first steps. The kernel alone
runs in a worker, on memory of the same layout, without an exchange. Values are first compared with
NumPy's.

Transposes are of float32 squares in slabs of rows, one a worker. `Context.redistribute` makes them
in a section, in each order of exchange, in several consecutive calls without a wait between them.
They are also timed as a layer of `dask_p2p.transpose`, from the client's call to its end, and by
JAX. Each element is checked.

Fourier transforms are of cubes and other shapes in slabs, in complex64 and float32. `Context.fftn`
and `rfftn` return slabs of the second axis. An even number of workers, from four on, also
transforms pencils along the last axis to pencils along the first. JAX uses `shard_map`, for slabs.
Each result is transformed back, and compared with the input.

Each measurement has a time-out; the others follow after it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals.common import run_program
from benchmarks.rivals.wave import RADIUS, reference, wave
from benchmarks.sections_calls import (
    REAL,
    attempt,
    computed,
    shape_text,
    transforms_of,
    transposes_of,
)

__all__ = ["main"]

OURS, NO_OVERLAP = "dask_p2p.iterate", "dask_p2p.iterate, overlap=False"
CAPTURED = "dask_p2p.iterate, capture=True"
KERNEL, JAX = "the kernel alone", "JAX shard_map"
#: Names of times in the file, by the kind of size.
SECONDS_OF = {
    "size": "step_s", "side": "transpose_s", "cube": "transform_s", "shape": "transform_s"
}  # fmt: skip
_CHECKED = 16  # side of the cubes that are compared with NumPy's result
_TOLERANCE = 1e-4
_FIRST_STEPS = 10  # of each timed run; the first steps of a section have checks
_Extent: TypeAlias = tuple[str, int | str]  # a kind of size, and the size
_AT_ONCE = 5  # arrays of the transposed one's size in memory, divided among the workers


def steps_of(size: int) -> int:
    """Return the number of steps to time: less than a second on a GPU."""
    return max(100, min(4000, 200 * 512**3 // size**3))


def field(size: int, workers: int, is_on_gpu: bool) -> Any:
    """Return a Dask array with a cube for each worker."""
    rng = da.random.default_rng(0)
    x = rng.random((workers * size, size, size), "f4", chunks=(size, size, size))
    if is_on_gpu:
        import cupy

        x = x.map_blocks(cupy.asarray)
    return x


def iterated(x: Any, steps: int, **options: Any) -> Any:
    """Return the lazy field after `steps` steps."""
    depths: list[Any] = [{0: RADIUS}, 0]
    return dask_p2p.iterate(wave, (x, x), depths, steps, checkpoint_every=None, **options)[0]


def largest_error(workers: int, is_on_gpu: bool, timeout_s: float) -> float:
    """Return the largest difference from NumPy after some steps, also captured ones."""
    from distributed import get_client

    x = field(_CHECKED, workers, is_on_gpu)
    arrays = [iterated(x, 20), iterated(x, 20, capture=True), x]
    client = get_client()
    if is_on_gpu:
        arrays = [y.map_blocks(_on_host, meta=np.empty((0, 0, 0), "f4")) for y in arrays]
    *results, start = (y.result(timeout=timeout_s) for y in client.compute(arrays))
    return float(abs(np.array(results) - reference(start, start, 20)).max())


def _on_host(block: Any) -> Any:
    return block.get()


def kernel_alone(size: int, steps: int, is_on_gpu: bool) -> float:
    """Return the seconds of a step without an exchange, on fields with a halo, on a worker."""
    module: Any = np
    if is_on_gpu:
        import cupy as module  # type: ignore[no-redef]
    halo = slice(RADIUS, -RADIUS)
    fields = [module.zeros((size + 2 * RADIUS, size, size), "f4") for _ in range(3)]

    def run(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            newest, before, out = fields
            wave(newest, before[halo], out[halo])
            fields[:] = [out, newest, before]
        if is_on_gpu:
            module.cuda.get_current_stream().synchronize()
        return time.perf_counter() - start_s

    run(1)
    return run(steps) / steps


def step_s(x: Any, steps: int, timeout_s: float, **options: Any) -> float:
    """Return the seconds of a step by `iterate`."""
    counts = steps + _FIRST_STEPS, _FIRST_STEPS
    long_s, short_s = (computed(iterated(x, count, **options), timeout_s) for count in counts)
    return (long_s - short_s) / steps


def times_of(
    client: Any, size: int, steps: int, repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return the seconds of a step by each way that did not fail; the ways take turns."""
    workers = sorted(client.nthreads())
    x = client.persist(field(size, len(workers), is_on_gpu))

    def alone() -> float:
        arguments = size, steps, is_on_gpu
        future = client.submit(kernel_alone, *arguments, workers=workers[:1], pure=False)
        seconds: float = future.result(timeout=timeout_s)
        return seconds

    ways: dict[str, Callable[[], float]] = {
        KERNEL: alone,
        OURS: partial(step_s, x, steps, timeout_s),
        NO_OVERLAP: partial(step_s, x, steps, timeout_s, overlap=False),
        CAPTURED: partial(step_s, x, steps, timeout_s, capture=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way in [way for way in ways if way in times]:
            seconds = attempt(f"{size} {way}", ways[way])
            if seconds is None:
                del times[way]
            elif repeat:
                times[way].append(seconds)
    return times


def by_jax(module: str, *arguments: object, timeout_s: float) -> list[float]:
    """Return the seconds measured by one of the JAX programs in its own process."""
    report = run_program(module, *arguments, timeout_s=timeout_s)
    if report.get("wrong"):
        raise RuntimeError(f"{report['wrong']} elements are wrong")
    times_s: list[float] = report["times_s"]
    return times_s


@dataclass
class Results:
    """Measurements, printed and written one by one in case the program ends early."""

    head: dict[str, Any]
    path: Path | None
    rows: dict[_Extent, dict[str, list[float]]] = dataclasses.field(default_factory=dict)

    def add(self, kind: str, size: int | str, times: dict[str, list[float]]) -> None:
        """Add the seconds of some ways for a kind of size."""
        for way, times_s in times.items():
            print(f"{kind} {size:>6} {way:>34}: {median(times_s) * 1e3:9.4f} ms", flush=True)
        self.rows.setdefault((kind, size), {}).update(times)
        shown = [{kind: n, SECONDS_OF[kind]: times_s} for (kind, n), times_s in self.rows.items()]
        write(self.path, {**self.head, "rows": shown})


@click.command(context_settings={"show_default": True})
@click.option(
    "--size", "sizes", multiple=True, type=int, default=(512, 256, 128), help="Wave cube; 0: none."
)
@click.option("--side", "sides", multiple=True, type=int, help="Side of a square to transpose.")
@click.option("--cube", "cubes", multiple=True, type=int, help="Side of a cube to transform.")
@click.option("--shape", "shapes", multiple=True, nargs=3, type=int, help="Array to transform.")
@click.option("--workers", default=2, help="Workers with a GPU each.")
@click.option("--steps", type=int, help="Timed steps.  [default: by the size]")
@click.option("--repeats", default=3, help="Rounds after the first.")
@click.option("--timeout", "timeout_s", default=30.0, help="Limit of a measurement, seconds.")
@click.option("--cpu", "on_cpu", is_flag=True, help="Use NumPy, to try the program.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    sizes: Sequence[int],
    sides: Sequence[int],
    cubes: Sequence[int],
    shapes: Sequence[tuple[int, int, int]],
    workers: int,
    steps: int | None,
    repeats: int,
    timeout_s: float,
    on_cpu: bool,
    path: Path | None,
) -> None:
    """Time wave steps, transposes and Fourier transforms in sections on GPUs."""
    from distributed import Client

    # A pool in one allocation, which other processes map: a multiple of 2 MiB.
    transformed: dict[_Extent, tuple[int, int, int]] = {("cube", n): (n, n, n) for n in cubes}
    transformed |= {("shape", shape_text(shape)): shape for shape in shapes}
    all_bytes = [4 * n**2 for n in sides] + [16 * prod(shape) for shape in transformed.values()]
    largest_bytes = max(all_bytes, default=0) // workers
    pool_bytes = max(2**34, -(-_AT_ONCE * largest_bytes // 2**30) * 2**30)
    of_gpus: dict[str, Any] = {} if on_cpu else {"rmm_pool_size": pool_bytes}
    results = Results({**environment(), "workers": workers, "repeats": repeats}, path)
    steps_at = {size: steps or steps_of(size) for size in sizes if size}
    with (
        dask_p2p.local_cluster(workers, gpus=not on_cpu, **of_gpus) as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        error = largest_error(workers, not on_cpu, timeout_s)
        if not error < _TOLERANCE:
            raise click.ClickException(f"values differ from NumPy's by {error:g}")
        common: Any = repeats, not on_cpu, timeout_s
        for size, count in steps_at.items():
            results.add("size", size, times_of(client, size, count, *common))
        for side in sides:
            results.add("side", side, transposes_of(client, side, *common))
        for array, shape in transformed.items():
            results.add(*array, transforms_of(client, shape, *common))
    # The workers have released the GPUs' memory.
    rivals: list[tuple[str, int | str, str, str, Sequence[object]]] = [
        *(
            ("size", n, JAX, "jax_wave", ("--size", n, "--steps", count))
            for n, count in steps_at.items()
        ),
        *(("side", n, "JAX", "sharded_jax", ("--size", n)) for n in sides),
        *(
            (*kind, f"{JAX}, for {way}", "jax_fft", ("--shape", *shape, *["--real"] * is_real))
            for kind, shape in transformed.items()
            for way, is_real in REAL.items()
        ),
    ]
    common_arguments = "--gpus", workers, "--repeats", repeats, *["--cpu"] * on_cpu
    for kind, extent, way, module, extra_arguments in (
        rivals if find_spec("jax") is not None else ()
    ):
        measure = partial(by_jax, module, *extra_arguments, *common_arguments, timeout_s=timeout_s)
        times_s = attempt(f"{extent} {way}", measure)
        if times_s is not None:
            results.add(kind, extent, {way: times_s})


if __name__ == "__main__":
    main()
