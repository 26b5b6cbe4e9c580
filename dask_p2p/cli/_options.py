"""Options that several commands share, and the cluster that ``--workers`` and ``--cpu`` ask for."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from dask.utils import format_bytes, parse_bytes

from dask_p2p.errors import P2PError
from dask_p2p.layout import normal_axes
from dask_p2p.types import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

logger = logging.getLogger(__name__)

_CPU_WORKERS = 4
_CONNECT_S = 10
# The array, its transpose and what is on its way between them.
_MEMORY_FACTOR = 2.5


def reader(
    read: Callable[[str], Any], what: str, right: Callable[[Any], bool] = lambda value: True
) -> Any:
    """Return what click takes as the type of an option: it reads a value, or says what to give."""

    def convert(value: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            result = read(value)
            if right(result):
                return result
        raise click.BadParameter(f"{value!r}: give {what}")

    return convert


def numbers(value: str, between: str = ",", words: Sequence[str] = ()) -> tuple[int | str, ...]:
    """Read whole numbers, and certain words, with commas between."""
    parts = [part.strip() for part in value.split(between)] if value.strip() else []
    return tuple(part if part in words else int(part) for part in parts)


def _dtype(value: str) -> Any:
    import numpy as np

    try:
        return np.dtype(value)
    except (TypeError, ValueError, SyntaxError) as exc:
        raise click.BadParameter(f"{value!r}: NumPy has no dtype of this name") from exc


SHAPE = reader(
    lambda value: numbers(value.lower(), "x"),
    "lengths of at least 1 with an x between",
    lambda shape: min(shape) > 0,
)
AXES = reader(numbers, "whole numbers with commas between", bool)
DTYPE = reader(
    _dtype,
    "a boolean, integer, float or complex dtype",
    lambda dtype: dtype.kind in "biufc",  # those whose values can be checked
)
SIZE_BYTES = reader(parse_bytes, "a size such as 500MB or 2GiB", lambda size: size > 0)
COUNT = click.IntRange(min=1)

axes_option = click.option(
    "--axes",
    type=AXES,
    metavar="1,0",
    help="Input axis that each output axis comes from.  [default: reversed]",
)
workers_option = click.option(
    "--workers",
    type=COUNT,
    metavar="N",
    help="Workers, one a GPU or of one thread.  [default: one for each GPU, else 4]",
)
scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Cluster to use.  [default: one that is started here, as dask p2p demo does]",
)
running_option = click.option(
    "--scheduler", metavar="ADDRESS", required=True, help="Of the cluster to look at."
)
runs_option = click.option(
    "--runs", type=COUNT, metavar="N", default=10, show_default=True, help="How many, at most."
)
cpu_option = click.option("--cpu", is_flag=True, help="CPU workers, even if there are GPUs.")


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


def order_of_axes(axes: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that ``--axes`` asks for, without negative numbers."""
    ndim = len(shape)
    order = normal_axes(axes, ndim)
    if order is None:
        raise click.BadParameter(
            f"give the {ndim} axes of the shape, {','.join(map(str, range(ndim)))}, in any order",
            param_hint="--axes",
        )
    return order


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where a command is to run."""

    workers: int
    gpus: tuple[str, ...]  # one for each worker; none for CPU workers
    note: str | None  # what a user should know of the choice
    memory_bytes: int  # that is free, all workers together
    scheduler: str | None = None  # address of a cluster that is already there

    @property
    def kind(self) -> str:
        """Of the arrays' blocks."""
        return "cupy" if self.gpus else "numpy"


def choose_cluster(workers: int | None, cpu: bool, scheduler: str | None = None) -> ClusterSpec:
    """Choose the cluster that is there, or GPUs where there is more than one, or CPU workers."""
    if scheduler is not None:
        if workers or cpu:
            raise click.UsageError("--workers and --cpu are for a cluster that is started here")
        return _running_cluster(scheduler)
    import psutil

    from dask_p2p.cluster import free_gpu_bytes, usable_gpus

    usable = [] if cpu else usable_gpus()
    if len(usable) > 1:
        gpus = tuple(usable[: workers or len(usable)])
        if workers is not None and workers > len(usable):
            raise click.BadParameter(
                f"there are {len(usable)} usable GPUs for {workers} workers; ask for fewer, or "
                "give --cpu",
                param_hint="--workers",
            )
        return ClusterSpec(len(gpus), gpus, None, len(gpus) * min(free_gpu_bytes(gpus)))
    note = None
    if usable:
        note = (
            "There is one usable GPU only, and nothing to move between GPUs: these are CPU workers."
        )
    free_bytes = int(psutil.virtual_memory().available)
    return ClusterSpec(workers or _CPU_WORKERS, (), note, free_bytes)


def _running_cluster(scheduler: str) -> ClusterSpec:
    """Find out what a cluster has. Its arrays are on GPUs if all of its workers are."""
    from dask_p2p.environment import on_gpu
    from dask_p2p.files.execute import usable_memory_bytes, worker_count

    with connect(scheduler) as client:
        workers = worker_count(client)
        on_gpus = client.run(on_gpu)
        if not all(on_gpus.values()):
            return ClusterSpec(workers, (), None, usable_memory_bytes(client), scheduler)
        free_bytes = client.run(_free_device_bytes)
        return ClusterSpec(
            workers, (*on_gpus,), None, workers * min(free_bytes.values()), scheduler
        )


def _free_device_bytes() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


def check_fits(
    spec: ClusterSpec, shape: tuple[int, ...], dtype: DType, axes: tuple[int, ...], hint: str
) -> None:
    """Refuse arrays that this place cannot hold, or cannot cut into a slab for each worker."""
    needed_bytes = int(_MEMORY_FACTOR * prod(shape) * dtype.itemsize)
    if needed_bytes > spec.memory_bytes:
        raise click.BadParameter(
            f"the array and its transpose need {format_bytes(needed_bytes)} with what is on its "
            f"way, and {format_bytes(spec.memory_bytes)} are free",
            param_hint=hint,
        )
    if axes and min(shape[0], shape[axes[0]]) < spec.workers:
        raise click.BadParameter(
            f"{' x '.join(map(str, shape))} cannot be cut into {spec.workers} slabs, before and "
            "after, of at least one row",
            param_hint=hint,
        )
    if spec.gpus and (dtype.char in "gG" or not dtype.isnative):
        raise click.BadParameter(f"CuPy has no dtype {dtype}", param_hint="--dtype")


@contextlib.contextmanager
def start(spec: ClusterSpec, **options: Any) -> Iterator[Any]:
    """Start the cluster, with options of `local_cluster`, or connect to the one that is there.

    Gives a client of it. What was started ends with the block.
    """
    if spec.scheduler is not None:
        cluster = connect(spec.scheduler)
    else:
        cluster = own_cluster(spec.workers, gpus=bool(spec.gpus), **options)
    with cluster as client, client.as_current():
        yield client


@contextlib.contextmanager
def own_cluster(workers: int, **options: Any) -> Iterator[Any]:
    """Start a cluster that ends with the command, and whose processes log nothing.

    What a task meets comes back as the command's own error, in one line. What would be logged
    besides are heartbeats that the cluster's end cuts off, and each of Dask's own P2P runs.
    Gives a client, which is not the default one.
    """
    from distributed import Client

    from dask_p2p.cluster import local_cluster

    with (
        local_cluster(workers, silence_logs=logging.CRITICAL, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.run(_log_no_callbacks)  # Dask silences its own loggers alone
        yield client


def _log_no_callbacks() -> None:
    logging.getLogger("tornado.application").setLevel(logging.CRITICAL)


def connect(scheduler: str) -> Any:
    """Return a client of the cluster with this scheduler, which is not the default client.

    Raises
    ------
    P2PError
        If none answers there.
    """
    from distributed import Client
    from distributed.comm import resolve_address

    try:
        # At an address that it cannot parse, Client hangs on closing.
        resolve_address(scheduler)
        return Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as exc:
        raise P2PError(
            f"no scheduler answers at {scheduler}: {exc}; give the address that `dask scheduler` "
            "shows"
        ) from exc


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End in one line and status 1, whatever went wrong; the traceback goes to the debug log."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as exc:
        logger.debug("the command failed", exc_info=True)
        text = " ".join(str(exc).split())
        if not isinstance(exc, P2PError):
            text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
        raise click.ClickException(text) from exc
