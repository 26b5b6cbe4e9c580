"""The worker context: blocks, RPC, threads and routes of a Dask worker, for transports and tasks.

Coroutines run on the worker's event loop, other methods in any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from distributed import Status, Worker

from dask_p2p.backends import BACKENDS, Queue, as_array, backend_for, backend_named
from dask_p2p.backends.device import device_work
from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext
from dask_p2p.errors import DeviceLostError, Obstacle, UnsupportedArrayError
from dask_p2p.monitoring.metrics import Counters, meter, record_transfer
from dask_p2p.monitoring.records import RecordLog, TaskRecord, packed
from dask_p2p.plugins.dask_internals import only_waiting, warn_client
from dask_p2p.plugins.storage import (
    OutputMemory,
    PinnedOutputs,
    find_in_memory,
    holds,
    is_mapped,
    is_spilled,
    read_spilled,
)
from dask_p2p.transports.base import PROBE_DTYPE, Probes, is_probe
from dask_p2p.transports.router import Router
from dask_p2p.transports.rpc import rpc_handler
from dask_p2p.types import Array, DType, Key, Kind

_T = TypeVar("_T")

#: Topic of Dask events that record the loss of a transport to a holder.
FALLBACK_TOPIC = "p2p-fallback"

_RECORDS = 10_000  # kept records of attempts and their stages
_SERVING_THREADS = 2  # threads that pack regions for other workers
_LOOKS = 10  # lookups of a block that is being spilled or restored
_KEEP_S = 1.0  # time until a block that was read from disk is dropped
_ENCRYPTED = ("tls://", "wss://")  # encrypted protocols of Dask
_PUBLISHED_ARRAYS = 1000  # number of arrays recorded as published
_MOST_AHEAD = 1000  # blocks of one array that are published before a reader requests them


class DaskWorkerContext(TaskContext):
    """The `WorkerContext` of a Dask worker, for its transports and tasks."""

    def __init__(self, worker: Worker, options: Options) -> None:  # the worker's options
        super().__init__(worker.address)
        self.router = Router({}, self.warn, worker.address, self.record_fallback)
        self.records = RecordLog(_RECORDS)
        self.counters = Counters()
        self._options = options
        self.loop: AbstractEventLoop = worker.loop.asyncio_loop
        self.folder: str = worker.local_directory
        self.encrypted_only = must_encrypt(worker)
        self.probes = Probes()
        self.outputs = OutputMemory(worker, options.retain_outputs_s)
        self.pinned = PinnedOutputs(worker, options.retain_outputs_s, self.warn)
        self._worker = worker
        self._gone: set[str] = set()
        # by name of an array, the oldest first: number of its blocks that are still held
        self._published: dict[Any, int] = {}
        self._threads = ThreadPoolExecutor(_SERVING_THREADS, thread_name_prefix="p2p-serve")
        self.from_disk: dict[Any, Any] = {}  # blocks by key, the oldest first

    def block(self, key: Key) -> Any:
        """Return a block; a spilled block is read, but stays spilled."""
        if is_probe(key):
            return self.probes.block(key, self._worker.memory_manager.memory_limit or None)
        data = self._worker.data
        for _ in range(_LOOKS):
            try:
                return find_in_memory(data, key)
            except KeyError:
                pass
            with suppress(KeyError):
                return self.from_disk[key]
            with suppress(KeyError):
                block = read_spilled(data, key)
                if not is_mapped(block):  # requests for its other regions follow soon
                    self.from_disk[key] = block
                    _evict_oldest(self.from_disk, _SERVING_THREADS)
                    forget = partial(self.from_disk.pop, key, None)
                    self.loop.call_soon_threadsafe(self.loop.call_later, _KEEP_S, forget)
                return block
        raise KeyError(key)

    def is_on_disk(self, key: Key) -> bool:
        return is_spilled(self._worker.data, key)

    def transport(self, name: str) -> Any:
        return self.router.transports.get(name)

    def holds(self, key: Key) -> bool:
        return holds(self._worker.data, key)

    def in_memory(self, key: Key) -> Any:
        return find_in_memory(self._worker.data, key)

    def kind_of(self, key: Key) -> Kind | None:
        task = self._worker.state.tasks.get(key)
        package = getattr(getattr(task, "type", None), "__module__", "").partition(".")[0]
        return package if package in BACKENDS else None

    async def call(self, address: str, op: str, **kwargs: Any) -> dict[str, Any]:
        if address in self._gone:
            raise ConnectionAbortedError("it has left the cluster")
        reply: dict[str, Any] = await getattr(self._worker.rpc(address), op)(**kwargs)
        return reply

    def on_worker_left(self, address: str) -> None:
        """Refuse calls to a worker that has left, as connecting fails only after a long time.

        Dask itself ends the calls under way.
        """
        self._gone.add(address)

    def on_workers_named(self, addresses: Iterable[str]) -> None:
        """Record that these workers are in the cluster: the scheduler lists them as holders."""
        self._gone.difference_update(addresses)

    # --- for tasks ---

    only_waiting = staticmethod(only_waiting)

    def warn(self, text: str) -> None:
        warn_client(self._worker, text)

    def record_fallback(self, holder: str, transport: str, obstacle: Obstacle) -> None:
        event = {
            "worker": self.address,
            "holder": holder,
            "transport": transport,
            "reason": obstacle.text,
            "remedy": obstacle.remedy,
        }
        self._worker.log_event(FALLBACK_TOPIC, event)

    def publish(self, blocks: Mapping[Any, Any], kind: Kind, options: Options) -> None:
        blocks = {**self._find_siblings(blocks), **blocks}
        for name in options.order(kind):
            self.router.transports[name].publish(blocks)

    def _find_siblings(self, blocks: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the other blocks of the same arrays that the worker holds, once for each array.

        Tasks on other workers are about to read these blocks. A request to a holder that has not
        published its blocks takes as long as reading fifty blocks.
        """
        names = {key[0] for key in blocks} - self._published.keys()
        if not names:
            return {}
        self._published |= dict.fromkeys(names, 0)
        _evict_oldest(self._published, _PUBLISHED_ARRAYS)
        blocks_in_memory, data = {}, self._worker.data
        with suppress(RuntimeError):  # the store is changing: readers will request the blocks
            keys = [key for key in list(data) if isinstance(key, tuple) and key[0] in names]
            self._published |= Counter(key[0] for key in keys)
            for key in keys[:_MOST_AHEAD]:
                with suppress(KeyError, UnsupportedArrayError):
                    block = as_array(find_in_memory(data, key))
                    backend_for(block)  # raises for blocks that cannot be published
                    blocks_in_memory[key] = block
        return blocks_in_memory

    def on_released(self, key: Key) -> None:
        """Record that the worker no longer holds a block; a later block may have the same name."""
        name = key[0] if isinstance(key, tuple) else key
        block_count = self._published.get(name)
        if block_count is not None and block_count > 1:
            self._published[name] = block_count - 1
        else:
            self._published.pop(name, None)

    def empty_output(self, shape: Sequence[int], dtype: DType, queue: Queue) -> Array:
        memory = self.pinned if queue.pinned_output else self.outputs
        return memory.empty(shape, dtype, queue)

    def memory_below(self, wanted_bytes: int, kind: Kind) -> int | None:
        limit_bytes = self._worker.memory_manager.memory_limit
        return backend_named(kind).memory_below(wanted_bytes, limit_bytes)

    def probe_peers(self, holders: Iterable[str], kind: Kind) -> None:
        with device_work():
            for holder in holders:
                if holder != self.address:
                    self.router.find_routes([holder], kind, PROBE_DTYPE, self._options.order(kind))

    def record(self, record: TaskRecord) -> None:
        if not record.error:
            self.forget_attempts(record.key)
            record_transfer(self._worker, record)
        self.running.pop(record.key, None)  # before the append, so that it is reported once
        self.records.append(self._add_run_number(record))
        self.counters.add(record)
        meter(record)

    def running_records(self) -> list[TaskRecord]:
        return [make_record() for make_record in tuple(self.running.values())]

    def _add_run_number(self, record: TaskRecord) -> TaskRecord:
        task = self._worker.state.tasks.get(record.key)
        return record._replace(run=task.run_id) if task is not None else record

    @rpc_handler
    async def new_records(self, since: int = 0) -> dict[str, Any]:
        """Return the records from number `since` on, as `RecordLog.since`, to the scheduler.

        ``under_way`` has the records of running tasks.
        """
        first, records = self.records.since(since)
        running = map(self._add_run_number, self.running_records())
        return {"first": first, "records": packed(records), "under_way": packed(running)}

    # --- threads, and the end ---

    async def offload(
        self, function: Callable[..., _T], *args: Any, threads: Executor | None = None
    ) -> _T:
        try:
            try:
                running = self.loop.run_in_executor(
                    threads or self._threads, _with_device, function, *args
                )
            except RuntimeError:  # the program has ended, and starts no threads
                if threading.main_thread().is_alive():
                    raise
                return _with_device(function, *args)
            return await running
        except DeviceLostError as exc:
            self.on_device_lost(exc)
            raise

    def on_device_lost(self, error: DeviceLostError) -> bool:
        """Close the worker, so that Dask reruns its tasks elsewhere; return whether it will close.

        A worker that shares its process with other workers or the user's code stays. A nanny
        starts a new process, which can use the GPU again. Any thread may call this.
        """
        if self._worker.address.startswith("inproc"):
            return False
        self.loop.call_soon_threadsafe(close_lost_worker, self._worker, str(error))
        return True

    def close(self) -> None:
        self.from_disk.clear()
        self.outputs.close()
        self.pinned.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def must_encrypt(worker: Worker) -> bool:
    """Return whether a worker may send only encrypted data."""
    # Credentials in a configuration file do not make Dask require encryption.
    return bool(worker.security.require_encryption) or worker.address.startswith(_ENCRYPTED)


def _evict_oldest(cache: dict[Any, Any], size_limit: int) -> None:
    while len(cache) > size_limit:
        with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
            del cache[next(iter(cache))]


def _with_device(function: Callable[..., _T], *args: Any) -> _T:
    with device_work():
        return function(*args)


logger = logging.getLogger(__name__)

_POLL_S = 0.01
_REPORT_S = 3.0  # time for running tasks to report the lost GPU, on a busy machine too
_LEAVE_S = 1.0  # time after that until the worker's process ends
_leaving: WeakKeyDictionary[Worker, asyncio.Future[None]] = WeakKeyDictionary()


def close_lost_worker(worker: Worker, reason: str) -> None:
    """Warn users, and close the worker. Idempotent; call it on the worker's event loop."""
    if worker not in _leaving:
        logger.critical("Worker %s leaves the cluster: %s", worker.address, reason)
        warn_client(worker, f"dask_p2p: worker {worker.address} left: {reason}")
        _leaving[worker] = asyncio.ensure_future(_end_process(worker))


async def _end_process(worker: Worker) -> None:
    """Close a worker, and end its process even if closing hangs or fails, as with a lost GPU.

    Before, wait up to `_REPORT_S` until a running task has failed and so reported the cause. Dask
    reruns all other tasks elsewhere, so these must not fail because of this GPU.
    """
    try:
        worker.status = Status.closing_gracefully  # no other task starts
        running = set(worker.state.executing)
        deadline_s = time.monotonic() + _REPORT_S
        while running and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
            if any(task.state == "error" for task in running):
                break
            running &= worker.state.executing
        closing = worker.close(nanny=False, executor_wait=False, reason="its GPU is lost")
        await asyncio.wait_for(closing, _LEAVE_S)
    finally:
        os._exit(1)
