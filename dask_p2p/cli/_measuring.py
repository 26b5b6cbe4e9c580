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

from dask_p2p.cli._options import Site, check_fits, start
from dask_p2p.layout import split_evenly

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
        raise click.BadParameter(f"{value!r}: there is no such folder", ctx, param)
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


def new_report(site: Site, repeats: int, commit: str | None) -> dict[str, Any]:
    """Return with what is measured, for JSON."""
    import dask

    from dask_p2p.environment import environment

    report = {"started": time.time(), **environment(), "kind": site.kind, "workers": site.workers}
    report |= {"repeats": repeats, "p2p_config": dask.config.get("p2p")}
    return report if commit is None else {**report, "commit": commit}


def write_report(
    report: dict[str, Any], measured: Measured, target: str | None, *, at_end: bool = False
) -> None:
    """Write what was measured so far to a file, as JSON; to standard output only at the end."""
    report["rows"] = [row for rows in measured.values() for row in rows]
    text = json.dumps(report, indent=1) + "\n"
    if target == "-" and at_end:
        sys.stdout.write(text)
    elif target not in (None, "-"):
        Path(target).write_text(text, "utf-8")


def default_side(site: Site, itemsize: int) -> int:
    """Rows of the default matrix: fewer if memory is scarce."""
    fits = isqrt(site.memory_bytes // _MEMORY_SHARE // itemsize)
    return max(site.workers, min(_GPU_SIDE if site.gpus else _CPU_SIDE, fits))


def rows_of(matrix_bytes: int, itemsize: int) -> int:
    """Return the rows of a square matrix of about so many bytes, a multiple of 1024 if large.

    >>> rows_of(2**36, 4), rows_of(2**36, 2)
    (131072, 185344)
    """
    rows = max(1, isqrt(matrix_bytes // itemsize))
    return rows - rows % 1024 if rows > 1024 else rows


def slabs(site: Site, shape: tuple[int, ...], dtype: Any, axes: tuple[int, ...], hint: str) -> Case:
    """Return an array in one slab a worker, if it fits into the memory that is free."""
    from dask_p2p.measure import Case

    check_fits(site, shape, dtype, axes, hint)
    rest = ((length,) for length in shape[1:])
    return Case(shape, (split_evenly(shape[0], site.workers), *rest), axes, dtype, site.kind)


def cliffs(site: Site, even: Case) -> list[Case]:
    """Return arrays of as many bytes that could be slower by the byte than an even matrix."""
    elements, workers = prod(even.shape), site.workers
    size = isqrt(elements)
    side = max(1, round(elements ** (1 / 3)))
    side -= side % 64 if side > 64 else 0
    box = slabs(site, (side, side, elements // side**2), even.dtype, (2, 1, 0), "--cases")
    matrix = slabs(site, (size, size), even.dtype, (1, 0), "--cases")
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
    site: Site, modes: Sequence[str] = ("async",), rivals: bool = False, variants: bool = False
) -> dict[str, Way]:
    """Return ways to transpose by name: ours, Dask's floor, ours with other options, Dask's own."""
    from dask_p2p.measure import Way, dask_rechunk, no_op, p2p_with

    made = {
        OURS if mode == "async" else OURS_SYNC: Way(
            p2p_with({"p2p.mode": mode}), required=True, one_by_one=mode == "sync"
        )
        for mode in modes
    }
    made[NO_OP] = Way(no_op, required=True, checked=False)
    other = "ucx" if site.gpus else "comm"
    if variants:
        made[f"{OURS}, {other}"] = Way(p2p_with({"p2p.transports.order": [other]}))
    if variants and site.gpus:
        for name, size in _STAGING.items():
            made[f"{OURS}, {name}"] = Way(p2p_with({"p2p.transports.ipc.staging-bytes": size}))
    if variants and site.scheduler is None:
        for name in (OURS, NO_OP):
            if name in made:
                way = replace(made[name], required=False, low_latency=True)
                made[f"{name}, low latency"] = way
    # On GPUs Dask's own way is quickest over UCX, and its p2p rechunk fails: it cannot put CuPy
    # blocks through host memory.
    over_ucx = site.gpus and site.scheduler is None and find_spec("distributed_ucxx") is not None
    for method in ("tasks",) if site.gpus else ("tasks", "p2p"):
        if rivals:
            protocol = "ucx" if over_ucx else None
            made[f"dask {method}"] = Way(dask_rechunk(method), apart=True, protocol=protocol)
    return made


def measure_on(
    site: Site,
    ways: Mapping[str, Way],
    measured: Measured,
    repeats: int,
    started: Callable[[Any], None],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Start what clusters the ways need, and measure on them.

    Parameters
    ----------
    site : Site
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
        here = {n: way for n, way in ways.items() if (way.protocol, way.low_latency) == place}
        few = {name: way for name, way in here.items() if way.required}
        plans[place] = [(case, here if case.name == EVEN else few) for case in measured]
    steps = (repeats + 1) * sum(len(chosen) for plan in plans.values() for _, chosen in plan)
    step = None
    with ExitStack() as bar:
        for place, plan in plans.items():
            with _cluster(site, *place) as client:
                if step is None:
                    started(client)
                    step = bar.enter_context(progress(steps, "transposing"))
                for case, chosen in plan:
                    measured[case] += compare(client, chosen, case, repeats, step)
                    keep()


@contextmanager
def _cluster(site: Site, protocol: str | None, low_latency: bool) -> Iterator[Any]:
    import dask

    changes = {"p2p.low-latency": True} if low_latency else {}
    options = {} if protocol is None else {"protocol": protocol}
    with dask.config.set(changes), start(site, **options) as client:
        yield client


def add_rivals(site: Site, measured: Measured, repeats: int, timeout_s: int) -> str | None:
    """Measure square matrices without Dask, too; say what is left out, and why."""
    from dask_p2p.measure import EVEN

    if site.scheduler is not None:
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
        for row in _without_dask(site, str(dtype), cases, repeats, timeout_s):
            case = cases[row["size"]]
            measured[case].append({**row, "case": EVEN, "shape": [*case.shape], "axes": [1, 0]})
    return None if squares == even else "What needs no Dask transposes square matrices only."


def _without_dask(
    site: Site, dtype: str, sizes: Iterable[int], repeats: int, timeout_s: int
) -> list[Row]:
    """Run what needs no Dask in processes of their own; a failure is a row."""
    command = [sys.executable, "-m", "benchmarks.rivals", "--gpus", str(site.workers)]
    command += ["--dtype", dtype, "--repeats", str(repeats), "--timeout", str(timeout_s)]
    command += [] if site.gpus else ["--cpu", "--only", "mpi4py_fft"]
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
