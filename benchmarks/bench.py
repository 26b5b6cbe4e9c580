"""``python -m benchmarks``: measured and checked transposes, compared with other ways.

The output follows the program in chapter 4 of *CUDA Fortran for Scientists and Engineers* (Ruetsch
and Fatica): devices, sizes, tiles, and the bandwidth of a checked result. Transfers are as in its
asynchronous mode: staged, and overlapped with each other and with kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from dask.utils import parse_bytes

from benchmarks.measure import Case, Measured, Way
from benchmarks.options import (
    DTYPE,
    SHAPE,
    axes_option,
    choose_cluster,
    commit_option,
    json_option,
    reader,
)
from benchmarks.report import Report, add_rivals, even_cases, hard_cases, ways_on
from benchmarks.tables import (
    array_text,
    devices_text,
    output,
    report_correctness,
    shapes_text,
    show_ways,
    summary,
)
from dask_p2p.cli import COUNT, cpu_option, one_line_errors, scheduler_option, workers_option
from dask_p2p.geometry import box_shape
from dask_p2p.plans import block_plans, redistribution, slab_chunks

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["bench"]


@click.command(context_settings={"show_default": True})
@click.option(
    "--shape",
    "shapes",
    type=SHAPE,
    multiple=True,
    metavar="AxB[xC...]",
    help="Shape of the array; repeatable.  [default: 6000x6000, on GPUs 32768x32768, or less to "
    "fit]",
)
@click.option(
    "--size",
    "sizes",
    type=COUNT,
    multiple=True,
    metavar="N",
    help="Rows and columns of a square matrix, instead of its shape; repeatable.",
)
@click.option(
    "--bytes",
    "all_bytes",
    type=reader(parse_bytes, "a size such as 500MB or 2GiB", lambda size: size > 0),
    multiple=True,
    metavar="BYTES",
    help="Size of a square matrix, such as 64GiB, instead of its shape; repeatable.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=DTYPE,
    multiple=True,
    default=["float32"],
    metavar="NAME",
    help="Dtype of the array; repeatable.",
)
@axes_option
@scheduler_option
@workers_option
@cpu_option
@click.option("--repeats", type=COUNT, default=5, help="Timed runs of each way after the first.")
@click.option(
    "--rivals/--no-rivals",
    default=False,
    help="Measure Dask's own ways too, and the installed programs without Dask.",
)
@click.option(
    "--rival-timeout", "timeout_s", type=COUNT, default=120, help="Limit of each rival, seconds."
)
@click.option(
    "--cases", "with_cases", is_flag=True, help="Add several and uneven blocks, and boxes."
)
@click.option("--variants", is_flag=True, help="Add this package with other options.")
@commit_option
@json_option
def bench(
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    all_bytes: Sequence[int],
    dtypes: Sequence[Any],
    axes: tuple[int, ...] | None,
    scheduler: str | None,
    workers: int | None,
    cpu: bool,
    repeats: int,
    rivals: bool,
    timeout_s: int,
    with_cases: bool,
    variants: bool,
    commit: str | None,
    target: str | None,
) -> None:
    """Measure transposes of arrays that lie in slabs on the workers, and check them."""
    console = output(to_stderr=target == "-")
    with one_line_errors():
        spec = choose_cluster(workers, cpu, scheduler)
        shapes = [*shapes, *((size, size) for size in sizes)]
        even = even_cases(spec, shapes, all_bytes, dtypes, axes)
        extra = {case: hard_cases(spec, case) if with_cases else [] for case in even}
        ways = ways_on(spec, rivals, variants)
        required = {name: way for name, way in ways.items() if way.required}
        required_ways: dict[Case, Mapping[str, Way]] = {}
        for case in even:
            required_ways |= {case: ways, **dict.fromkeys(extra[case], required)}
        report = Report(spec, repeats, commit, target)
        report.measure(required_ways, partial(_show_head, console, report))
        if rivals and (note := add_rivals(spec, report.measured, repeats, timeout_s)):
            console.print(note)
        compare_with_even(report.measured, extra)
        _show(console, report.measured)
        report.finish()
        report_correctness(console, report.measured)


def _show_head(console: Console, report: Report, _: Any) -> None:
    """Print what will be measured on which devices."""
    if report.spec.note:
        console.print(report.spec.note)
    head = [("devices", devices_text(report.spec, report.devices))]
    console.print(summary([*head, ("runs", f"{report.repeats} of each way after a first one")]))


def compare_with_even(measured: Measured, extra: Mapping[Case, Sequence[Case]]) -> None:
    """Add the time per byte of each other array relative to the array in even slabs."""
    for one, hard_cases_of in extra.items():
        even_of = {row["way"]: row for row in measured[one] if "span_s" in row}
        for row in (row for case in hard_cases_of for row in measured[case]):
            if "span_s" in row and (even := even_of.get(row["way"])):
                bytes_ratio = even["matrix_bytes"] / row["matrix_bytes"]
                row["median_to_even"] = row["median_s"] / even["median_s"] * bytes_ratio
                # The span over all tasks: a worker may have several.
                row["span_to_even"] = median(row["span_s"]) / median(even["span_s"]) * bytes_ratio


def _show(console: Console, measured: Measured) -> None:
    for case, rows in measured.items():
        title = None
        if len(measured) == 1:
            console.print(summary(summary_rows(case)))
        else:
            title = f"{array_text(case.shape, case.dtype)}, {case.name}"
        show_ways(console, rows, title)


def summary_rows(case: Case) -> list[tuple[str, str]]:
    """Return the fields that the article's program prints before its result."""
    plan = redistribution(case.chunks, case.axes, slab_chunks(case.chunks, case.axes))
    tiles = (box_shape(piece.src) for _, block in block_plans(plan) for piece in block.pieces)
    axes = ", ".join(map(str, case.axes))
    return [
        ("array", f"{array_text(case.shape, case.dtype)}, axes {axes}"),
        ("local input slab", shapes_text(product(*case.chunks))),
        ("local output slab", shapes_text(product(*plan.chunks))),
        ("tile", shapes_text(tiles)),
    ]
