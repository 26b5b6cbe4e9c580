"""Arrays, ways to transpose them, rivals without Dask, and the report of all times."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from math import isqrt, prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask

from benchmarks.environment import environment
from benchmarks.measure import (
    EVEN,
    Case,
    Measured,
    Row,
    Way,
    compare,
    dask_rechunk,
    no_op,
    p2p_with,
)
from benchmarks.options import AnyClusterSpec, order_of_axes, start
from benchmarks.tables import OURS, progress
from dask_p2p.cli import check_fits, default_side
from dask_p2p.geometry import split_evenly
from dask_p2p.tools.cluster import device_names
from dask_p2p.types import DType

NO_OP = "one no-op layer"

_ROOT = Path(__file__).resolve().parents[1]  # of the checkout
# Staging by the way's name: none, less and more than the default of 384 MiB.
_STAGING = {
    "kernels read in place": "0 B",
    "96 MiB of staging": "96 MiB",
    "768 MiB of staging": "768 MiB",
}


class Report:
    """All measurements with one kind of cluster, also as JSON.

    Parameters
    ----------
    spec, repeats
        The cluster, and the number of runs after the first.
    commit
        Commit of the code; None: from git.
    target
        Path of the JSON file; None or "-" for no file.
    """

    def __init__(
        self,
        spec: AnyClusterSpec,
        repeats: int,
        commit: str | None = None,
        target: str | None = None,
    ) -> None:
        self.spec, self.repeats = spec, repeats
        self.devices: list[str] = []
        self.measured: Measured = {}
        self._target = target
        self._head = {"started": time.time(), **environment()}
        self._head |= {"kind": spec.kind, "workers": spec.workers, "repeats": repeats}
        self._head |= {"p2p_config": dask.config.get("p2p")}
        if commit is not None:
            self._head["commit"] = commit

    def measure(
        self,
        ways: Mapping[Case, Mapping[str, Way]],
        started: Callable[[Any], None],
        doing: str = "transposing",
        *,
        anew: bool = False,
    ) -> None:
        """Start the clusters of the ways, and measure on them; `measured` keeps all rows.

        Parameters
        ----------
        ways : mapping of Case to mapping of str to Way
        started : callable
            Called with the client of the first cluster, before anything is measured.
        doing : str, optional
            Text of the progress bar.
        anew : bool, optional
            See `compare`.
        """
        self.measured |= {case: [] for case in ways}
        protocols = [way.protocol for some in ways.values() for way in some.values()]
        steps = (self.repeats + 1) * len(protocols)
        with ExitStack() as bar:
            for protocol in dict.fromkeys(protocols):
                options = {} if protocol is None else {"protocol": protocol}
                with start(self.spec, **options) as client:
                    if not self.devices:
                        self.devices = device_names(client, self.spec.kind)
                        started(client)
                        step = bar.enter_context(progress(steps, doing))
                    for case, some in ways.items():
                        ways_of_protocol = {
                            n: way for n, way in some.items() if way.protocol == protocol
                        }
                        rows = compare(
                            client, ways_of_protocol, case, self.repeats, step, anew=anew
                        )
                        self.measured[case] += rows
                        self._save()

    def measure_first(
        self, ways: Mapping[Case, Mapping[str, Way]], started: Callable[[Any], None]
    ) -> None:
        """Measure the first run of each way on a cluster of its own; the ways take turns.

        The times of rows are from first runs, ``second_s`` is from the next runs.

        Parameters
        ----------
        ways, started
            See `measure`.
        """
        steps = self.repeats * sum(map(len, ways.values()))
        with ExitStack() as bar:
            for case, some in ways.items():
                rows: dict[str, Row] = {}
                for _ in range(self.repeats):
                    for name, way in some.items():
                        with start(self.spec) as client:
                            if not self.devices:
                                self.devices = device_names(client, self.spec.kind)
                                started(client)
                                step = bar.enter_context(progress(steps, "starting and measuring"))
                            (row,) = compare(client, {name: way}, case, 1, anew=True)
                        rows[name] = _with_first(rows.get(name), row)
                        step()
                self.measured[case] = list(rows.values())
                self._save()

    def _json(self) -> str:
        rows = [row for rows in self.measured.values() for row in rows]
        return json.dumps({**self._head, "devices": self.devices, "rows": rows}, indent=1) + "\n"

    def _save(self) -> None:
        """Write the file, if there is one; also in between, because measuring takes long."""
        if self._target not in (None, "-"):
            Path(self._target).write_text(self._json(), "utf-8")

    def finish(self) -> None:
        """Write the final file, or print it on standard output."""
        self._save()
        if self._target == "-":
            sys.stdout.write(self._json())


def _with_first(before: Row | None, row: Row) -> Row:
    """Return a row of first runs with one more run; its later times become ``second_s``."""
    if "failed" in row or (before is not None and "failed" in before):
        return row if before is None or "failed" in row else before
    first_s = row["first_s"]
    times_s = [*(before["times_s"] if before else ()), first_s]
    second_s = [*(before["second_s"] if before else ()), *row["times_s"]]
    median_s = median(times_s)
    bandwidth_gbs = 2 * row["matrix_bytes"] / median_s / 1e9
    times = {"times_s": times_s, "second_s": second_s, "first_s": times_s[0]}
    return {**row, **times, "median_s": median_s, "bandwidth_gbs": bandwidth_gbs}


def rows_of(matrix_bytes: int, itemsize: int) -> int:
    """Return the rows of a square matrix of about this size, a multiple of 1024 if large.

    >>> rows_of(2**36, 4), rows_of(2**36, 2)
    (131072, 185344)
    """
    rows = max(1, isqrt(matrix_bytes // itemsize))
    return rows - rows % 1024 if rows > 1024 else rows


def slabs(
    spec: AnyClusterSpec, shape: tuple[int, ...], dtype: DType, axes: tuple[int, ...], hint: str
) -> Case:
    """Return an array in one slab a worker, after a check that it fits into free memory."""
    check_fits(spec, shape, dtype, axes, hint)
    if spec.gpus and (dtype.char in "gG" or not dtype.isnative):
        raise click.BadParameter(f"CuPy has no dtype {dtype}", param_hint="--dtype")
    whole_axes = ((length,) for length in shape[1:])
    return Case(shape, (split_evenly(shape[0], spec.workers), *whole_axes), axes, dtype, spec.kind)


def even_cases(
    spec: AnyClusterSpec,
    shapes: Sequence[tuple[int, ...]],
    all_bytes: Sequence[int],
    dtypes: Sequence[Any],
    axes: tuple[int, ...] | None,
) -> list[Case]:
    """Return the requested arrays, smallest first, or a square matrix that fits."""
    cases: list[Case] = []
    for dtype in dict.fromkeys(dtypes):
        sides = [rows_of(size_bytes, dtype.itemsize) for size_bytes in all_bytes]
        requested_shapes = {*shapes, *((side, side) for side in sides)}
        side = default_side(spec, dtype.itemsize)
        cases += (
            slabs(spec, shape, dtype, order_of_axes(axes, shape), "--shape")
            for shape in sorted(requested_shapes, key=prod) or [(side, side)]
        )
    return cases


def hard_cases(spec: AnyClusterSpec, even: Case) -> list[Case]:
    """Return arrays of the same size that could be slower per byte than an even matrix."""
    elements, workers = prod(even.shape), spec.workers
    size = isqrt(elements)
    side = max(1, round(elements ** (1 / 3)))
    side -= side % 64 if side > 64 else 0
    box = slabs(spec, (side, side, elements // side**2), even.dtype, (2, 1, 0), "--cases")
    matrix = slabs(spec, (size, size), even.dtype, (1, 0), "--cases")
    if size < 8 * workers:
        raise click.BadParameter(
            f"{size} rows are too few for several and uneven blocks on {workers} workers; give "
            f"at least {8 * workers}",
            param_hint="--cases",
        )
    blocks = (split_evenly(size, 4 * workers), (size,))
    uneven = (split_unevenly(size, workers), (size,))
    return [
        replace(matrix, name="4 blocks a worker", chunks=blocks),
        replace(matrix, name="uneven blocks", chunks=uneven),
        replace(box, name="box, axes 2, 1, 0"),
        replace(box, name="box, axes 1, 0, 2", axes=(1, 0, 2)),
    ]


def split_unevenly(length: int, parts: int) -> tuple[int, ...]:
    """Split a length into parts that are alternately a quarter longer and shorter.

    The difference is odd, so that no boundary falls on a boundary of a kernel's tiles.

    >>> split_unevenly(4096, 4)
    (1281, 767, 1281, 767)
    """
    sizes = list(split_evenly(length, parts))
    for first in range(0, parts - 1, 2):
        shift = sizes[first + 1] // 4 | 1
        sizes[first] += shift
        sizes[first + 1] -= shift
    return tuple(sizes)


def ways_on(
    spec: AnyClusterSpec,
    rivals: bool = False,
    variants: bool = False,
) -> dict[str, Way]:
    """Return ways by name: this package, the no-op layer, other options, Dask's own ways."""
    ways = {
        OURS: Way(p2p_with({}), required=True),
        NO_OP: Way(no_op, required=True, checked=False),
    }
    if variants:
        fallback_protocol = "ucx" if spec.gpus else "comm"
        ways[f"{OURS}, {fallback_protocol}"] = Way(
            p2p_with({"p2p.transports.order": [fallback_protocol]})
        )
        for name, size in _STAGING.items() if spec.gpus else ():
            ways[f"{OURS}, {name}"] = Way(p2p_with({"p2p.transports.ipc.staging-bytes": size}))
    if rivals:
        # On GPUs Dask's own way is fastest over UCX. Its p2p rechunk fails: it cannot move CuPy
        # blocks through host memory.
        over_ucx = spec.gpus and spec.scheduler is None and find_spec("distributed_ucxx")
        for method in ("tasks",) if spec.gpus else ("tasks", "p2p"):
            protocol = "ucx" if over_ucx else None
            ways[f"dask {method}"] = Way(dask_rechunk(method), apart=True, protocol=protocol)
    return ways


def add_rivals(
    spec: AnyClusterSpec, measured: Measured, repeats: int, timeout_s: int
) -> str | None:
    """Measure the rivals on square matrices; return the reason for omitted arrays."""
    if spec.scheduler is not None:
        return "Rivals without Dask are omitted: they run only for clusters that are started here."
    even = [case for case in measured if case.name == EVEN]
    squares = [case for case in even if case.axes == (1, 0) and len({*case.shape}) == 1]
    for dtype in dict.fromkeys(case.dtype for case in squares):
        cases = {case.shape[0]: case for case in squares if case.dtype == dtype}
        for row in _without_dask(spec, str(dtype), cases, repeats, timeout_s):
            case = cases[row["size"]]
            measured[case].append({**row, "case": EVEN, "shape": [*case.shape], "axes": [1, 0]})
    return None if squares == even else "Rivals without Dask transpose square matrices only."


def _without_dask(
    spec: AnyClusterSpec, dtype: str, sizes: Iterable[int], repeats: int, timeout_s: int
) -> list[Row]:
    """Run the rivals in processes of their own; a failure becomes a row."""
    command = [sys.executable, "-m", "benchmarks.rivals", "--gpus", str(spec.workers)]
    command += ["--dtype", dtype, "--repeats", str(repeats), "--timeout", str(timeout_s)]
    command += [] if spec.gpus else ["--cpu", "--only", "mpi4py_fft"]
    command += [word for size in sizes for word in ("--size", str(size))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        process = subprocess.run(
            [*command, "--json", str(path)], cwd=_ROOT, stdout=subprocess.DEVNULL, check=False
        )
        if path.exists():
            return list(json.loads(path.read_text("utf-8")))
    reason = f"python -m benchmarks.rivals ended with {process.returncode}"
    return [{"way": "rivals", "size": size, "dtype": dtype, "failed": reason} for size in sizes]
