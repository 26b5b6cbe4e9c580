"""What tasks need of the worker that they are on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dask_p2p.backends.base import Queue
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError
from dask_p2p.monitoring.records import Record
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.router import Router
from dask_p2p.types import Array, DType, Key, Kind


def where_is(worker: Any) -> str:
    """Name a worker, or its context, in an error; None stands for a process without one."""
    return "this process" if worker is None else f"worker {worker.address}"


class TaskContext(WorkerContext, Protocol):
    """The worker of a task."""

    router: Router
    running: dict[Any, Callable[[], Record]]  # what to say of tasks that run, by key

    def holds(self, key: Key) -> bool:
        """Return whether the worker has a block, in memory or spilled."""

    def in_memory(self, key: Key) -> Any:
        """Return a block that is not spilled; `KeyError` if it is, or is not here."""

    def kind_of(self, key: Key) -> Kind | None:
        """Return the kind of a block, wherever the block lies now; None if it is not known."""

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        """Note that other workers are about to read these blocks of this kind."""

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an array whose values are undefined, for what the queue will do.

        It lies in pinned memory if the queue wants that, and it can be had.
        """

    def only_waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the worker begins another task: this thread only waits."""

    def warn(self, text: str) -> None:
        """Warn the user, wherever they are."""

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        """Return all memory for blocks of this kind if that is less than wanted; else None."""

    def responds(self, holder: str) -> bool:
        """Return whether a worker that was silent answers now; what is known of it then changes."""

    def count_attempt(self, key: Key, cause: str) -> tuple[int, str]:
        """See `AttemptLog`."""

    def forget_attempts(self, key: Key) -> None:
        """See `AttemptLog`."""

    def record(self, record: Record) -> None:
        """Note that an attempt at a task ended, well or not."""

    def on_device_lost(self, error: DeviceLostError) -> bool:
        """Have the worker leave because its GPU no longer works; return whether it does."""
