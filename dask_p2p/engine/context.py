"""The interface through which tasks use their worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from dask_p2p.backends.base import Queue
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError
from dask_p2p.monitoring.records import REASON_CHARS, TaskRecord
from dask_p2p.transports.router import Router
from dask_p2p.types import Array, DType, Key, Kind


def where_is(worker: Any) -> str:
    """Return the name of a worker (or of a task's context) in errors."""
    address = getattr(worker, "address", "")
    return f"worker {address}" if address else "this process"


class TaskContext(Protocol):
    """The worker of a task, as tasks use it."""

    address: str  # address of the worker; "" on a thread scheduler
    running: dict[Any, Callable[[], TaskRecord]]  # by key of a running task: its record so far

    @property
    def router(self) -> Router:
        """The routes to other workers."""

    def transport(self, name: str) -> Any:
        """Return the transport with this name; None if the worker has none."""

    def block(self, key: Key) -> Any:
        """Return a block, as `WorkerContext.block` does."""

    def in_memory(self, key: Key) -> Any:
        """Return a block in memory. Raises `KeyError` if the block is spilled or not here."""

    def kind_of(self, key: Key) -> Kind | None:
        """Return the kind of a block in memory or spilled; None if unknown."""

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        """Prepare these blocks of this kind for reads by other workers."""

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an uninitialised array for the output of a queue.

        The array is in pinned memory if the queue requests it and some is available.
        """

    def only_waiting(self) -> AbstractContextManager[None]:
        """Return a context for waiting: the worker may start another task during it."""

    def warn(self, text: str) -> None:
        """Send a warning to the user's client."""

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        """Return the worker's memory for blocks of this kind if it is less than wanted, or None."""

    def count_attempt(self, key: Key, cause: str) -> tuple[int, str]:
        """Record a failed attempt, as `AttemptLog` does."""

    def forget_attempts(self, key: Key) -> None:
        """Forget the attempts at a task, as `AttemptLog` does."""

    def record(self, record: TaskRecord) -> None:
        """Record a finished attempt at a task, successful or failed."""

    def on_device_lost(self, error: DeviceLostError) -> bool:
        """Close the worker because its GPU no longer works. Return whether it closes."""


@contextmanager
def recorded(
    context: TaskContext,
    key: Key,  # key of the task
    record: Callable[..., TaskRecord],  # returns the record so far, with additional fields
    errors: type[BaseException] = Exception,  # other exceptions leave no record
) -> Iterator[dict[str, Any]]:
    """Record an attempt at a task with its worker, during this context and at its end.

    Yields the additional fields of the last record, which the attempt may set. During the attempt
    other threads call ``record(is_running=True)``.
    """
    fields: dict[str, Any] = {}
    context.running[key] = partial(record, is_running=True)
    try:
        yield fields
    except errors as exc:
        fields["error"] = f"{type(exc).__name__}: {exc}"[:REASON_CHARS]
        context.record(record(**fields))
        raise
    else:
        context.record(record(**fields))
    finally:
        context.running.pop(key, None)
