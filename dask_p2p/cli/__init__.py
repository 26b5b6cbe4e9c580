"""The ``dask p2p`` commands. `dask` imports this module at each start, so commands load lazily."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections import Counter
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import click
from dask.utils import format_bytes

from dask_p2p.errors import P2PError
from dask_p2p.inputs import pluralize
from dask_p2p.types import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Modules and help texts by command, listed here so that the overview imports no command.
_COMMANDS = {
    "check": ("cluster", "Show transports and speeds between workers, and any problems."),
    "demo": ("cluster", "Transpose a generated array, and check every value."),
    "rechunk": ("files", "Write the array of a file with other chunks."),
    "runs": ("cluster", "Print the last runs of a cluster, once or every few seconds."),
    "transpose": ("files", "Transpose the array of a file into another file."),
}


class _LazyGroup(click.Group):
    """A group whose commands are in modules that are imported at first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"dask_p2p.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(package_name="dask-p2p", prog_name="dask p2p")
def p2p() -> None:
    """Peer-to-peer transposes, rechunks and halo exchanges of arrays."""


CONNECT_S = 10  # longest wait of a command for its scheduler
WORKERS_S = 10  # longest wait of a command for the first worker
COUNT = click.IntRange(min=1)

logger = logging.getLogger(__name__)

_CPU_WORKERS = 4
# Room for the array, its transpose, and the data in transfer between them.
_MEMORY_FACTOR = 2.5
_CPU_SIDE, _GPU_SIDE = 6000, 32768  # rows of the default matrix
_MEMORY_SHARE = 8  # the default matrix takes at most 1 / 8 of the free memory

workers_option = click.option(
    "--workers",
    type=COUNT,
    metavar="N",
    help="Number of workers, each with one GPU or one thread.  [default: one for each GPU, else 4]",
)
scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Cluster to use.  [default: start one on this machine, as dask p2p demo does]",
)
cpu_option = click.option("--cpu", is_flag=True, help="Use CPU workers, even if there are GPUs.")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The workers that a command starts on this machine."""

    workers: int
    gpus: tuple[str, ...]  # one for each worker; empty for CPU workers
    note: str | None  # message to the user about the choice
    memory_bytes: int  # free memory of all workers together

    @property
    def kind(self) -> str:
        return "cupy" if self.gpus else "numpy"


def choose_cluster(workers: int | None, cpu: bool) -> ClusterSpec:
    """Return a spec of GPU workers if there is more than one usable GPU, else of CPU workers."""
    import psutil

    from dask_p2p.tools.cluster import free_gpu_bytes, usable_gpus

    usable = [] if cpu else usable_gpus()
    if len(usable) > 1:
        gpus = tuple(usable[: workers or len(usable)])
        if workers is not None and workers > len(usable):
            raise click.BadParameter(
                f"there are {len(usable)} usable GPUs for {workers} workers; pass a smaller "
                "number, or --cpu",
                param_hint="--workers",
            )
        return ClusterSpec(len(gpus), gpus, None, len(gpus) * min(free_gpu_bytes(gpus)))
    note = None
    if usable:
        note = "There is one usable GPU only, so no data moves between GPUs: using CPU workers."
    free_bytes = int(psutil.virtual_memory().available)
    return ClusterSpec(workers or _CPU_WORKERS, (), note, free_bytes)


def check_fits(
    spec: ClusterSpec, shape: tuple[int, ...], dtype: DType, axes: tuple[int, ...], hint: str
) -> None:
    """Raise `click.BadParameter` if the array does not fit, or has too few rows for the workers."""
    needed_bytes = int(_MEMORY_FACTOR * prod(shape) * dtype.itemsize)
    if needed_bytes > spec.memory_bytes:
        raise click.BadParameter(
            f"the array, its transpose and the data in transfer need {format_bytes(needed_bytes)}, "
            f"and {format_bytes(spec.memory_bytes)} are free; choose a smaller array",
            param_hint=hint,
        )
    if axes and min(shape[0], shape[axes[0]]) < spec.workers:
        raise click.BadParameter(
            f"{' x '.join(map(str, shape))} and its transpose cannot be split into {spec.workers} "
            "slabs of at least one row; choose a larger array or fewer workers",
            param_hint=hint,
        )


def default_side(spec: ClusterSpec, itemsize: int) -> int:
    """Return the rows of the default matrix, which are fewer if memory is scarce."""
    fits = isqrt(spec.memory_bytes // _MEMORY_SHARE // itemsize)
    return max(spec.workers, min(_GPU_SIDE if spec.gpus else _CPU_SIDE, fits))


def devices_text(spec: ClusterSpec, names: Sequence[str]) -> str:
    """Return a line on the workers and their hardware; `names` are GPU or processor names."""
    models = Counter(names)
    if spec.gpus:
        listed = ", ".join(f"{count} x {name}" for name, count in models.items())
        return f"{pluralize(spec.workers, 'worker')}, one per GPU: {listed}"
    return (
        f"{pluralize(spec.workers, 'one-thread worker')} over TCP on {', '.join(models)}, "
        f"{pluralize(os.cpu_count() or 1, 'core')}"
    )


@contextlib.contextmanager
def own_cluster(workers: int, **options: Any) -> Iterator[Any]:
    """Return a context with the client of a new cluster, which ends with the context.

    The client is not the default client. The cluster's processes log nothing: the command reports
    a task's error in one line. Other log messages would be interrupted heartbeats, and Dask's own
    P2P runs.
    """
    from distributed import Client

    from dask_p2p.tools.cluster import local_cluster

    with (
        local_cluster(workers, silence_logs=logging.CRITICAL, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        # Dask silences only its own loggers.
        client.run(lambda: logging.getLogger("tornado.application").setLevel(logging.CRITICAL))
        yield client


def connect(scheduler: str) -> Any:
    """Return a client of the cluster with this scheduler; it is not the default client.

    Raises `P2PError` if no scheduler answers at the address.
    """
    from distributed import Client
    from distributed.comm import resolve_address

    try:
        # With an address that it cannot parse, Client hangs on closing.
        resolve_address(scheduler)
        return Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as exc:
        raise P2PError(
            f"no scheduler answers at {scheduler}: {exc}; pass the address that `dask scheduler` "
            "shows"
        ) from exc


def wait_for_worker(client: Any) -> None:
    """Wait until a worker has joined. Raises `P2PError` if none does within some seconds."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except TimeoutError as exc:
        raise P2PError(
            f"the scheduler at {client.scheduler.address} has no workers; start some with "
            "`dask worker`"
        ) from exc


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Return a context that turns any error into one line and exit status 1.

    The traceback goes to the debug log.
    """
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
