"""Ordinary programs of CuPy blocks by layers, as one gang, and as calls of a resident gang.

    timeout 240 python -m benchmarks.fused_gpus --json FILE
    python -m benchmarks.fused_gpus --cpu --size 16 --cube 32 --side 64 --call 16

The stencil has 25 points in float32, on a cube of ``--size`` a worker: 50 calls of
`dask_p2p.map_overlap`. The spectral program transforms a cube of ``--cube``, multiplies, and
transforms back; `dask_p2p.spmd` does the same by hand. Times are from the call that builds the
result until all its blocks are there. Runs of all kinds alternate, and their values are compared.

Calls of a resident gang are on cubes of ``--call`` a worker; transposes are of squares of
``--side``. Calls run ahead, until a corner of the last result is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write

__all__ = ["main"]

LAYERS, FUSED, COMPILED, HAND = "layers", "fused", "compiled", "spmd by hand"
_STEPS = 50
_RADIUS = 4
_WEIGHTS = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)
_CALLS = 500
_PAUSE_S = 0.3  # until the scheduler has forgotten the result, which has the same name in each run
_TOLERANCE = 1e-4


_SOURCE = r"""
extern "C" __global__ void star(const float *u, float *out, int nz, int ny, int nx)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    const int z = blockIdx.z;
    if (x < 4 || y < 4 || z < 4 || x >= nx - 4 || y >= ny - 4 || z >= nz - 4)
        return;
    const float weights[5] = {-205.f / 72, 8.f / 5, -1.f / 5, 8.f / 315, -1.f / 560};
    const long long row = nx, plane = row * ny, at = z * plane + y * row + x;
    float total = 3 * weights[0] * u[at];
    for (int by = 1; by < 5; ++by)
        total += weights[by] * (u[at - by] + u[at + by] + u[at - by * row] + u[at + by * row]
                                + u[at - by * plane] + u[at + by * plane]);
    out[at] = u[at] + 0.01f * total;
}
"""
_THREADS = (32, 8, 1)


@cache
def _kernel(device: int) -> Any:
    import cupy

    return cupy.RawKernel(_SOURCE, "star")


def star(block: Any) -> Any:
    """Return a block after a step of a 25-point stencil; its outermost elements do not matter."""
    if isinstance(block, np.ndarray):
        return _star_on_host(block)
    import cupy

    out = cupy.empty_like(block)
    planes, rows, columns = block.shape
    grid = -(-columns // _THREADS[0]), -(-rows // _THREADS[1]), planes
    kernel = _kernel(cupy.cuda.runtime.getDevice())
    kernel(grid, _THREADS, (block, out, *map(np.int32, block.shape)))
    return out


def _star_on_host(block: Any) -> Any:
    inner = tuple(slice(_RADIUS, -_RADIUS) for _ in block.shape)
    out = block.copy()
    total = out[inner] * (3 * _WEIGHTS[0])
    for axis in range(block.ndim):
        for by, weight in enumerate(_WEIGHTS[1:], 1):
            for side in (-by, by):
                at = [*inner]
                at[axis] = slice(_RADIUS + side, block.shape[axis] - _RADIUS + side)
                total += block[tuple(at)] * weight
    out[inner] += total * 0.01
    return out


def stencil(x: Any, steps: int = _STEPS) -> Any:
    """Return the array after some steps, each one a `map_overlap`."""
    options = {"depth": _RADIUS, "boundary": "periodic", "corners": False, "dtype": x.dtype}
    for _ in range(steps):
        x = dask_p2p.map_overlap(star, x, **options)
    return x


def spectral(x: Any) -> Any:
    """Return a filtered array: a transform, a multiplication, and the inverse transform."""
    return dask_p2p.fft.ifftn(dask_p2p.fft.fftn(x) * 0.5).real


def spectral_by_hand(x: Any) -> Any:
    """Return the same array by a function of `dask_p2p.spmd`."""
    return dask_p2p.spmd(lambda ctx, block: ctx.ifftn(ctx.fftn(block) * 0.5).real, x)


def array(shape: Sequence[int], workers: int, is_on_gpu: bool) -> Any:
    """Return an array on the workers, in slabs."""
    from distributed import wait

    rng = da.random.default_rng(0)
    x = rng.random(tuple(shape), "f4", chunks=(shape[0] // workers, *shape[1:]))
    if is_on_gpu:
        import cupy

        x = x.map_blocks(cupy.asarray)
    x = x.persist()
    wait(x)
    return x


def compared(program: Callable[[Any], Any], x: Any, runs: int, hand: Any = None) -> dict[str, Any]:
    """Return the times of a program by each kind, in turn."""
    step = dask_p2p.compile(program, x)
    kinds: dict[str, Callable[[Any], Any]] = {
        LAYERS: program,
        FUSED: lambda x: dask_p2p.fused(program(x)),
        COMPILED: step,
    }
    if hand is not None:
        kinds[HAND] = hand
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(runs + 1):  # the first one warms up
        expected = None
        for kind, function in kinds.items():
            seconds, value = _timed(function, x)
            times[kind].append(seconds)
            expected = value if expected is None else expected
            if abs(value - expected) > _TOLERANCE * abs(expected):
                raise click.ClickException(f"{kind} returned the sum {value}, and not {expected}")
    return {
        kind: {"median_s": median(times_s[1:]), "min_s": min(times_s[1:])}
        for kind, times_s in times.items()
    }


def _timed(function: Callable[[Any], Any], x: Any) -> tuple[float, float]:
    """Return the time of a run, and the sum of its values."""
    from distributed import wait

    start_s = time.perf_counter()
    y = function(x).persist()
    wait(y)
    seconds = time.perf_counter() - start_s
    value = float(abs(y).sum(dtype="f8").compute())
    del y
    time.sleep(_PAUSE_S)
    return seconds, value


def call_s(program: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Return the time of a call of a resident gang."""

    def with_corner(u: Any) -> Any:
        result = program(u)
        return result, result[(slice(1),) * result.ndim]

    with dask_p2p.compile(with_corner, x).resident(x) as run:
        u = x
        for count in (calls // 5, calls):
            start_s = time.perf_counter()
            for _ in range(count):
                u, corner = run(u)
            run.fetch(corner)
            seconds = (time.perf_counter() - start_s) / count
    return seconds


@click.command()
@click.option("--size", default=512, show_default=True, help="Side of a worker's cube.")
@click.option("--cube", default=1024, show_default=True, help="Side of the transformed cube.")
@click.option("--side", default=32768, show_default=True, help="Side of the transposed square.")
@click.option("--call", default=128, show_default=True, help="Side of a worker's cube in calls.")
@click.option("--runs", default=4, show_default=True, help="Timed runs of each kind.")
@click.option("--workers", default=2, show_default=True, help="Number of workers.")
@click.option("--cpu", is_flag=True, help="Use NumPy blocks.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the results.")
def main(
    size: int,
    cube: int,
    side: int,
    call: int,
    runs: int,
    workers: int,
    cpu: bool,
    path: Path | None,
) -> None:
    """Measure programs by layers, as one gang, and as calls of a resident gang."""
    from distributed import Client

    results: dict[str, Any] = {}
    with dask_p2p.local_cluster(workers, gpus=not cpu) as cluster, Client(cluster):
        x = array((workers * size, size, size), workers, not cpu)
        results[f"{_STEPS} x map_overlap, {size}^3"] = compared(stencil, x, runs)
        x = array((cube,) * 3, workers, not cpu)
        results[f"fftn, multiply, ifftn, {cube}^3"] = compared(spectral, x, runs, spectral_by_hand)
        x = array((workers * call, call, call), workers, not cpu)
        calls = {"x + 1": lambda u: u + 1, "map_overlap": lambda u: stencil(u, 1)}
        results |= {
            f"resident {name}, {call}^3": {"call_s": call_s(program, x, _CALLS)}
            for name, program in calls.items()
        }
        x = array((side, side), workers, not cpu)
        results[f"resident transpose, {side}^2"] = {"call_s": call_s(dask_p2p.transpose, x, 30)}
    for name, figures in results.items():
        text = ", ".join(f"{kind} {_milliseconds(value)}" for kind, value in figures.items())
        click.echo(f"{name}: {text}")
    write(path, {**environment(), "workers": workers, "runs": runs, "results": results})


def _milliseconds(value: Any) -> str:
    seconds = value["median_s"] if isinstance(value, dict) else value
    return f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
