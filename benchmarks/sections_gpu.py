"""A step of a wave, transposes and Fourier transforms of sections on GPUs, beside their rivals.

    timeout 240 python -m benchmarks.sections_gpu --json FILE
    python -m benchmarks.sections_gpu --size 0 --side 65536 --workers 1
    python -m benchmarks.sections_gpu --size 0 --cube 512 --cube 1024
    python -m benchmarks.sections_gpu --cpu --size 32 --steps 20 --side 512 --cube 64

The wave has 25 points in float32, one cube a GPU, with a periodic boundary: rims lie along the
first axis, and the kernel goes round along the others. What `iterate` takes for a step is the
difference between many steps and one, over the number of steps. The kernel alone runs in a worker, on memory of the
same layout, with nothing exchanged. Values are compared with NumPy's first.

Transposes are of squares in float32, in slabs of rows, one a worker: by `Context.redistribute` in a
section, several calls at once and nothing waited for between them, and as a layer of
`dask_p2p.transpose`, from the client's call until it is done. Of these each element is checked.

Fourier transforms are of cubes in slabs, in complex64 and float32, by `Context.fftn` and `rfftn`,
which leave them in slabs of the second axis, and by JAX's `shard_map`. Each is transformed back,
and compared with what it was made of.

Each thing that is timed has a time-out, after which the others follow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals.wave import RADIUS, reference, wave
from dask_p2p.tools.indexed import count_wrong, indexed_array

__all__ = ["main"]

OURS, NO_OVERLAP = "dask_p2p.iterate", "dask_p2p.iterate, overlap=False"
KERNEL, JAX = "the kernel alone", "JAX shard_map"
REAL = {"Context.fftn": False, "Context.rfftn": True}  # whether each is of real numbers
IN_SECTION, LAYER = "a transpose in a section", "a layer of dask_p2p.transpose"
_CHECKED = 16  # side of the cubes that are compared with NumPy's
_TOLERANCE = 1e-4
_CALLS = 8  # of transforms, or of transposes in a section at once
_AT_ONCE = 5  # arrays of the size of the transposed one that there are, of which each has a part


def steps_of(size: int) -> int:
    """Return how many steps are timed at once: less than a second on a GPU."""
    return max(100, min(4000, 200 * 512**3 // size**3))


def field(size: int, workers: int, is_on_gpu: bool) -> Any:
    """Return a Dask array with a cube for each worker."""
    rng = da.random.default_rng(0)
    x = rng.random((workers * size, size, size), "f4", chunks=(size, size, size))
    if is_on_gpu:
        import cupy

        x = x.map_blocks(cupy.asarray)
    return x


def iterated(x: Any, steps: int, overlap: bool | Literal["auto"] = "auto") -> Any:
    """Return the lazy field after so many steps."""
    depths: list[Any] = [{0: RADIUS}, 0]
    made = dask_p2p.iterate(wave, (x, x), depths, steps, overlap=overlap, checkpoint_every=None)
    return made[0]


def computed(y: Any, timeout_s: float) -> float:
    """Return how long it takes to compute an array, wherever it stays."""
    from distributed import futures_of, wait

    start_s = time.perf_counter()
    y = y.persist()
    wait(y, timeout=timeout_s)
    elapsed_s = time.perf_counter() - start_s
    for future in futures_of(y):
        if future.status == "error":
            future.result()
    return elapsed_s


def wrong(workers: int, is_on_gpu: bool, timeout_s: float) -> float:
    """Return how much some steps differ from NumPy's at most."""
    from distributed import get_client

    x = field(_CHECKED, workers, is_on_gpu)
    both = [iterated(x, 5), x]
    client = get_client()
    if is_on_gpu:
        both = [each.map_blocks(_on_host, meta=np.empty((0, 0, 0), "f4")) for each in both]
    got, whole = (each.result(timeout=timeout_s) for each in client.compute(both))
    return float(abs(got - reference(whole, whole, 5)).max())


def _on_host(block: Any) -> Any:
    return block.get()


def kernel_alone(size: int, steps: int, is_on_gpu: bool) -> float:
    """Return the seconds of a step without any exchange, on fields with rims. On a worker."""
    module: Any = np
    if is_on_gpu:
        import cupy as module  # type: ignore[no-redef]
    rims = slice(RADIUS, -RADIUS)
    fields = [module.zeros((size + 2 * RADIUS, size, size), "f4") for _ in range(3)]

    def run(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            newest, before, out = fields
            wave(newest, before[rims], out[rims])
            fields[:] = [out, newest, before]
        if is_on_gpu:
            module.cuda.get_current_stream().synchronize()
        return time.perf_counter() - start_s

    run(1)
    return run(steps) / steps


def ours(x: Any, steps: int, overlap: bool | Literal["auto"], timeout_s: float) -> float:
    """Return the seconds of a step by `iterate`."""
    many, one = (computed(iterated(x, n, overlap), timeout_s) for n in (steps + 1, 1))
    return (many - one) / steps


def by_jax(
    module: str,
    key: str,
    is_on_gpu: bool,
    timeout_s: float,
    *flags: str,
    **options: int,
) -> list[float]:
    """Return the seconds that one of JAX's programs finds, in a process of its own."""
    given = [text for name, of in options.items() for text in (f"--{name}", str(of))]
    command = [sys.executable, "-m", f"benchmarks.rivals.{module}", *given, *flags]
    done = subprocess.run(
        command + ["--cpu"] * (not is_on_gpu),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])[key]
    return found


def attempt(what: str, measure: Callable[[], Any]) -> Any:
    """Return what is measured; None, with a line that says so, if that fails."""
    try:
        return measure()
    except Exception as exc:
        print(f"{what} failed: {type(exc).__name__}: {str(exc)[:500]}", flush=True)
        return None


def times_of(
    client: Any, size: int, steps: int, repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return seconds of a step by each way on the cluster, in turns; of those that did not fail."""
    workers = sorted(client.nthreads())
    x = client.persist(field(size, len(workers), is_on_gpu))

    def alone() -> float:
        given = size, steps, is_on_gpu
        future = client.submit(kernel_alone, *given, workers=workers[:1], pure=False)
        found: float = future.result(timeout=timeout_s)
        return found

    ways: dict[str, Callable[[], float]] = {
        KERNEL: alone,
        OURS: partial(ours, x, steps, "auto", timeout_s),
        NO_OVERLAP: partial(ours, x, steps, False, timeout_s),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way in [way for way in ways if way in times]:
            found = attempt(f"{size} {way}", ways[way])
            if found is None:
                del times[way]
            elif repeat:
                times[way].append(found)
    return times


def transposed(ctx: Any, x: Any, rounds: int) -> tuple[Any, Any]:
    """Return the transpose of a square in slabs, and for each round the seconds of a call."""
    out, times = ctx.redistribute(x, (0,), axes=(1, 0)), []
    for _ in range(rounds):
        _done(x)
        ctx.barrier()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            ctx.redistribute(x, (0,), axes=(1, 0), out=out)
        _done(out)
        times.append(ctx.allreduce((time.perf_counter() - start_s) / _CALLS, "max"))
    return out, np.array(times)


def _done(array: Any) -> None:
    """Wait for what is on the member's stream."""
    if not isinstance(array, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def transposes_of(
    client: Any, side: int, repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return seconds of a transpose by each way; of those that did not fail."""
    workers, kind = len(client.nthreads()), "cupy" if is_on_gpu else "numpy"
    x = client.persist(
        indexed_array((side, side), (-(-side // workers), side), np.dtype("f4"), kind)
    )
    spread: dict[str, Any] = {"cut": (0,), "rounds": repeats + 1, "members": workers}

    def checked(y: Any) -> None:
        if count := client.compute(count_wrong(y, x.shape, (1, 0), kind)).result(timeout=timeout_s):
            raise RuntimeError(f"{count} elements are wrong")

    def in_section() -> list[float]:
        y, times = client.persist(
            dask_p2p.spmd(transposed, x, per_member=[np.zeros(repeats + 1)], **spread)
        )
        found = client.compute(times).result(timeout=timeout_s)
        checked(y)
        return [float(each) for each in found.max(axis=0)[1:]]

    def as_layer() -> list[float]:
        checked(dask_p2p.transpose(x))
        return [computed(dask_p2p.transpose(x), timeout_s) for _ in range(repeats + 1)][1:]

    ways = {IN_SECTION: in_section, LAYER: as_layer}
    found = {way: attempt(f"{side} {way}", measure) for way, measure in ways.items()}
    return {way: times for way, times in found.items() if times is not None}


def transformed(ctx: Any, x: Any, is_real: bool, shape: Any, rounds: int) -> tuple[Any, ...]:
    """Return a cube, its difference after a way back, and for each round seconds of a call."""
    there, back = (ctx.rfftn, ctx.irfftn) if is_real else (ctx.fftn, ctx.ifftn)
    y, times = there(x, cut=(1,), from_cut=(0,), shape=shape), []
    found = back(y, cut=(0,), from_cut=(1,), shape=shape)
    error = ctx.allreduce(float(abs(found - x).max()), "max")
    del found
    for _ in range(rounds):
        _done(x)
        ctx.barrier()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            y = there(x, cut=(1,), from_cut=(0,), shape=shape)
        _done(y)
        times.append(ctx.allreduce((time.perf_counter() - start_s) / _CALLS, "max"))
    return x, np.array([error]), np.array(times)


def transforms_of(
    client: Any, side: int, repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return seconds of a transform by each way; of those that did not fail."""
    workers, shape = len(client.nthreads()), (side,) * 3

    def seconds(is_real: bool) -> list[float]:
        x = da.random.default_rng(0).random(shape, "f4", chunks=(-(-side // workers), side, side))
        x = x if is_real else x.astype("c8")
        x = client.persist(x.map_blocks(_on_gpu) if is_on_gpu else x)
        given = {"is_real": is_real, "shape": shape, "rounds": repeats + 1}
        outputs = [np.zeros(1), np.zeros(repeats + 1)]
        made = dask_p2p.spmd(transformed, x, per_member=outputs, members=workers, **given)
        found = client.compute(list(made[1:]))
        error, times = (each.result(timeout=timeout_s) for each in found)
        if not error.max() < _TOLERANCE:
            raise RuntimeError(f"values differ by {error.max():g} after their way back")
        return [float(each) for each in times.max(axis=0)[1:]]

    found = {
        way: attempt(f"{side} {way}", partial(seconds, is_real)) for way, is_real in REAL.items()
    }
    return {way: times for way, times in found.items() if times is not None}


def _on_gpu(block: Any) -> Any:
    import cupy

    return cupy.asarray(block)


@click.command(context_settings={"show_default": True})
@click.option(
    "--size", "sizes", multiple=True, type=int, default=(512, 256, 128), help="Of a cube; 0: none."
)
@click.option("--side", "sides", multiple=True, type=int, help="Of a square that is transposed.")
@click.option("--cube", "cubes", multiple=True, type=int, help="Side of one to be transformed.")
@click.option("--workers", default=2, help="With a GPU each.")
@click.option("--steps", type=int, help="At a time. By default by the size.")
@click.option("--repeats", default=3, help="Rounds after a first one.")
@click.option("--timeout", "timeout_s", default=30.0, help="Of each thing that is timed, seconds.")
@click.option("--cpu", "on_cpu", is_flag=True, help="NumPy, to try the program out.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    sizes: Sequence[int],
    sides: Sequence[int],
    cubes: Sequence[int],
    workers: int,
    steps: int | None,
    repeats: int,
    timeout_s: float,
    on_cpu: bool,
    path: Path | None,
) -> None:
    """Time a step of a wave, and transposes and Fourier transforms of sections, on GPUs."""
    from distributed import Client

    # In one piece, which others map: a multiple of 2 MiB.
    squares_bytes, cubes_bytes = (max(sides, default=0) ** 2 * 4, max(cubes, default=0) ** 3 * 8)
    largest_bytes = max(squares_bytes, 2 * cubes_bytes) // workers
    pool_bytes = max(2**34, -(-_AT_ONCE * largest_bytes // 2**30) * 2**30)
    of_gpus: dict[str, Any] = {} if on_cpu else {"rmm_pool_size": pool_bytes}
    squares: dict[int, dict[str, list[float]]] = {}
    rows: dict[int, dict[str, list[float]]] = {}
    spectra: dict[int, dict[str, list[float]]] = {}
    with (
        dask_p2p.local_cluster(workers, gpus=not on_cpu, **of_gpus) as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        error = wrong(workers, not on_cpu, timeout_s)
        if not error < _TOLERANCE:
            raise click.ClickException(f"values differ from NumPy's by {error:g}")
        for size in filter(None, sizes):
            count = steps or steps_of(size)
            rows[size] = times_of(client, size, count, repeats, not on_cpu, timeout_s)
        for side in sides:
            squares[side] = transposes_of(client, side, repeats, not on_cpu, timeout_s)
        for side in cubes:
            spectra[side] = transforms_of(client, side, repeats, not on_cpu, timeout_s)
    by_jax_here = partial(by_jax, is_on_gpu=not on_cpu, timeout_s=timeout_s)
    for size, times in rows.items():  # when nobody else has the GPUs' memory
        if find_spec("jax") is not None:
            given = {"gpus": workers, "size": size, "repeats": repeats}
            given["steps"] = steps or steps_of(size)
            measure = partial(by_jax_here, "jax_wave", "step_s", **given)
            if (found := attempt(f"{size} {JAX}", measure)) is not None:
                times[JAX] = found
        for way, each in times.items():
            print(f"{size:>5} {way:>34}: {median(each) * 1e3:9.4f} ms a step", flush=True)
    for side, times in squares.items():
        for way, each in times.items():
            print(f"{side:>5} {way:>34}: {median(each) * 1e3:9.4f} ms", flush=True)
    for side, times in spectra.items():
        for way, is_real in REAL.items() if find_spec("jax") is not None else ():
            given = {"gpus": workers, "size": side, "repeats": repeats}
            flags = ["--real"] * is_real
            measure = partial(by_jax_here, "jax_fft", "transform_s", *flags, **given)
            if (found := attempt(f"{side} {JAX}", measure)) is not None:
                times[f"{JAX}, for {way}"] = found
        for way, each in times.items():
            print(f"{side:>5} {way:>34}: {median(each) * 1e3:9.4f} ms", flush=True)
    shown: list[Any] = [{"size": size, "step_s": times} for size, times in rows.items()]
    shown += [{"side": side, "transpose_s": times} for side, times in squares.items()]
    shown += [{"cube": side, "transform_s": times} for side, times in spectra.items()]
    write(path, {**environment(), "workers": workers, "repeats": repeats, "rows": shown})


if __name__ == "__main__":
    main()
