"""Times of consecutive transposes and Fourier transforms inside a section."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np

import dask_p2p
from dask_p2p.cli.cluster import count_wrong, indexed_array
from dask_p2p.plans.ranks import ORDERS

__all__ = [
    "REAL",
    "attempt",
    "computed",
    "shape_text",
    "transforms_of",
    "transposes_of",
    "wait_until_gone",
]

IN_SECTION, LAYER = "a transpose in a section", "a layer of dask_p2p.transpose"
REAL = {"Context.fftn": False, "Context.rfftn": True}  # true: of real numbers
PENCILS = "in pencils"
_TOLERANCE = 1e-4
_CALLS = 8  # consecutive transforms or transposes in a section
_POLL_S = 0.01


def attempt(description: str, measure: Callable[[], Any]) -> Any:
    """Return the measurement; after a failure, print its reason and return None."""
    try:
        return measure()
    except Exception as exc:
        print(f"{description} failed: {type(exc).__name__}: {str(exc)[:500]}", flush=True)
        return None


def _attempted(size: object, ways: dict[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
    """Return the times of each way that does not fail."""
    found = {way: attempt(f"{size} {way}", measure) for way, measure in ways.items()}
    return {way: times for way, times in found.items() if times is not None}


def computed(y: Any, timeout_s: float) -> float:
    """Return the seconds to compute an array on the workers; then release it.

    The next call may have the same keys, and would reuse blocks that still exist.
    """
    from distributed import futures_of, wait

    start_s = time.perf_counter()
    y = y.persist()
    wait(y, timeout=timeout_s)
    elapsed_s = time.perf_counter() - start_s
    for future in futures_of(y):
        if future.status == "error":
            future.result()
    name, y, future = y.name, None, None
    wait_until_gone(name, timeout_s)
    return elapsed_s


def wait_until_gone(name: str, timeout_s: float) -> None:
    """Wait until the scheduler has forgotten all blocks of the array with this name."""
    from distributed import get_client

    client, until_s = get_client(), time.monotonic() + timeout_s
    while any(isinstance(key, tuple) and key[0] == name for key in client.who_has()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"blocks of the last result are still there after {timeout_s:g} s")
        time.sleep(_POLL_S)


def transposed(ctx: Any, x: Any, rounds: int, exchange: str) -> tuple[Any, Any]:
    """Return the transpose of a square in slabs, and the seconds of a call in each round."""
    transpose = partial(ctx.redistribute, x, (0,), axes=(1, 0), exchange=exchange)
    out = transpose()
    return out, _rounds(ctx, x, partial(transpose, out=out), rounds)


def _rounds(ctx: Any, x: Any, call: Callable[[], Any], rounds: int) -> Any:
    """Return the slowest rank's seconds of a call in each round."""
    times = []
    for _ in range(rounds):
        wait_for_kernels(x)
        ctx.barrier()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        wait_for_kernels(x)
        times.append(ctx.allreduce((time.perf_counter() - start_s) / _CALLS, "max"))
    return np.array(times)


def wait_for_kernels(array: Any) -> None:
    """Wait for the rank's stream, if arrays are on a GPU."""
    if not isinstance(array, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def transposes_of(
    client: Any, side: int, repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return the seconds of a transpose by each way that did not fail."""
    workers, kind = len(client.nthreads()), "cupy" if is_on_gpu else "numpy"
    x = client.persist(
        indexed_array((side, side), (-(-side // workers), side), np.dtype("f4"), kind)
    )
    spread: dict[str, Any] = {"partition": (0,), "rounds": repeats + 1, "ranks": workers}

    def checked(y: Any) -> None:
        if count := client.compute(count_wrong(y, x.shape, (1, 0), kind)).result(timeout=timeout_s):
            raise RuntimeError(f"{count} elements are wrong")

    def in_section(exchange: str) -> list[float]:
        per_rank = [np.zeros(repeats + 1)]
        y, times = client.persist(
            dask_p2p.spmd(transposed, x, per_rank=per_rank, exchange=exchange, **spread)
        )
        rank_times = client.compute(times).result(timeout=timeout_s)
        checked(y)
        return [float(time_s) for time_s in rank_times.max(axis=0)[1:]]

    def as_layer() -> list[float]:
        y = dask_p2p.transpose(x)
        checked(y)
        wait_until_gone(y.name, timeout_s)
        return [computed(y, timeout_s) for _ in range(repeats + 1)][1:]

    ways = {
        IN_SECTION if order == "auto" else f"{IN_SECTION}, {order}": partial(in_section, order)
        for order in ORDERS
    }
    return _attempted(side, {**ways, LAYER: as_layer})


def transformed(
    ctx: Any, x: Any, is_real: bool, shape: Any, partitions: Any, rounds: int
) -> tuple[float, Any]:
    """Return an array's error after a round trip, and the seconds of a call in each round."""
    forward, inverse = (ctx.rfftn, ctx.irfftn) if is_real else (ctx.fftn, ctx.ifftn)
    before, after = partitions
    transform = partial(forward, x, partition=after, from_partition=before, shape=shape)
    error = abs(inverse(transform(), partition=before, from_partition=after, shape=shape) - x).max()
    return float(error), _rounds(ctx, x, transform, rounds)


def transforms_of(
    client: Any, shape: tuple[int, int, int], repeats: int, is_on_gpu: bool, timeout_s: float
) -> dict[str, list[float]]:
    """Return the seconds of a transform by each way that did not fail.

    Four and more workers, if they are an even number, also transform pencils.
    """
    workers = len(client.nthreads())

    def seconds(is_real: bool, grid: tuple[int, ...], partitions: Any) -> list[float]:
        chunks = tuple(-(-n // parts) for n, parts in zip(shape, grid, strict=True))
        x = da.random.default_rng(0).random(shape, "f4", chunks=chunks)
        x = x if is_real else x.astype("c8")
        if is_on_gpu:
            import cupy

            x = x.map_blocks(cupy.asarray)
        parameters: dict[str, Any] = {"is_real": is_real, "shape": shape, "rounds": repeats + 1}
        parameters |= {"partition": partitions[0], "partitions": partitions, "ranks": workers}
        per_rank = [0.0, np.zeros(repeats + 1)]
        of_ranks = dask_p2p.spmd(
            transformed, client.persist(x), outputs=0, per_rank=per_rank, **parameters
        )
        futures = client.compute(list(of_ranks))
        error, times = (future.result(timeout=timeout_s) for future in futures)
        if not error.max() < _TOLERANCE:
            raise RuntimeError(f"values differ by {error.max():g} after a round trip")
        return [float(time_s) for time_s in times.max(axis=0)[1:]]

    slabs, pencils = ((0,), (1,)), ((0, 1), (1, 2))
    ways: dict[str, Callable[[], list[float]]]
    ways = {way: partial(seconds, real, (workers, 1, 1), slabs) for way, real in REAL.items()}
    if workers > 2 and workers % 2 == 0:
        for way, real in REAL.items():
            arguments = real, (workers // 2, 2, 1), pencils
            ways[f"{way}, {PENCILS}"] = partial(seconds, *arguments)
    return _attempted(shape_text(shape), ways)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as 2048x2048x1024."""
    return "x".join(map(str, shape))
