"""Options of the benchmarks, and their cluster: a new one or an existing one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from dask_p2p import cli as _options
from dask_p2p.backends.host import computes_on_gpu
from dask_p2p.cli import ClusterSpec, connect, own_cluster
from dask_p2p.geometry import normalize_axes
from dask_p2p.plugins.registration import workers_of

_WORKERS_WAIT_S = 10


def reader(
    read: Callable[[str], Any], description: str, right: Callable[[Any], bool] = lambda value: True
) -> Any:
    """Return a click type that reads a valid value, or names `description` it expects."""

    def convert(value: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            result = read(value)
            if right(result):
                return result
        raise click.BadParameter(f"{value!r}: give {description}")

    return convert


def _numbers(value: str, between: str = ",") -> tuple[int, ...]:
    return tuple(map(int, value.split(between))) if value.strip() else ()


SHAPE = reader(
    lambda value: _numbers(value.lower(), "x"),
    "lengths of at least 1 with an x between",
    lambda shape: min(shape) > 0,
)


def _dtype(value: str) -> Any:
    try:
        return np.dtype(value)
    except (TypeError, ValueError, SyntaxError) as exc:
        raise click.BadParameter(f"{value!r}: NumPy has no dtype of this name") from exc


DTYPE = reader(
    _dtype,
    "a boolean, integer, float or complex dtype",
    lambda dtype: dtype.kind in "biufc",  # dtypes with checkable values
)
AXES = reader(_numbers, "whole numbers with commas between", bool)

axes_option = click.option(
    "--axes",
    type=AXES,
    metavar="1,0",
    help="Input axis of each output axis.  [default: reversed]",
)
commit_option = click.option(
    "--commit", help="Commit of the code, if git is not available.", metavar="HASH"
)


def _target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a file in a missing folder before the measurement, not after it."""
    if value not in (None, "-") and not Path(value).absolute().parent.is_dir():
        raise click.BadParameter(f"{value!r}: the folder does not exist", ctx, param)
    return value


json_option = click.option(
    "--json",
    "target",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    callback=_target,
    metavar="FILE",
    help="Write all measurements to this file; - is standard output, without other output.",
)


def order_of_axes(axes: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation of ``--axes``, without negative numbers."""
    ndim = len(shape)
    order = normalize_axes(axes, ndim)
    if order is None:
        raise click.BadParameter(
            f"give the {ndim} axes of the shape, {','.join(map(str, range(ndim)))}, in any order",
            param_hint="--axes",
        )
    return order


@dataclass(frozen=True, slots=True)
class AnyClusterSpec(ClusterSpec):
    """The cluster of a program: its own, or an existing one."""

    scheduler: str | None = None  # address of an existing cluster


def choose_cluster(workers: int | None, cpu: bool, scheduler: str | None = None) -> AnyClusterSpec:
    """Choose an existing cluster, or GPUs if there are several, or else CPU workers."""
    if scheduler is None:
        spec = _options.choose_cluster(workers, cpu)
        return AnyClusterSpec(spec.workers, spec.gpus, spec.note, spec.memory_bytes)
    if workers or cpu:
        raise click.UsageError("--workers and --cpu are for a cluster that is started here")
    with connect(scheduler) as client:
        client.wait_for_workers(1, timeout=_WORKERS_WAIT_S)
        on_gpus = client.run(computes_on_gpu)
        gpus = (*on_gpus,) if all(on_gpus.values()) else ()
        return AnyClusterSpec(len(on_gpus), gpus, None, _free_bytes(client, bool(gpus)), scheduler)


def _free_bytes(client: Any, on_gpus: bool) -> int:
    """Return the free memory of all workers of a cluster together."""

    def of_device() -> int:  # sent by value, as `of_host`: workers lack this module
        import cupy

        return int(cupy.cuda.runtime.memGetInfo()[0])

    def of_host() -> int:
        import psutil

        return int(psutil.virtual_memory().available)

    if on_gpus:
        free_bytes = client.run(of_device)
        return len(free_bytes) * int(min(free_bytes.values()))
    workers = workers_of(client)
    one_of = {worker["host"]: address for address, worker in workers.items()}
    free = int(sum(client.run(of_host, workers=[*one_of.values()]).values()))
    return min(free, sum(worker["memory_limit"] or free for worker in workers.values()))


@contextlib.contextmanager
def start(spec: AnyClusterSpec, **options: Any) -> Iterator[Any]:
    """Start a cluster, with options of `local_cluster`, or connect to the existing one.

    Yields a client. A started cluster ends with the block.
    """
    if spec.scheduler is not None:
        cluster = connect(spec.scheduler)
    else:
        cluster = own_cluster(spec.workers, gpus=bool(spec.gpus), **options)
    with cluster as client, client.as_current():
        yield client
