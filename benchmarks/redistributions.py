"""Times of rechunks, transforms and stencils, compared with Dask's own ways.

    python -m benchmarks.redistributions --repeats 5 --json FILE
    python -m benchmarks.redistributions --case "3-D pencils" --megabytes 50
    python -m benchmarks.redistributions --case transpose --megabytes 800 --first --json FILE
    python -m benchmarks.redistributions --gpus --workers 2 --json FILE

In one run all ways take turns, each time on a new array: Dask leaves copies of blocks on other
workers, and a second run would reuse them. Each worker has the same number of neighbouring blocks,
as in a user's array. Every result is checked element by element, or against
``dask.array.map_overlap``. With ``--first`` each timed run is the first one of its own cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, TypeAlias

import click
import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.finished import with_finished_kernels
from benchmarks.measure import Case, Measured, Row, Way, no_op
from benchmarks.options import AnyClusterSpec, choose_cluster, commit_option, json_option
from benchmarks.report import NO_OP, Report
from benchmarks.rivals import mpi_fftn
from benchmarks.tables import (
    OURS,
    array_text,
    devices_text,
    output,
    report_correctness,
    show_ways,
    summary,
    table,
)
from benchmarks.transforms import DASK, Spectrum, transforms
from dask_p2p.cli import COUNT, check_fits, one_line_errors
from dask_p2p.geometry import split_evenly
from dask_p2p.plans import Plan, plan_halo

_CPU_MEGABYTES = (50, 800)
_GPU_MEGABYTES = (17180,)  # 16 GiB
_CPU_BLOCKS = 16
_LINK_GBS = 310.0  # required rate into a GPU
_SLACK_S = 0.002
FUNCTION = "the function alone"
TOO_EARLY = "unfinished, dask "  # prefix of ways that end before their kernels end


@dataclass(frozen=True, slots=True)
class Redistribution(Case):
    """An array, and the chunks of its result."""

    after: tuple[tuple[int, ...], ...] = ()
    reach: float = 1.0  # required speed relative to the faster of Dask's ways

    def ways(self, on_gpus: bool) -> dict[str, Way]:
        """Return the ways to measure, by name; Dask's p2p fails on GPUs."""
        p2p_way = Way(partial(dask_p2p.transpose, chunks=self.after), required=True)
        ways = {OURS: p2p_way, NO_OP: Way(no_op, checked=False)}
        if on_gpus:
            tasks = partial(self._dask, "tasks")
            return ways | {
                f"{DASK}tasks": Way(lambda x, axes: with_finished_kernels(tasks(x, axes))),
                f"{TOO_EARLY}tasks": Way(tasks),
            }
        methods = ("tasks", "p2p")
        return ways | {f"{DASK}{method}": Way(partial(self._dask, method)) for method in methods}

    def _dask(self, method: str, x: Any, axes: Any) -> Any:
        return x.transpose(axes).rechunk(self.after, method=method)


@dataclass(frozen=True, slots=True)
class Stencil(Case):
    """A periodic array, and the radius of a star-shaped stencil."""

    depth: int = 1
    reach: float = 1.0

    def ways(self, on_gpus: bool) -> dict[str, Way]:
        """Return the ways to measure, by name."""
        function = partial(star, depth=self.depth)
        inner = tuple(tuple(n - 2 * self.depth for n in sizes) for sizes in self.chunks)

        def alone(x: Any, _: Any) -> Any:
            return x.map_blocks(function, meta=x._meta, chunks=inner)

        return {
            OURS: Way(partial(self.mapped, dask_p2p.map_overlap), required=True),
            FUNCTION: Way(alone, checked=False),
            f"{DASK}map_overlap": Way(self._dask, checked=False),
        }

    def mapped(self, map_overlap: Callable[..., Any], x: Any, axes: Any, **options: Any) -> Any:
        """Return the lazy result of this package's or Dask's `map_overlap`."""
        options = options or {"corners": False}
        function = partial(star, depth=self.depth)
        options |= {"depth": self.depth, "boundary": "periodic", "trim": False}
        return map_overlap(function, x, meta=x._meta, **options)

    def _dask(self, x: Any, axes: Any) -> Any:
        # `with_finished_kernels` is unnecessary: the function waits for its kernel.
        return self.mapped(da.map_overlap, x, axes, chunks=x.chunks, allow_rechunk=False)

    def plan(self, y: Any) -> Plan:
        """Return the plan of a star's halo, which has no corners."""
        ndim = len(self.shape)
        depth = ((self.depth, self.depth),) * ndim
        return plan_halo(self.chunks, depth, ("periodic",) * ndim, has_corners=False)

    def count_wrong(self, y: Any) -> int:
        """Count the elements that differ from Dask's."""
        return int((y != self._dask(self.make(), self.axes)).sum().compute())


AnyCase: TypeAlias = Redistribution | Stencil | Spectrum


_STAR = """
    const ptrdiff_t z = i % nz + depth, y = i / nz % ny + depth, x = i / nz / ny + depth;
    const ptrdiff_t wide = nz + 2 * depth, layer = wide * (ny + 2 * depth);
    const ptrdiff_t at = x * layer + y * wide + z;
    T sum = block[at];
    for (int d = 1; d <= depth; ++d) {
        sum += block[at - d * layer] + block[at + d * layer];
        sum += block[at - d * wide] + block[at + d * wide];
        sum += block[at - d] + block[at + d];
    }
    out = sum;
"""


def star(block: Any, depth: int) -> Any:
    """Add to each element its neighbours along the axes; the result has no halo."""
    if isinstance(block, np.ndarray):
        inner = [slice(depth, n - depth) for n in block.shape]
        out = block[tuple(inner)].copy()
        for axis, length in enumerate(block.shape):
            for start in (start for start in range(2 * depth + 1) if start != depth):
                window = slice(start, length - 2 * depth + start)
                out += block[(*inner[:axis], window, *inner[axis + 1 :])]
        return out
    import cupy  # blocks of three axes, in C order

    kernel = cupy.ElementwiseKernel(
        "raw T block, int64 ny, int64 nz, int32 depth", "T out", _STAR, "star"
    )
    out = cupy.empty([n - 2 * depth for n in block.shape], block.dtype)
    kernel(cupy.ascontiguousarray(block), *out.shape[1:], depth, out)
    cupy.cuda.get_current_stream().synchronize()  # the kernel's time counts
    return out


def scaled_cases(megabytes: int, workers: int, kind: str) -> Iterator[Redistribution]:
    """Yield the cases that exist in every size, with about this many megabytes (1e6)."""
    on_gpus = kind == "cupy"
    dtype = np.dtype("f4" if on_gpus else "f8")
    elements = megabytes * 10**6 // dtype.itemsize
    side, edge = _multiple(elements ** (1 / 2), 32), _multiple(elements ** (1 / 3), 32)
    blocks = workers if on_gpus else _CPU_BLOCKS

    def case(name: str, reach: float, before: Sequence[int], after: Sequence[int]) -> Any:
        shape = (side if len(before) == 2 else edge,) * len(before)
        partition = tuple(map(split_evenly, shape, before))
        to = tuple(map(split_evenly, shape, after))
        return Redistribution(
            shape, partition, (0, 1, 2)[: len(shape)], dtype, kind, name, to, reach
        )

    rows, columns = (blocks, 1), (1, blocks)
    p = next(p for p in range(int(blocks**0.5), 0, -1) if blocks % p == 0)
    slabs = f"{blocks} row slabs"
    yield case(f"{slabs} to columns", 1.4 if on_gpus else 2.0, rows, columns)
    yield case(f"4 x 4 to {slabs}", 1.0 if on_gpus else 2.0, (4, 4), rows)
    pencils = (1, blocks // p, p), (blocks // p, 1, p)
    yield case("3-D pencils x to y", 1.4 if on_gpus else 2.0, *pencils)
    if on_gpus:
        return
    yield case("8 row slabs to 32 x 32", 2.0, (8, 1), (32, 32))
    joined = case("32 x 32 to 8 row slabs", 1.3, (32, 32), (8, 1))
    yield joined
    yield replace(joined, name="32 x 32, scattered, to 8 row slabs", scattered=True)
    slab = case(f"transpose of {workers} row slabs", 2.0, (workers, 1), (workers, 1))
    yield replace(slab, axes=(1, 0))
    shifted = case("row slabs shifted by 1 %", 1.3, rows, rows)
    yield replace(shifted, after=(_shifted(shifted.chunks[0], 0.01), (side,)))


def fixed_cases(workers: int, kind: str) -> Iterator[AnyCase]:
    """Yield the cases of a fixed size."""
    f4, f8 = np.dtype("f4"), np.dtype("f8")
    yield from transforms(workers, kind)
    if kind == "cupy":
        chunks = ((512,) * workers, (512,), (512,))
        shape = (512 * workers, 512, 512)
        yield Stencil(shape, chunks, (0, 1, 2), f4, kind, "25-point map_overlap", 4)
        return
    tiles = (64,) * 64
    small = Redistribution((4096, 4096), (tiles, tiles), (0, 1), f8)
    rows = (split_evenly(4096, _CPU_BLOCKS), (4096,))
    yield replace(small, name="64 x 64 to row slabs", after=rows)
    shifted = (32, *tiles[1:], 32)
    yield replace(small, name="64 x 64 shifted", after=(shifted, shifted))
    plane, box = (1000,) * 4, ((112,) * 2, (112,) * 2, (56,) * 4)
    yield Stencil((4000, 4000), (plane, plane), (0, 1), f8, kind, "5-point map_overlap", 1, 3.0)
    yield Stencil((224,) * 3, box, (0, 1, 2), f8, kind, "25-point map_overlap", 4, 3.0)


def _multiple(length: float, divisor: int) -> int:
    return max(divisor, round(length / divisor) * divisor)


def _shifted(sizes: Sequence[int], share: float) -> tuple[int, ...]:
    """Move the inner bounds of blocks by a fraction of the first block."""
    shift = max(1, round(sizes[0] * share))
    return (sizes[0] + shift, *sizes[1:-1], sizes[-1] - shift)


def judged(rows: Sequence[Row], case: AnyCase, workers: int) -> None:
    """Add the goals to this package's row, and its measured ratios."""
    ways = {row["way"]: row for row in rows if "failed" not in row}
    p2p_way = ways[OURS]
    dask_s = [row["median_s"] for way, row in ways.items() if way.startswith(DASK)]
    p2p_way["reach"] = case.reach
    p2p_way["faster_by"] = min(dask_s) / p2p_way["median_s"] if dask_s else None
    if mpi_fftn.WAY in ways:
        p2p_way["to_mpi"] = p2p_way["median_s"] / ways[mpi_fftn.WAY]["median_s"]
    if case.kind == "cupy":
        link_s = p2p_way["moved_bytes"] / workers / _LINK_GBS / 1e9
        floor_s = ways[FUNCTION if FUNCTION in ways else NO_OP]["median_s"]
        p2p_way["budget_s"] = floor_s + link_s + _SLACK_S


def _summary(measured: Measured) -> Any:
    """Return a table with one line for each array."""
    summary = table("case", "MB", "ms", "budget", "faster by", "reach", "CPU s", "moved", "least")
    for case, rows in measured.items():
        p2p_row = next((row for row in rows if "reach" in row), None)
        if p2p_row is None:
            continue
        budget_s, faster, size = p2p_row.get("budget_s"), p2p_row["faster_by"], case.size_bytes
        summary.add_row(
            case.name,
            f"{size / 1e6:.0f}",
            f"{p2p_row['median_s'] * 1e3:.1f}",
            f"{budget_s * 1e3:.1f}" if budget_s else "",
            f"{faster:.2f}" if faster else "",
            f"{p2p_row['reach']:g}",
            " / ".join(f"{median(row['cpu_s']):.2f}" for row in rows if "cpu_s" in row),
            f"{p2p_row['moved_bytes'] / size:.2%}",
            f"{p2p_row['least_anywhere_bytes'] / size:.2%}",
        )
    return summary


def is_wanted(case: AnyCase, patterns: Sequence[str], spec: AnyClusterSpec) -> bool:
    """Return true if the name has a wanted part or, with no wanted parts, if the array fits."""
    if patterns:
        return any(part in case.name for part in patterns)
    return not isinstance(case, Spectrum) or case.is_usual(spec.memory_bytes)


@click.command(context_settings={"show_default": True})
@click.option(
    "--case", "patterns", multiple=True, help="Part of a name; repeatable.  [default: all that fit]"
)
@click.option(
    "--megabytes",
    type=COUNT,
    multiple=True,
    help="1e6 bytes each.  [default: 50, 800; GPUs: 17180]",
)
@click.option("--repeats", type=COUNT, default=5, help="Timed runs of each way after the first.")
@click.option("--first", is_flag=True, help="Time the first run in a new cluster each time.")
@click.option("--gpus", is_flag=True, help="Use GPUs instead of four CPU workers.")
@click.option("--workers", type=COUNT, help="[default: one for each GPU, else 4]")
@commit_option
@json_option
def main(
    patterns: Sequence[str],
    megabytes: Sequence[int],
    repeats: int,
    first: bool,
    gpus: bool,
    workers: int | None,
    commit: str | None,
    target: str | None,
) -> None:
    """Measure and check rechunk, map_overlap and transforms, and Dask's own ways."""
    console = output(to_stderr=target == "-")
    with one_line_errors():
        spec = choose_cluster(workers, cpu=not gpus)
        if gpus and not spec.gpus:
            raise click.BadParameter("there are no two usable GPUs", param_hint="--gpus")
        sizes = megabytes or (_GPU_MEGABYTES if gpus else _CPU_MEGABYTES)
        every: list[AnyCase] = [*fixed_cases(spec.workers, spec.kind)]
        every[:0] = (c for size in sizes for c in scaled_cases(size, spec.workers, spec.kind))
        cases = [case for case in every if is_wanted(case, patterns, spec)]
        if not cases:
            names = ", ".join(dict.fromkeys(case.name for case in every))
            raise click.BadParameter(f"no case has this name; choose {names}", param_hint="--case")
        for case in cases:
            check_fits(spec, case.shape, case.dtype, (), "--megabytes")
        report = Report(spec, repeats, commit, target)

        def started(_: Any) -> None:
            console.print(summary([("devices", devices_text(spec, report.devices))]))

        ways: dict[Case, dict[str, Way]] = {case: _ways(case) for case in cases}
        if first:
            report.measure_first(ways, started)
        else:
            report.measure(ways, started, "measuring", anew=True)
        for case in cases:
            judged(report.measured[case], case, spec.workers)
            title = f"{case.name}, {array_text(case.shape, case.dtype)}"
            show_ways(console, report.measured[case], title)
        console.print(_summary(report.measured))
        report.finish()
        report_correctness(console, report.measured)


def _ways(case: AnyCase) -> dict[str, Way]:
    """Return the ways to measure, by name; on GPUs Dask's ways use UCX, their fastest."""
    on_gpus = case.kind == "cupy"
    ways = case.ways(on_gpus)
    if on_gpus and find_spec("distributed_ucxx") is not None:
        for name in ways:
            if DASK in name:
                ways[name] = replace(ways[name], protocol="ucx")
    return ways


if __name__ == "__main__":
    main()
