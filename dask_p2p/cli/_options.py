"""Options that several commands share, and the cluster that ``--workers`` and ``--cpu`` ask for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import click
from dask.utils import format_bytes

from dask_p2p.errors import P2PError
from dask_p2p.types import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

_CPU_WORKERS = 4
_CONNECT_S = 10
_WORKERS_WAIT_S = 10
# The array, its transpose and what is on its way between them.
_MEMORY_FACTOR = 2.5
_CPU_SIDE, _GPU_SIDE = 6000, 32768  # of the default matrix
_MEMORY_SHARE = 8  # which takes at most this part of the free memory


COUNT = click.IntRange(min=1)

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
cpu_option = click.option("--cpu", is_flag=True, help="CPU workers, even if there are GPUs.")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where a command is to run."""

    workers: int
    gpus: tuple[str, ...]  # one for each worker; none for CPU workers
    note: str | None  # what a user should know of the choice
    memory_bytes: int  # that is free, all workers together

    @property
    def kind(self) -> str:
        """Of the arrays' blocks."""
        return "cupy" if self.gpus else "numpy"


def choose_cluster(workers: int | None, cpu: bool) -> ClusterSpec:
    """Choose GPUs where there is more than one, or CPU workers."""
    import psutil

    from dask_p2p.tools.cluster import free_gpu_bytes, usable_gpus

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


def default_side(spec: ClusterSpec, itemsize: int) -> int:
    """Rows of the default matrix: fewer if memory is scarce."""
    fits = isqrt(spec.memory_bytes // _MEMORY_SHARE // itemsize)
    return max(spec.workers, min(_GPU_SIDE if spec.gpus else _CPU_SIDE, fits))


def pluralize(count: int, noun: str) -> str:
    """Put a number before a noun.

    >>> pluralize(1, "stage"), pluralize(2, "stage")
    ('1 stage', '2 stages')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def devices_text(spec: ClusterSpec, names: Sequence[str]) -> str:
    """Write which workers there are, and on what, by the names of GPUs or processors."""
    models = Counter(names)
    if spec.gpus:
        listed = ", ".join(f"{count} x {name}" for name, count in models.items())
        return f"{pluralize(spec.workers, 'worker')}, one a GPU: {listed}"
    return (
        f"{pluralize(spec.workers, 'one-thread worker')} over TCP on {', '.join(models)}, "
        f"{pluralize(os.cpu_count() or 1, 'core')}"
    )


@contextlib.contextmanager
def own_cluster(workers: int, **options: Any) -> Iterator[Any]:
    """Start a cluster that ends with the command, and whose processes log nothing.

    What a task meets comes back as the command's own error, in one line. What would be logged
    besides are heartbeats that the cluster's end cuts off, and each of Dask's own P2P runs.
    Gives a client, which is not the default one.
    """
    from distributed import Client

    from dask_p2p.tools.cluster import local_cluster

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

    `P2PError` if none answers there.
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


def worker_count(client: Any) -> int:
    """Return the number of workers; there must be at least one.

    `P2PError` if none comes within some seconds.
    """
    from dask_p2p.plugins.registration import workers_of

    try:
        client.wait_for_workers(1, timeout=_WORKERS_WAIT_S)
    except TimeoutError as exc:
        raise P2PError(
            f"the scheduler at {client.scheduler.address} has no workers; start some with "
            "`dask worker`"
        ) from exc
    return len(workers_of(client))


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
