"""Ordinary programs by Dask's layers, and as one gang: fused, `auto` and compiled.

    python -m benchmarks.fused_graphs --blocks 1 --blocks 8 --kib 64 --json FILE

Each program runs on a square array in slabs, with ``--blocks`` blocks of about ``--kib`` KiB on
each worker. The kinds are layers, `dask_p2p.fused`, `p2p.fuse: auto` and `dask_p2p.compile`, which
is called once before. Runs of all kinds alternate. The figures are the processor time of all
processes, and the time from the call that builds the result until all its blocks are there. All
kinds must return the same bits. "By hand" is a function of `dask_p2p.spmd` that returns about the
same values.

In addition, programs of at most a few operations run as calls of a resident gang. ``--memory``
replaces these by further runs of each kind, which measure the peaks of workers' memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.peaks import peak_bytes

__all__ = ["PROGRAMS", "main"]

KINDS = LAYERS, FUSED, AUTO, COMPILED = "layers", "fused", "auto", "compiled"
HAND = "by hand"
_STEPS = 50  # of the stencil
_GRADIENT_STEPS = 10
_CALLS = 500  # of a resident gang, before their last result is fetched
_PAUSE_S = 0.05  # after each run: workers release blocks, and report it


def heat(block: Any) -> Any:
    """Return a block after one step of a diffusion along its first axis."""
    return block * 0.5 + 0.25 * (np.roll(block, 1, 0) + np.roll(block, -1, 0))


def stencil(x: Any) -> Any:
    """Return the array after many steps, each one a `map_overlap`."""
    for _ in range(_STEPS):
        x = dask_p2p.map_overlap(heat, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
    return x


def rechunks(x: Any) -> Any:
    """Return an array that was divided into rows, into columns, and into blocks of both."""
    n = x.shape[0]
    y = dask_p2p.rechunk(x, (n // 4, -1)) + 1
    y = dask_p2p.rechunk(y, (-1, n // 4)) * 2
    return dask_p2p.rechunk(y, (n // 2, n // 2)) - x


def spectral(x: Any) -> Any:
    """Return a filtered array: a transform, a multiplication, and the inverse transform."""
    waves = da.from_array(np.linspace(0, 1, x.shape[1]), chunks=-1)
    return dask_p2p.fft.ifftn(dask_p2p.fft.fftn(x) * waves).real


def gradients(x: Any) -> Any:
    """Return the array after some steps of conjugate gradients for a five-point Laplacian."""
    y = da.zeros_like(x)
    r = p = x
    rr = (r * r).sum()
    for _ in range(_GRADIENT_STEPS):
        q = dask_p2p.map_overlap(
            laplacian, p, depth={0: 1}, boundary=0, corners=False, dtype=x.dtype
        )
        alpha = rr / (p * q).sum()
        y, r = y + alpha * p, r - alpha * q
        before, rr = rr, (r * r).sum()
        p = r + rr / before * p
    return y


def laplacian(block: Any) -> Any:
    """Return the negative five-point Laplacian of a block, zero outside of the array."""
    out = 4 * block
    out[1:] -= block[:-1]
    out[:-1] -= block[1:]
    out[:, 1:] -= block[:, :-1]
    out[:, :-1] -= block[:, 1:]
    return out


def gradients_of_rank(ctx: Any, b: Any) -> Any:
    """Return the local block of `gradients`, as a function of `dask_p2p.spmd`."""
    padded = ctx.with_halo(b, depth={0: 1}, boundary=0.0)
    p, x, r = padded.inner, np.zeros_like(b), b.copy()
    rr = ctx.allreduce(float(np.vdot(r, r)))
    for _ in range(_GRADIENT_STEPS):
        q = laplacian(ctx.update_halo(padded, copy=False))[1:-1]
        alpha = rr / ctx.allreduce(float(np.vdot(p, q)))
        x += alpha * p
        r -= alpha * q
        before, rr = rr, ctx.allreduce(float(np.vdot(r, r)))
        p *= rr / before
        p += r
    return x


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    f"map_overlap x {_STEPS}": stencil,
    "rechunk chain": rechunks,
    "fftn, multiply, ifftn": spectral,
    "conjugate gradients": gradients,
    "transpose, x + 1, sum": lambda x: (dask_p2p.transpose(x) + 1).sum(axis=0),
    "transpose": dask_p2p.transpose,
    "x + 1": lambda x: x + 1,
}

BY_HAND = {gradients: lambda x: dask_p2p.spmd(gradients_of_rank, x)}


def one_overlap(x: Any) -> Any:
    """Return the array after one `map_overlap`, which needs one exchange."""
    return dask_p2p.map_overlap(heat, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)


#: Programs whose results have the chunks of the argument.
RESIDENT: dict[str, Callable[[Any], Any]] = {
    "map_overlap": one_overlap,
    "transpose": dask_p2p.transpose,
    "x / norm": lambda x: x / (x * x).sum(),
    "x + 1": lambda x: x + 1,
}


def slabs(client: Any, workers: int, blocks: int, kib: int, seed: int) -> Any:
    """Return a square array on the workers, in slabs."""
    from distributed import wait

    count = workers * blocks
    n = max(1, isqrt(count * kib * 2**7) // count) * count
    matrix = da.random.default_rng(seed).normal(size=(n, n), chunks=(n // count, n))
    x = client.persist(matrix)
    wait(x)
    return x


def cpu_s(client: Any) -> float:
    """Return the processor time of the client, the scheduler in its process, and all workers."""
    return time.process_time() + float(sum(client.run(time.process_time).values()))


def one_run(
    client: Any, build: Callable[[], Any], option: str, expected: Any, is_by_hand: bool = False
) -> tuple[float, float]:
    """Return the processor time and the time of one run, with an option `p2p.fuse`.

    Raises `RuntimeError` for other bits; by hand, for values that are not about the same.
    """
    from distributed import wait

    # Otherwise collections of the garbage of other kinds, 0.2 s each, count for any kind.
    gc.collect()
    client.run(gc.collect)
    cpu, start_s = cpu_s(client), time.perf_counter()
    with dask.config.set({"p2p.fuse": option}):
        y = build().persist()
    wait(y)
    wall_s = time.perf_counter() - start_s
    spent_s = cpu_s(client) - cpu
    if expected is not None and not _is_equal(y.compute(), expected, is_by_hand):
        raise RuntimeError("the fused graph has other values than the layers")
    del y
    time.sleep(_PAUSE_S)
    return spent_s, wall_s


def _is_equal(result: Any, expected: Any, is_by_hand: bool) -> bool:
    if is_by_hand:
        return np.allclose(result, expected)
    return bool(result.tobytes() == expected.tobytes())


def builds_of(program: Callable[[Any], Any], x: Any) -> dict[str, tuple[Callable[..., Any], str]]:
    """Return by kind the function that builds the result, and the option `p2p.fuse`."""
    builds: dict[str, tuple[Callable[..., Any], str]] = {
        LAYERS: (program, "off"),
        FUSED: (lambda x: dask_p2p.fused(program(x)), "off"),
        AUTO: (program, "auto"),
        COMPILED: (dask_p2p.compile(program, x), "off"),
    }
    if program in BY_HAND:
        builds[HAND] = BY_HAND[program], "off"
    return builds


def peaks(client: Any, program: Callable[[Any], Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the most memory of all workers in each run, over its start, by kind."""
    builds = builds_of(program, inputs[0])
    found: dict[str, Any] = {kind: [] for kind in builds}
    for x in inputs[1:]:
        for kind, (build, option) in builds.items():
            run = partial(one_run, client, partial(build, x), option, None)
            found[kind].append(peak_bytes(client, run))
    return found


def measured(client: Any, program: Callable[[Any], Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the seconds of each run by kind. The first input warms up, and is checked."""
    expected = program(inputs[0]).compute()
    builds = builds_of(program, inputs[0])
    seconds: dict[str, Any] = {kind: {"cpu_s": [], "wall_s": []} for kind in builds}
    for number, x in enumerate(inputs):
        for kind, (build, option) in builds.items():
            checked = None if number else expected
            run = partial(build, x)
            spent_s, wall_s = one_run(client, run, option, checked, kind == HAND)
            if number:
                seconds[kind]["cpu_s"].append(spent_s)
                seconds[kind]["wall_s"].append(wall_s)
    return seconds


def resident(program: Callable[[Any], Any], x: Any, repeats: int) -> dict[str, Any]:
    """Return the seconds of a call of a resident gang, of one that is fetched, and of the layers.

    Raises `RuntimeError` for other bits.
    """
    from distributed import wait

    seconds: dict[str, Any] = {"call_s": [], "fetched_s": [], "layers_s": []}
    with dask_p2p.compile(program, x).resident(x) as run:
        u = run(x)
        if run.fetch(u).tobytes() != program(x).compute().tobytes():
            raise RuntimeError("the resident gang has other values than the layers")
        for _ in range(repeats):
            start_s = time.perf_counter()
            for _ in range(_CALLS):
                u = run(u)
            run.fetch(u)
            seconds["call_s"].append((time.perf_counter() - start_s) / _CALLS)
            start_s = time.perf_counter()
            u = run(u)
            run.fetch(u)
            seconds["fetched_s"].append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            wait(program(x).persist())
            seconds["layers_s"].append(time.perf_counter() - start_s)
    return seconds


def residents(x: Any, repeats: int, **fields: int) -> list[dict[str, Any]]:
    """Return a row for each program of `RESIDENT`; print it, too."""
    rows = []
    for name, program in RESIDENT.items():
        seconds = resident(program, x, repeats)
        call_s, fetched_s, layers_s = map(median, seconds.values())
        row = {"program": name, **fields, "seconds": seconds, "layers / call": layers_s / call_s}
        rows.append(row)
        print(
            f"{fields['kib']:>5} KiB x {fields['blocks']} {name:>24} resident: a call "
            f"{call_s * 1e3:.3f} ms, fetched {fetched_s * 1e3:.3f} ms, layers {layers_s * 1e3:.1f} "
            f"ms {layers_s / call_s:.0f} x"
        )
    return rows


def _print_memory(name: str, peak_bytes: dict[str, Any]) -> None:
    layers = median(peak_bytes[LAYERS])
    kinds = [
        f"{kind} {median(bytes_of_kind) / layers:5.2f} x"
        for kind, bytes_of_kind in peak_bytes.items()
    ]
    print(f"{name} memory: {layers / 2**20:8.1f} MiB, {', '.join(kinds)}")


@click.command(context_settings={"show_default": True})
@click.option(
    "--program", "names", multiple=True, type=click.Choice([*PROGRAMS]), default=[*PROGRAMS]
)
@click.option("--workers", default=4, help="Workers, with one thread each.")
@click.option("--blocks", multiple=True, type=int, default=(1, 8), help="Blocks a worker.")
@click.option("--kib", "sizes", multiple=True, type=int, default=(64,), help="Size of a block.")
@click.option("--repeats", default=5, help="Runs of each kind.")
@click.option("--memory", "has_memory", is_flag=True, help="Measure memory, and no resident gangs.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    names: Sequence[str],
    workers: int,
    blocks: Sequence[int],
    sizes: Sequence[int],
    repeats: int,
    has_memory: bool,
    path: Path | None,
) -> None:
    """Compare ordinary programs by layers with the same programs as one gang."""
    from distributed import Client, LocalCluster

    rows, resident_rows = [], []
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        for kib, count in [(kib, count) for kib in sizes for count in blocks]:
            inputs = [slabs(client, workers, count, kib, seed) for seed in range(repeats + 1)]
            for name in names:
                seconds = measured(client, PROGRAMS[name], inputs)
                row = {"program": name, "kib": kib, "blocks": count, "seconds": seconds}
                for figure in ("cpu_s", "wall_s"):
                    kinds = [*seconds]
                    layers, *other_medians = (median(seconds[kind][figure]) for kind in kinds)
                    times = f"layers {layers * 1e3:8.1f} ms"
                    for kind, other_median in zip(kinds[1:], other_medians, strict=True):
                        row[f"{figure} layers / {kind}"] = ratio = layers / other_median
                        times += f", {kind} {other_median * 1e3:8.1f} ms {ratio:5.2f} x"
                    print(f"{kib:>5} KiB x {count} {name:>24} {figure:>6}: {times}")
                if has_memory:
                    row["peak_bytes"] = memory = peaks(client, PROGRAMS[name], inputs)
                    _print_memory(f"{kib:>5} KiB x {count} {name:>24}", memory)
                rows.append(row)
            if not has_memory:
                resident_rows += residents(inputs[0], repeats, kib=kib, blocks=count)
    figures = {"rows": rows, "residents": resident_rows}
    write(path, {**environment(), "workers": workers, "repeats": repeats, **figures})


if __name__ == "__main__":
    main()
