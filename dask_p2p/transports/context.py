"""The interface through which transports use their worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from dask_p2p.backends import as_array
from dask_p2p.backends.declared import checked_block
from dask_p2p.interprocess.rpc import Caller
from dask_p2p.types import Key

_T = TypeVar("_T")


class WorkerContext(Caller, Protocol):
    """The worker of a transport, as the transport uses it.

    Coroutines run on the worker's event loop, all other methods in any thread.
    """

    address: str
    folder: str  # the worker's own directory, removed when it closes
    encrypted_only: bool  # True if no unencrypted data may leave this process

    def block(self, key: Key) -> Any:
        """Return the block with this key, or the probe block. Raises `KeyError` if it is not here.

        May read from disk: call it from a thread. A CuPy block that is spilled to host memory is
        returned as a NumPy array.
        """

    def is_on_disk(self, key: Key) -> bool:
        """Return whether a block is spilled, so that `block` would read it from disk."""

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        """Run a blocking function on one of `threads`; by default on those for requests."""


def find_block(worker: WorkerContext, key: Key, shape: tuple[int, ...]) -> Any:
    """Return the block of a reader's request. Raises `KeyError` if it is not here."""
    return checked_block(as_array(worker.block(key)), key, shape)
