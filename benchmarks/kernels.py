"""Speed of the permuting kernels: on a GPU against memcpy, on a CPU against NumPy.

    python benchmarks/kernels.py gpu --json gpu.json
    python benchmarks/kernels.py cpu --quick

Each figure is the median of several runs. Before them one result is checked against another
computation, in a target filled with garbage. Bandwidth counts each byte twice, once read and once
written, as in the article on the multi-GPU transpose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dask_p2p.backends import backend_named

POISON = 0xA5
Row = dict[str, Any]

CPU_CASES = [
    ((16, 16), "f8", (1, 0)),
    ((100, 100), "f8", (1, 0)),
    ((300, 300), "f8", (1, 0)),
    ((512, 512), "f4", (1, 0)),
    ((1000, 1000), "f8", (1, 0)),
    ((1024, 1024), "f8", (1, 0)),
    ((4096, 4096), "f4", (1, 0)),
    ((2500, 10000), "f8", (1, 0)),
    ((10000, 10000), "i1", (1, 0)),
    ((10000, 10000), "f8", (1, 0)),
    ((5000, 5000), "c16", (1, 0)),
    ((3000, 3000), ">f4", (1, 0)),
    ((1000000, 3), "f8", (1, 0)),
    ((3, 1000000), "f8", (1, 0)),
    ((50, 500, 600), "f8", (0, 2, 1)),
    ((200, 300, 400), "f4", (2, 1, 0)),
    ((200, 300, 400), "f4", (2, 0, 1)),
    ((200, 300, 400), "f4", (1, 2, 0)),
    ((200, 300, 400), "f4", (1, 0, 2)),
    ((40, 50, 60, 70), "f8", (3, 2, 1, 0)),
]


def gpu_cases(gib: float) -> list[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    """Return matrices of about `gib` for each item size, and other permutations."""
    cases: list[tuple[tuple[int, ...], str, tuple[int, ...]]] = []
    for dtype in ("u1", "u2", "f4", "f8", "c16"):
        side = int((gib * 2**30 / np.dtype(dtype).itemsize) ** 0.5) // 256 * 256
        cases += [((side, side), dtype, (1, 0)), ((side + 1, side - 1), dtype, (1, 0))]
        for side in (16, 33):  # batches of small matrices
            matrices = int(gib * 2**30 / (side * side * np.dtype(dtype).itemsize))
            cases.append(((matrices, side, side), dtype, (0, 2, 1)))
    batch = max(1, int(gib * 2**30 / (2048 * 2048 * 4)))
    cases.append(((batch, 2048, 2048), "f4", (0, 2, 1)))
    cases.append(((2048, batch, 2048), "f4", (1, 0, 2)))
    cases.append(((2048, batch, 2048), "f4", (2, 1, 0)))
    cases.append(((batch * 1024, 4096, 1), "f4", (0, 1, 2)))
    cases.append(((batch * 1024, 1024, 3), "u1", (1, 0, 2)))
    cases.append(((batch << 20, 3), "f4", (1, 0)))
    return cases


def run_cpu(case: tuple[Sequence[int], str, tuple[int, ...]], repeats: int) -> Row:
    """Measure one case on the processor."""
    shape, dtype, axes = case
    backend = backend_named("numpy")
    items = int(np.prod(shape))
    src = np.arange(items).astype(dtype).reshape(shape)
    dst = backend.empty([shape[a] for a in axes], dtype)
    dst.reshape(-1).view("u1")[...] = POISON
    backend.permute_into(dst, src, axes)
    if not np.array_equal(dst, src.transpose(axes)):
        raise SystemExit(f"wrong result: {case}")
    inner = max(1, 100_000 // items)
    numpy_s, copyto_s, ours_s = cpu_seconds(
        [
            lambda: np.ascontiguousarray(src.transpose(axes)),
            lambda: np.copyto(dst, src.transpose(axes)),
            lambda: backend.permute_into(dst, src, axes),
        ],
        repeats,
        inner,
    )
    return {
        "shape": list(shape),
        "dtype": dtype,
        "axes": list(axes),
        "ascontiguousarray_ms": numpy_s * 1e3,
        "ours_ms": ours_s * 1e3,
        "ratio_to_ascontiguousarray": numpy_s / ours_s,
        "ratio_to_copyto": copyto_s / ours_s,
    }


def cpu_seconds(works: Sequence[Callable[[], Any]], repeats: int, inner: int) -> list[float]:
    """Return the median time of each call; calls take turns, so that other load hits all alike."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, times, strict=True):
            start = time.perf_counter()
            for _ in range(inner):
                work()
            seconds.append((time.perf_counter() - start) / inner)
    return [statistics.median(seconds) for seconds in times]


def run_gpu(case: tuple[Sequence[int], str, tuple[int, ...]], repeats: int) -> Row:
    """Measure one case on the current GPU."""
    import cupy

    shape, dtype, axes = case
    backend = backend_named("cupy")
    src = cupy.empty(shape, dtype)
    fill(cupy, src)
    dst = backend.empty([shape[a] for a in axes], dtype)
    dst.reshape(-1).view("u1").fill(POISON)
    backend.permute_into(dst, src, axes)
    if not same(cupy, dst, src.transpose(axes)):
        raise SystemExit(f"wrong result: {case}")
    flat_src, flat_dst = src.reshape(-1), dst.reshape(-1)
    memcpy_s = gpu_seconds(cupy, partial(cupy.copyto, flat_dst, flat_src), repeats)
    ours_s = gpu_seconds(cupy, partial(backend.permute_into, dst, src, axes), repeats)
    row: Row = {
        "shape": list(shape),
        "dtype": dtype,
        "axes": list(axes),
        "memcpy_tb_s": 2 * src.nbytes / memcpy_s / 1e12,
        "ours_tb_s": 2 * src.nbytes / ours_s / 1e12,
        "ratio_to_memcpy": memcpy_s / ours_s,
    }
    del src, dst, flat_src, flat_dst
    cupy.get_default_memory_pool().free_all_blocks()
    return row


def fill(cupy: Any, array: Any) -> None:
    """Fill each byte with a hash of its index, part by part."""
    flat = array.reshape(-1).view("u1")
    step = 1 << 28
    for start in range(0, flat.size, step):
        places = cupy.arange(start, min(start + step, flat.size), dtype="u8")
        flat[start : start + step] = (places * 2654435761 >> 13).astype("u1")


def same(cupy: Any, one: Any, candidate: Any) -> bool:
    """Compare bits, part by part along the first axis."""
    words = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
    kind = words.get(one.dtype.itemsize)
    if kind is None:  # 16 bytes: as two halves
        return all(
            same(cupy, getattr(one, half), getattr(candidate, half)) for half in ("real", "imag")
        )
    step = max(1, one.shape[0] // 16)
    return all(
        bool((one.view(kind)[n : n + step] == candidate.view(kind)[n : n + step]).all())
        for n in range(0, one.shape[0], step)
    )


def gpu_seconds(cupy: Any, work: Callable[[], Any], repeats: int) -> float:
    """Return the median time of one call between two events, the first calls left out."""
    times: list[float] = []
    for _ in range(repeats + 2):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return float(statistics.median(times[2:]))


def print_table(rows: list[Row]) -> None:
    """Print one line for each case, with the columns of the first."""
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", choices=["cpu", "gpu"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the GPU's arrays")
    parser.add_argument("--quick", action="store_true", help="leave out cases of over 0.1 s")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()

    rows = []
    if options.device == "cpu":
        for case in CPU_CASES:
            if not options.quick or np.prod(case[0]) < 1 << 24:
                rows += [run_cpu(case, options.repeats)]
    else:
        gib = 0.25 if options.quick else options.gib
        rows += [run_gpu(case, options.repeats) for case in gpu_cases(gib)]
    print_table(rows)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
