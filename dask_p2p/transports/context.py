"""What transports need of the worker that they are on."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from dask_p2p.types import Key

_T = TypeVar("_T")


class WorkerContext(Protocol):
    """The worker of a transport.

    Coroutines run on the worker's event loop, the rest in any thread.
    """

    address: str
    loop: AbstractEventLoop
    folder: str  # of this worker's own; it goes when the worker goes
    encrypted_only: bool  # whether nothing may leave this process unencrypted

    def block(self, key: Key) -> Any:
        """Return the block with this key, which may be a probe's; `KeyError` if it is not here.

        It may be read from disk, and so may block: call it from a thread. A CuPy block that is
        spilled to host memory is a NumPy array there.
        """

    def is_on_disk(self, key: Key) -> bool:
        """Return whether a block is spilled, so that `block` would have to read it."""

    async def call(self, address: str, op: str, **kwargs: Any) -> dict[str, Any]:
        """Call the handler `op` of the worker at `address`; `OSError` if it cannot be reached."""

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        """Run a blocking function on a thread: of these, or of those that answer requests."""
