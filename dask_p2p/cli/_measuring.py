"""What `bench` and `demo` measure: arrays, ways to transpose them, and programs without Dask."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._options import ClusterSpec, check_fits, start
from dask_p2p.layout import split_evenly
from dask_p2p.types import DType

if TYPE_CHECKING:
    from dask_p2p.measure import Case, Row, Way

    #: What was measured of each array.
    Measured = dict[Case, list[Row]]

OURS = "dask_p2p"
OURS_SYNC = "dask_p2p, sync"
NO_OP = "one no-op layer"
#: Of `benchmarks/rivals`: nothing that transposes on these links can be quicker.
LIMIT = "copy engines (limit)"

_ROOT = Path(__file__).resolve().parents[2]  # of a checkout; `benchmarks` is not installed
_CPU_SIDE, _GPU_SIDE = 6000, 32768  # of the default matrix
_MEMORY_SHARE = 8  # which takes at most this part of the free memory
# By the way's name: none, less than the 384 MiB that are usual, and more.
_STAGING = {
    "kernels read in place": "0 B",
    "96 MiB of staging": "96 MiB",
    "768 MiB of staging": "768 MiB",
}


def _target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Find out before the measuring, not after, that a file cannot be written."""
    if value not in (None, "-") and not Path(value).absolute().parent.is_dir():
        raise click.BadParameter(f"{value!r}: the folder does not exist", ctx, param)
    return value


#: Of programs that measure, and of what they write.
commit_option = click.option(
    "--commit", help="Of the code, where git cannot be asked.", metavar="HASH"
)
json_option = click.option(
    "--json",
    "target",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    callback=_target,
    metavar="FILE",
    help="Write all that was measured to this file; - is standard output, with nothing else on it.",
)


class Report:
    """All that was measured, for JSON.

    Parameters
    ----------
    spec, repeats, commit
        What it was measured on, how often, and the commit, if it was given.
    measured
        Rows by case. They are added while the report is there.
    target
        Path of the file; None or "-" for no file.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        repeats: int,
        commit: str | None,
        measured: Measured,
        target: str | None,
    ) -> None:
        import dask

        from dask_p2p.environment import environment

        self.spec, self.repeats = spec, repeats
        self.devices: list[str] = []
        self._measured, self._target = measured, target
        self._head = {"started": time.time(), **environment()}
        self._head |= {"kind": spec.kind, "workers": spec.workers, "repeats": repeats}
        self._head |= {"p2p_config": dask.config.get("p2p")}
        if commit is not None:
            self._head["commit"] = commit

    def json(self) -> str:
        """Return the report as it is now."""
        rows = [row for rows in self._measured.values() for row in rows]
        return json.dumps({**self._head, "devices": self.devices, "rows": rows}, indent=1) + "\n"

    def save(self) -> None:
        """Write the file, if one is wanted: in between too, since measuring takes long."""
        if self._target not in (None, "-"):
            Path(self._target).write_text(self.json(), "utf-8")

    def finish(self) -> None:
        """Write the file for the last time, or all of it to standard output."""
        self.save()
        if self._target == "-":
            sys.stdout.write(self.json())


def default_side(spec: ClusterSpec, itemsize: int) -> int:
    """Rows of the default matrix: fewer if memory is scarce."""
    fits = isqrt(spec.memory_bytes // _MEMORY_SHARE // itemsize)
    return max(spec.workers, min(_GPU_SIDE if spec.gpus else _CPU_SIDE, fits))


def rows_of(matrix_bytes: int, itemsize: int) -> int:
    """Return the rows of a square matrix of about so many bytes, a multiple of 1024 if large.

    >>> rows_of(2**36, 4), rows_of(2**36, 2)
    (131072, 185344)
    """
    rows = max(1, isqrt(matrix_bytes // itemsize))
    return rows - rows % 1024 if rows > 1024 else rows


def slabs(
    spec: ClusterSpec, shape: tuple[int, ...], dtype: DType, axes: tuple[int, ...], hint: str
) -> Case:
    """Return an array in one slab a worker, if it fits into the memory that is free."""
    from dask_p2p.measure import Case

    check_fits(spec, shape, dtype, axes, hint)
    rest = ((length,) for length in shape[1:])
    return Case(shape, (split_evenly(shape[0], spec.workers), *rest), axes, dtype, spec.kind)


def hard_cases(spec: ClusterSpec, even: Case) -> list[Case]:
    """Return arrays of as many bytes that could be slower by the byte than an even matrix."""
    elements, workers = prod(even.shape), spec.workers
    size = isqrt(elements)
    side = max(1, round(elements ** (1 / 3)))
    side -= side % 64 if side > 64 else 0
    box = slabs(spec, (side, side, elements // side**2), even.dtype, (2, 1, 0), "--cases")
    matrix = slabs(spec, (size, size), even.dtype, (1, 0), "--cases")
    if size < 8 * workers:
        raise click.BadParameter(
            f"{size} rows cannot be cut into several and uneven blocks for {workers} workers; ask "
            f"for at least {8 * workers}",
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
    """Split a length into parts that are in turn a quarter longer and shorter than even ones.

    By an odd number, so that no boundary falls on one of a kernel's tiles.

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
    spec: ClusterSpec,
    modes: Sequence[str] = ("async",),
    rivals: bool = False,
    variants: bool = False,
) -> dict[str, Way]:
    """Return ways to transpose by name: ours, Dask's floor, ours with other options, Dask's own."""
    from dask_p2p.measure import Way, dask_rechunk, no_op, p2p_with

    ways = {
        OURS if mode == "async" else OURS_SYNC: Way(
            p2p_with({"p2p.mode": mode}), required=True, one_by_one=mode == "sync"
        )
        for mode in modes
    }
    ways[NO_OP] = Way(no_op, required=True, checked=False)
    other = "ucx" if spec.gpus else "comm"
    if variants:
        ways[f"{OURS}, {other}"] = Way(p2p_with({"p2p.transports.order": [other]}))
    if variants and spec.gpus:
        for name, size in _STAGING.items():
            ways[f"{OURS}, {name}"] = Way(p2p_with({"p2p.transports.ipc.staging-bytes": size}))
    if variants and spec.scheduler is None:
        for name in (OURS, NO_OP):
            if name in ways:
                way = replace(ways[name], required=False, low_latency=True)
                ways[f"{name}, low latency"] = way
    # On GPUs Dask's own way is quickest over UCX, and its p2p rechunk fails: it cannot put CuPy
    # blocks through host memory.
    over_ucx = spec.gpus and spec.scheduler is None and find_spec("distributed_ucxx") is not None
    for method in ("tasks",) if spec.gpus else ("tasks", "p2p"):
        if rivals:
            protocol = "ucx" if over_ucx else None
            ways[f"dask {method}"] = Way(dask_rechunk(method), apart=True, protocol=protocol)
    return ways


def measure_on(
    spec: ClusterSpec,
    ways: Mapping[str, Way],
    measured: Measured,
    repeats: int,
    started: Callable[[Any], None],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Start what clusters the ways need, and measure on them.

    Parameters
    ----------
    spec : ClusterSpec
    ways : mapping of str to Way
    measured : dict of Case to list of dict
        Gets the rows. Cases of other names than the usual are measured with required ways only.
    repeats : int
    started : callable
        Called with the client of the first cluster, before anything is measured.
    keep : callable, optional
        Called after each case: what comes next may end in an error.
    """
    from dask_p2p.cli._tables import progress
    from dask_p2p.measure import EVEN, compare

    plans: dict[tuple[str | None, bool], list[tuple[Case, dict[str, Way]]]] = {}
    for place in dict.fromkeys((way.protocol, way.low_latency) for way in ways.values()):
        on_this = {n: way for n, way in ways.items() if (way.protocol, way.low_latency) == place}
        few = {name: way for name, way in on_this.items() if way.required}
        plans[place] = [(case, on_this if case.name == EVEN else few) for case in measured]
    steps = (repeats + 1) * sum(
        len(cluster_ways) for plan in plans.values() for _, cluster_ways in plan
    )
    step = None
    with ExitStack() as bar:
        for place, plan in plans.items():
            with _cluster(spec, *place) as client:
                if step is None:
                    started(client)
                    step = bar.enter_context(progress(steps, "transposing"))
                for case, cluster_ways in plan:
                    measured[case] += compare(client, cluster_ways, case, repeats, step)
                    keep()


@contextmanager
def _cluster(spec: ClusterSpec, protocol: str | None, low_latency: bool) -> Iterator[Any]:
    import dask

    changes = {"p2p.low-latency": True} if low_latency else {}
    options = {} if protocol is None else {"protocol": protocol}
    with dask.config.set(changes), start(spec, **options) as client:
        yield client


def add_rivals(spec: ClusterSpec, measured: Measured, repeats: int, timeout_s: int) -> str | None:
    """Measure square matrices without Dask, too; say what is left out, and why."""
    from dask_p2p.measure import EVEN

    if spec.scheduler is not None:
        return "What needs no Dask is left out: it is for clusters that are started here."
    if not (_ROOT / "benchmarks" / "rivals").is_dir():
        return (
            "What needs no Dask is left out: it is in the folder benchmarks of the source, and "
            "this is an installed package. Dask's own ways are measured."
        )
    even = [case for case in measured if case.name == EVEN]
    squares = [case for case in even if case.axes == (1, 0) and len({*case.shape}) == 1]
    for dtype in dict.fromkeys(case.dtype for case in squares):
        cases = {case.shape[0]: case for case in squares if case.dtype == dtype}
        for row in _without_dask(spec, str(dtype), cases, repeats, timeout_s):
            case = cases[row["size"]]
            measured[case].append({**row, "case": EVEN, "shape": [*case.shape], "axes": [1, 0]})
    return None if squares == even else "What needs no Dask transposes square matrices only."


def _without_dask(
    spec: ClusterSpec, dtype: str, sizes: Iterable[int], repeats: int, timeout_s: int
) -> list[Row]:
    """Run what needs no Dask in processes of their own; a failure is a row."""
    command = [sys.executable, "-m", "benchmarks.rivals", "--gpus", str(spec.workers)]
    command += ["--dtype", dtype, "--repeats", str(repeats), "--timeout", str(timeout_s)]
    command += [] if spec.gpus else ["--cpu", "--only", "mpi4py_fft"]
    command += [word for size in sizes for word in ("--size", str(size))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        done = subprocess.run(
            [*command, "--json", str(path)], cwd=_ROOT, stdout=subprocess.DEVNULL, check=False
        )
        if path.exists():
            return list(json.loads(path.read_text("utf-8")))
    reason = f"python -m benchmarks.rivals ended with {done.returncode}"
    return [{"way": "rivals", "size": size, "dtype": dtype, "failed": reason} for size in sizes]
