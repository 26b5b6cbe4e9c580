"""The context of tasks without the plugin: on a thread scheduler, or on a worker without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from dask_p2p.backends.base import Queue
from dask_p2p.config import Options
from dask_p2p.engine.attempts import AttemptLog
from dask_p2p.errors import DeviceLostError, P2PWarning, TransferError
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.types import Array, DType, Key, Kind


class LocalContext(AttemptLog):
    """The `TaskContext` of a process without the plugin.

    All input blocks are arrays of this process, and no attempt is recorded. A task with references
    to blocks was prepared by a plugin that has left: each use of them raises `TransferError`, so
    that the scheduler prepares the task again.
    """

    def __init__(self, worker: Any = None) -> None:  # None: a thread scheduler
        super().__init__("" if worker is None else worker.address)
        self.running: dict[Any, Callable[[], TaskRecord]] = {}

    @property
    def router(self) -> Any:
        self._raise_no_plugin()

    def in_memory(self, key: Key) -> Any:
        self._raise_no_plugin()

    def block(self, key: Key) -> Any:
        self._raise_no_plugin()

    def _raise_no_plugin(self) -> NoReturn:
        raise TransferError("the worker's plugin was unregistered while the task waited")

    def transport(self, name: str) -> None:
        return None

    def kind_of(self, key: Key) -> Kind | None:
        return None

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        """Do nothing: no other process reads these blocks."""

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        return queue.empty(shape, dtype)

    def only_waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warn(self, text: str) -> None:
        warnings.warn(text, P2PWarning, stacklevel=2)

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        return None

    def record(self, record: TaskRecord) -> None:
        """Do nothing: only a plugin keeps records."""

    def on_device_lost(self, error: DeviceLostError) -> bool:
        return False
