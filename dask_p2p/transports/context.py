"""What transports and tasks need of the worker that they are on."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dask_p2p.backends.base import Queue
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError
from dask_p2p.monitoring.records import Record
from dask_p2p.retry import Attempts
from dask_p2p.types import Array, DType, Key, Kind

if TYPE_CHECKING:
    from dask_p2p.transports.router import Router

__all__ = ["WorkerContext"]

_T = TypeVar("_T")


class WorkerContext(Protocol):
    """The worker of a transport, or of a task.

    Coroutines run on the worker's event loop, the rest in any thread.
    """

    address: str
    loop: AbstractEventLoop
    folder: str  # of this worker's own; it goes when the worker goes
    encrypted_only: bool  # whether nothing may leave this process unencrypted
    router: Router
    under_way: dict[Any, Callable[[], Record]]  # what to say of tasks that run, by key

    # --- for transports ---

    def block(self, key: Key) -> Any:
        """Return the block with this key, which may be a probe's; `KeyError` if it is not here.

        It may be read from disk, so this is nothing for the event loop.
        """

    def is_on_disk(self, key: Key) -> bool:
        """Return whether a block is spilled, so that `block` would have to read it."""

    async def call(self, address: str, op: str, **kwargs: Any) -> dict[str, Any]:
        """Call the handler `op` of the worker at `address`; `OSError` if it cannot be reached."""

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        """Run a blocking function on a thread: of these, or of those that answer requests."""

    # --- for tasks ---

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        """Note that other workers are about to read these blocks of this kind."""

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        """Return an array whose values are undefined, for what the queue will do."""

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        """Return all memory for blocks of this kind if that is less than wanted; else None."""

    def record_failure(self, key: Key, cause: str) -> Attempts:
        """See `AttemptLog`."""

    def forget_attempts(self, key: Key) -> None:
        """See `AttemptLog`."""

    def record(self, record: Record) -> None:
        """Note that an attempt at a task ended, well or not."""

    def on_device_lost(self, error: DeviceLostError) -> bool:
        """Have the worker leave because its GPU no longer works; return whether it does."""
