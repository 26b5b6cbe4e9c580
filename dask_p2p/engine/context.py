"""The interface through which tasks use their worker."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from dask.utils import format_bytes

from dask_p2p.backends import Queue, backend_named
from dask_p2p.backends.host_memory import bases
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError, MemoryLimitError, P2PWarning, TransferError
from dask_p2p.monitoring.records import REASON_CHARS, TaskRecord
from dask_p2p.transports.router import Router
from dask_p2p.types import Array, DType, Key, Kind

MOST_TASKS = 10_000  # in the log of failed attempts


def where_is(worker: Any) -> str:
    """Return the name of a worker (or of a task's context) in errors."""
    address = getattr(worker, "address", "")
    return f"worker {address}" if address else "this process"


# The retry policy of a worker: the number of attempts, and their pauses.
#
# "Failure" in docs/design.md describes it. The worker's event loop enforces the deadlines. While
# the loop itself is blocked, each wait takes `Tuning.event_loop_grace_s` longer.

_FIRST_PAUSE_S = 0.05  # after the first failed attempt at a task; it doubles after each other one
LONGEST_PAUSE_S = 2.0  # between two attempts at a task
_KEPT_CAUSES = 8  # causes kept per task: the last distinct ones
_CAUSE_CHARS = 500  # length of a cause


def pause_s(attempt: int) -> float:
    """Return the pause after a failed attempt. The first attempt has number 1."""
    return min(LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1))


class TaskContext:
    """The worker of a task, as tasks use it; here that of a process without the plugin.

    Without the plugin all input blocks are arrays of this process, and no attempt is recorded. A
    task with references to blocks was prepared by a plugin that has left: each use of them raises
    `TransferError`, so that the scheduler prepares the task again.
    """

    def __init__(self, address: str = "") -> None:  # of the worker; "" on a thread scheduler
        self.address = address
        self.running: dict[Any, Callable[[], TaskRecord]] = {}  # records so far, by key of the task
        #: Failed attempts, by task, of a bounded number of tasks: first and last number of
        #: successive attempts with one cause, and the cause.
        self.failed: OrderedDict[Any, deque[tuple[int, int, str]]] = OrderedDict()
        self._lock = threading.Lock()

    def count_attempt(self, key: Key, cause: str) -> tuple[int, str]:
        """Record a failed attempt at a task. Return the number of attempts, and their causes."""
        if len(cause) > _CAUSE_CHARS:
            cause = f"{cause[: _CAUSE_CHARS - 4]} ..."
        with self._lock:
            causes = self.failed.pop(key, None) or deque(maxlen=_KEPT_CAUSES)
            first = count = causes[-1][1] + 1 if causes else 1
            if causes and causes[-1][2] == cause:
                first, *_ = causes.pop()
            causes.append((first, count, cause))
            self.failed[key] = causes
            while len(self.failed) > MOST_TASKS:
                self.failed.popitem(last=False)
            return count, "; ".join(
                f"attempt{f' {first}' if first == last else f's {first} to {last}'}: {cause}"
                for first, last, cause in causes
            )

    def forget_attempts(self, key: Key) -> None:
        with self._lock:
            self.failed.pop(key, None)

    @cached_property
    def router(self) -> Router:
        raise _no_plugin()

    def transport(self, name: str) -> Any:
        """Return the transport with this name; None if the worker has none."""

    def block(self, key: Key) -> Any:
        raise _no_plugin()

    def in_memory(self, key: Key) -> Any:
        raise _no_plugin()

    def kind_of(self, key: Key) -> Kind | None:
        """Return the kind of a block in memory or spilled; None if unknown."""
        return None

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        """Prepare these blocks of this kind for reads by other workers."""

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an uninitialised array for the output of a queue.

        The array is in pinned memory if the queue requests it and some is available.
        """
        return queue.empty(shape, dtype)

    def only_waiting(self) -> AbstractContextManager[None]:
        """Return a context for waiting: the worker may start another task during it."""
        return nullcontext()

    def warn(self, text: str) -> None:
        """Send a warning to the user's client."""
        warnings.warn(text, P2PWarning, stacklevel=2)

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        """Return the worker's memory for blocks of this kind if it is less than wanted, or None."""
        return None

    def record(self, record: TaskRecord) -> None:
        """Record a finished attempt at a task, successful or failed."""

    def on_device_lost(self, error: DeviceLostError) -> bool:
        """Close the worker because its GPU no longer works. Return whether it closes."""
        return False


def _no_plugin() -> TransferError:
    return TransferError("the worker's plugin was unregistered while the task waited")


@contextmanager
def record_attempt(
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


_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_OUT_OF_MEMORY
SMALLER_CHUNKS = (
    "Use smaller chunks (chunks= for the result, rechunk for the input), or more workers if all "
    "of them together lack memory."
)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The peak memory of one task or one rank: bytes by purpose. Errors name the purposes."""

    always: Mapping[str, int]  # held from the start to the end
    phases: tuple[Mapping[str, int], ...] = ()  # one after another; the largest counts
    kind: Kind = "numpy"  # memory of this backend

    @property
    def peak_bytes(self) -> int:
        """The sum of `always` and of the largest phase."""
        phases_bytes = (sum(phase.values()) for phase in self.phases)
        return sum(self.always.values()) + max(phases_bytes, default=0)

    @property
    def purposes(self) -> str:
        """The bytes of each purpose as text, except for purposes without memory."""
        phases = filter(None, (" and ".join(_sizes(phase)) for phase in self.phases))
        return ", ".join(filter(None, [*_sizes(self.always), ", or afterwards ".join(phases)]))

    def __str__(self) -> str:
        return f"{_bytes(self.peak_bytes)}: {self.purposes}"

    def check(self, limit_bytes: int | None, subject: str, where: str, remedy: str) -> None:
        """Raise `MemoryLimitError` if there is a limit, which is then below the peak."""
        if limit_bytes is None:
            return
        missing_bytes = self.peak_bytes - limit_bytes
        raise MemoryLimitError(
            f"expected {subject} that fits into the {_bytes(limit_bytes)} of {self._place(where)}, "
            f"got one that needs {self}; {_bytes(missing_bytes)} are missing. {remedy}",
            self.peak_bytes,
            missing_bytes,
        )

    def error(self, cause: str, subject: str, where: str, remedy: str) -> MemoryLimitError:
        """Return the error for a failed allocation, with the allocator's cause."""
        return MemoryLimitError(
            f"out of memory on {self._place(where)} ({cause}) for {subject} that needs {self}. "
            f"{remedy}",
            self.peak_bytes,
        )

    def _place(self, where: str) -> str:
        return f"the GPU of {where}" if backend_named(self.kind).on_device else where


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an allocation failed, by NumPy, CuPy, RMM or CUDA itself."""
    # CuPy's OutOfMemoryError and RMM's std::bad_alloc are Python's MemoryError.
    return isinstance(exc, MemoryError) or (
        type(exc).__name__ in ("CUDARuntimeError", "CUDADriverError")
        and getattr(exc, "status", None) == _MEMORY_ALLOCATION
    )


def in_memory_bytes(block: Array) -> int:
    """Return a lower bound of the memory of an array.

    Repeated elements (`numpy.broadcast_to`) count once. Memory-mapped files count as 0 bytes, and
    so do objects that are no arrays, which the check of each block refuses.
    """
    if not hasattr(block, "strides"):
        return 0
    if any(type(base).__name__ in ("memmap", "mmap") for base in bases(block)):
        return 0
    nbytes = int(block.dtype.itemsize)
    for length, stride in zip(block.shape, block.strides, strict=True):
        nbytes *= length if stride or not length else 1
    return nbytes


def _sizes(by_purpose: Mapping[str, int]) -> list[str]:
    return [f"{format_bytes(nbytes)} {name}" for name, nbytes in by_purpose.items() if nbytes]


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
