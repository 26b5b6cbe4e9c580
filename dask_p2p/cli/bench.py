"""``dask p2p bench``: the measuring program of the original article, for Dask.

It prints what the program in chapter 4 of *CUDA Fortran for Scientists and Engineers* (Ruetsch and
Fatica) prints: devices, sizes, tile and thread block, grid, mode, and the bandwidth of a result
that was checked. Its two modes::

    sync     reader 0  [tile][T][tile][T]
             reader 1                      [tile][T][tile][T]        one transfer at a time
    async    reader 0  [tile][tile]
                             [T]   [T]
             reader 1  [tile][tile]                                  staged and overlapped
                             [T]   [T]

There one host thread waits for each copy of each device, so in its "sync" mode there is one
transfer at a time in the whole machine. Here workers wait for themselves only (``p2p.mode: sync``),
so they also take turns, and Dask's time between the turns is told apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._measuring import measure_on, rival_ways
from dask_p2p.cli._options import (
    DTYPE,
    SHAPE,
    Site,
    axes_option,
    check_fits,
    choose_site,
    cpu_option,
    one_line_errors,
    order_of_axes,
    scheduler_option,
    workers_option,
)
from dask_p2p.layout import split_evenly

if TYPE_CHECKING:
    from rich.console import Console

    from dask_p2p.measure import Runs

__all__ = ["bench"]

_CPU_SIDE, _GPU_SIDE = 6000, 32768  # of the default matrix
_MEMORY_SHARE = 8  # which takes at most this part of the free memory
_METHODS = ("tasks", "p2p")  # of Dask's rechunk


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured, and where."""

    site: Site
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[int, ...]
    modes: tuple[str, ...]
    repeats: int
    rivals: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return int(prod(self.shape) * self.dtype.itemsize)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """One slab for each worker."""
        rest = ((length,) for length in self.shape[1:])
        return (split_evenly(self.shape[0], self.site.workers), *rest)


def _target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Find out before the measuring, not after, that a file cannot be written."""
    if value not in (None, "-") and not Path(value).absolute().parent.is_dir():
        raise click.BadParameter(f"{value!r}: there is no such folder", ctx, param)
    return value


@click.command()
@click.option(
    "--shape",
    type=SHAPE,
    metavar="AxB[xC...]",
    help=f"Of the array.  [default: {_CPU_SIDE}x{_CPU_SIDE}, on GPUs {_GPU_SIDE}x{_GPU_SIDE}, or "
    "what fits]",
)
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, metavar="NAME")
@axes_option
@scheduler_option
@workers_option
@cpu_option
@click.option(
    "--mode",
    type=click.Choice(["async", "sync", "both"]),
    default="async",
    show_default=True,
    help="Transfers staged and overlapped, or blocking ones one after another in the whole "
    "cluster, or both in turn.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Timed runs of each way, after a first one.",
)
@click.option(
    "--rivals/--no-rivals", default=False, show_default=True, help="Measure Dask's own ways too."
)
@click.option(
    "--json",
    "target",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    callback=_target,
    metavar="FILE",
    help="Write all that was measured to this file; - is standard output, with nothing else on it.",
)
def bench(
    shape: tuple[int, ...] | None,
    dtype: Any,
    axes: tuple[int, ...] | None,
    scheduler: str | None,
    workers: int | None,
    cpu: bool,
    mode: str,
    repeats: int,
    rivals: bool,
    target: str | None,
) -> None:
    """Measure the transpose of an array that lies in slabs on the workers, and check it."""
    from dask_p2p.cli._tables import judge, output

    console = output(to_stderr=target == "-")
    with one_line_errors():
        site = choose_site(workers, cpu, scheduler)
        shape = shape or _default_shape(site, dtype.itemsize)
        order = order_of_axes(axes, shape)
        check_fits(site, shape, dtype, order, "--shape")
        # Alternating from the slower to the quicker, as the article lists them.
        modes = ("sync", "async") if mode == "both" else (mode,)
        job = Job(site, shape, dtype, order, modes, repeats, rivals)
        if site.note:
            console.print(site.note)
        names, measured = _run(job)
        _show(console, job, names, measured)
        if target is not None:
            _write(target, _report(job, names, measured))
        judge(console, measured, prod(shape))


def _default_shape(site: Site, itemsize: int) -> tuple[int, int]:
    fits = isqrt(site.memory_bytes // _MEMORY_SHARE // itemsize)
    side = max(site.workers, min(_GPU_SIDE if site.gpus else _CPU_SIDE, fits))
    return side, side


def _run(job: Job) -> tuple[list[str], list[Runs]]:
    """Measure; return the names of the workers' devices, and the runs of each way."""
    from dask_p2p.cli._tables import progress
    from dask_p2p.cluster import device_names
    from dask_p2p.indexed import count_wrong, indexed_array
    from dask_p2p.measure import p2p_transpose_in

    ours = {f"dask_p2p {mode}": p2p_transpose_in(mode) for mode in job.modes}
    rivals = rival_ways(job.site, _METHODS if job.rivals else ())
    kind = job.site.kind
    names: list[str] = []
    steps = (len(ours) + len(rivals)) * (job.repeats + 1)

    def started(client: Any) -> Callable[[], None]:
        names.extend(device_names(client, kind))
        return step

    with progress(steps, "transposing") as step:
        measured = measure_on(
            job.site,
            ours,
            rivals,
            lambda: indexed_array(job.shape, job.chunks, job.dtype, kind),
            job.axes,
            job.repeats,
            lambda y: int(count_wrong(y, job.shape, job.axes, kind, job.dtype).compute()),
            started,
            [name for name, mode in zip(ours, job.modes, strict=True) if mode == "sync"],
        )
    return names, measured


def _show(console: Console, job: Job, names: Sequence[str], measured: Sequence[Runs]) -> None:
    from dask_p2p.cli._tables import facts, ways_table

    console.print(facts(_facts(job, names)))
    console.print()
    console.print(ways_table(measured, job.size_bytes, job.repeats))
    if len(job.modes) > 1:
        sync, async_ = measured[:2]
        text = f"async is {sync.median_s / async_.median_s:.2f} times as fast as sync"
        if sync.busy_s and async_.busy_s:
            text += f", and {sync.busy_s / async_.busy_s:.2f} times without the time between tasks"
        console.print(text + " (medians).")


def _facts(job: Job, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the fields that the article's program prints before its result."""
    from dask.utils import format_bytes

    from dask_p2p.cli._tables import devices_text, shape_text, shapes_text
    from dask_p2p.cli.plan import readers, slab_plan

    made = slab_plan(job.shape, job.axes, job.site.workers)
    rest = job.shape[1:]
    tiles = [tile for part in readers(made) for tile in part.tiles.elements()]
    out_slabs = [*product(*made.dst_chunks)]
    array = f"{shape_text(job.shape)} {job.dtype}, {format_bytes(job.size_bytes)}"
    return [
        ("devices", devices_text(job.site, names)),
        ("array", array + f", axes {', '.join(map(str, job.axes))}"),
        *_kernel_facts(job, max(tiles, key=prod), out_slabs[0]),
        ("local input slab", shapes_text((rows, *rest) for rows in job.chunks[0])),
        ("local output slab", shapes_text(out_slabs)),
        ("tile", shapes_text(tiles)),
        ("mode", " and ".join(job.modes)),
        ("runs", f"{job.repeats} of each way after a first one"),
    ]


def _kernel_facts(
    job: Job, tile: tuple[int, ...], out_slab: tuple[int, ...]
) -> list[tuple[str, str]]:
    """Say how a tile is transposed: on a GPU the launch, on a processor the block for its cache."""
    from dask_p2p.cli._tables import shape_text
    from dask_p2p.kernels._launch import launch_geometry

    if job.site.gpus:
        launch = launch_geometry(tile, job.dtype.itemsize, job.axes)
        return [
            ("CUDA kernel", f"{launch.entry}, words of {launch.word_bytes} bytes"),
            ("CUDA tile", f"{shape_text(launch.tile)} words"),
            ("CUDA thread block", f"{shape_text(launch.threads)} threads"),
            ("grid", f"{launch.grid} thread blocks for the tile of one worker"),
        ]
    block = _cache_block(tile, out_slab, job.axes, job.dtype.itemsize)
    return [("cache block", "the whole tile" if block is None else f"{shape_text(block)} elements")]


def _cache_block(
    tile: tuple[int, ...], out_slab: tuple[int, ...], axes: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    """Return the block, in the result's order of axes, in which NumPy copies a packed tile."""
    from dask_p2p.kernels.numpy import SMALL_ITEMS, block_shape

    if prod(tile) < SMALL_ITEMS:
        return None
    src = [itemsize * prod(tile[axis + 1 :]) for axis in axes]
    dst = [itemsize * prod(out_slab[axis + 1 :]) for axis in range(len(out_slab))]
    return block_shape(tuple(tile[axis] for axis in axes), tuple(src), tuple(dst))


def _report(job: Job, names: Sequence[str], measured: Sequence[Runs]) -> dict[str, Any]:
    """Return all that was measured, and with what, for JSON."""
    import dask

    from dask_p2p.environment import environment

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "devices": list(names),
        "workers": job.site.workers,
        "kind": job.site.kind,
        "shape": list(job.shape),
        "dtype": job.dtype.str,
        "axes": list(job.axes),
        "size_bytes": job.size_bytes,
        "chunks": [list(sizes) for sizes in job.chunks],
        "mode": "both" if len(job.modes) > 1 else job.modes[0],
        "repeats": job.repeats,
        "p2p_config": dask.config.get("p2p"),
        "ways": [_way_report(runs, job.size_bytes) for runs in measured],
    }


def _way_report(runs: Runs, size_bytes: int) -> dict[str, Any]:
    from dask_p2p.measure import bandwidth_gbs

    if runs.failed:
        return {"name": runs.name, "failed": runs.failed}
    exchange = runs.exchanges[-1] if runs.exchanges else None
    found: dict[str, Any] = {
        "name": runs.name,
        "failed": None,
        "one_by_one": runs.one_by_one,
        "first_s": runs.first_s,
        "times_s": runs.times_s,
        "median_s": runs.median_s,
        "bandwidth_gbs": bandwidth_gbs(size_bytes, runs.median_s),
        "wrong_elements": runs.wrong,
    }
    if exchange is not None:
        found |= {
            "link_gbs": runs.link_gbs,
            "spans_s": [e.span_s for e in runs.exchanges],
            "busy_s": [e.busy_s for e in runs.exchanges],
            "tasks_s": [e.tasks_s for e in runs.exchanges],
            "moved_bytes": exchange.moved_bytes,
            "least_bytes": exchange.least_bytes,
            "pairs": [
                {"reader": reader, "holder": holder, "transport": transport, "bytes": nbytes}
                for (reader, holder, transport), nbytes in sorted(exchange.pairs.items())
            ],
        }
    return found


def _write(target: str, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, "utf-8")
