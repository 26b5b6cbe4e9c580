"""The streams of a rank on a GPU, and the memory that it shares with other ranks.

Each rank has a stream of its own. Its function and its exchanges enqueue work there without
waiting. Values that the host needs are copied down once the stream has made them.

Dask-CUDA spills objects in a worker's store: outputs, and copies of inputs that other tasks use.
The working memory of a rank is in no store, so none of it is spilled.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import inf
from statistics import median
from typing import Any, ClassVar

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import checksum, device_of
from dask_p2p.backends.device import MEMCPY_DEFAULT, device_work, wait_until_written
from dask_p2p.backends.device_queue import DeviceQueue
from dask_p2p.backends.host import copy_on_host
from dask_p2p.backends.pipelines import HostStreams, Ring
from dask_p2p.errors import DeviceLostError
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.gpu.windows import NOT_READY, PeerMemory
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, DType, Kind

STEPS_AHEAD = 64  # limit of the host's lead over a GPU
_SECONDS_AHEAD = 0.5  # the same in time: it delays the release of a dead process's memory
_SPIN_S = 2e-4  # time of polling a GPU without a pause
_PAUSE_S = 5e-5
_LOOK_S = 0.05  # pause between checks of the processes of these peers


class _Gpu(Host):
    kind: ClassVar[Kind] = "cupy"
    has_read_only: ClassVar[bool] = False

    def read_only(self, array: Array) -> Array:
        return array

    def copy_from_host(self, array: Array, host_array: Any) -> None:
        array[...] = self.module.asarray(host_array)


class GpuStreams(_Gpu):
    """A GPU's streams and memory: each method enqueues its work on the rank's stream."""

    stream: Any  # for computation
    copies: Any  # for reads of other ranks' windows
    _device: int

    _idle: ClassVar[defaultdict[int, list[_RankStreams]]] = defaultdict(list)
    _lost: ClassVar[list[_RankStreams]] = []  # streams that wait for work that never comes
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        connections: Connections = ONE_RANK,  # connections to other ranks
        has_windows: bool = True,  # whether ranks of one host may read each other's memory
        part_bytes: int = 0,  # part of a region that copy engines bring at a time; 0: kernels read
    ) -> None:
        self._connections, self.has_windows, self.part_bytes = connections, has_windows, part_bytes
        #: Called when all work is done: close memory and events of other ranks.
        self.closing: list[Callable[[], None]] = []
        #: Memory and events that other ranks read. It is dropped after they have closed it.
        self.exported: list[Any] = []
        #: Called when the attempt has ended: stop the GPU's waits for other ranks.
        self.ending: list[Callable[[], None]] = []
        #: Memory and events of other ranks. The GPU may wait for these events.
        self.peers: list[PeerMemory] = []
        self.reading = threading.Lock()  # held while reads of others' memory are enqueued
        #: The GPU no longer waits for other ranks: all results since then are invalid.
        self.has_ended = False
        self.is_running = False  # whether the rank uses its streams
        self._step = 0  # last step with a wait for the GPU
        self._steps_ahead = STEPS_AHEAD  # until the next wait

    @contextmanager
    def running(self, blocks: Sequence[Array]) -> Iterator[None]:
        with device_work(), device_of(*blocks):
            wait_until_written(blocks)
            self._device = device = self.module.cuda.runtime.getDevice()
            with self._lock:
                idle = self._idle[device]
                self._streams = streams = (
                    idle.pop() if idle else _RankStreams(self.module.cuda.Stream)
                )
            self.stream, self.copies = streams.stream, streams.copies
            # Streams are kept: memory of a function that raised is freed later, and RMM frees
            # memory on the stream that allocated it.
            lost, self.is_running = self._lost, True
            with self.stream:
                try:
                    yield
                finally:
                    self.is_running = False
                    try:
                        self._drain()  # this stream waits for all others
                        streams.queue.synchronize()
                        lost = self._idle[device]
                    finally:
                        with self._lock:
                            lost.append(streams)
                    while self.closing:
                        self.closing.pop()()

    @contextmanager
    def capturing(self) -> Iterator[Any]:
        """Return a context that yields a stream for capture, and makes it the current one.

        No memory is allocated on that stream. RMM ends the capture of a stream as soon as any
        thread frees memory that was allocated on it, as the garbage collector may at any time.
        """
        outer, self.stream = self.stream, self._streams.capturing
        try:
            with self.stream:
                yield self.stream
        finally:
            self.stream = outer

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Return a context whose work is concurrent with the stream's later work, until `join`."""
        outer, self.stream = self.stream, self._streams.side
        self._event.record(outer)
        self.stream.wait_event(self._event)
        try:
            with self.stream:
                yield
        finally:
            self._event.record(self.stream)
            self.stream = outer

    def join(self) -> None:
        self.stream.wait_event(self._event)

    @cached_property
    def _event(self) -> Any:
        return self.module.cuda.Event(disable_timing=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context for work on the rank's stream, from any thread of the rank."""
        with device_work(), self.module.cuda.Device(self._device), self.stream:
            yield

    @property
    def queue(self) -> DeviceQueue:
        """The queue that reads other ranks' regions, and permutes: always `within` the stream."""
        return self._streams.queue

    def wait(self) -> None:
        """Wait until all work on the stream is done.

        Raises
        ------
        AttemptEndedError
            If the attempt has ended, and device barriers with it: later results are invalid.
        DeviceLostError
            If the stream still waits long after the end of the attempt.
        """
        self._drain()
        self.check_goes_on()

    def check_goes_on(self) -> None:
        """Raise `AttemptEndedError` if the attempt ended while the GPU waited for others."""
        if self.has_ended:
            raise AttemptEndedError("the attempt has ended")

    def _drain(self) -> None:
        runtime, limit_s = self.module.cuda.runtime, tuning.current.lost_gpu_s
        began_s, ended_s = time.monotonic(), inf
        while runtime.streamQuery(self.stream.ptr) == NOT_READY:
            now_s = time.monotonic()
            if self._connections.has_ended:
                ended_s = min(ended_s, now_s)
                while self.ending:
                    self.has_ended = True
                    self.ending.pop()()
                for peer in self.peers:
                    peer.check_waits()
            if now_s - ended_s > limit_s:
                raise DeviceLostError(
                    f"the GPU has waited {limit_s:g} s for a lost rank of its gang. "
                    f"Restart the worker."
                )
            time.sleep(0 if now_s - began_s < _SPIN_S else _PAUSE_S)
        self.stream.synchronize()  # raises errors of the stream's work

    def keep_up(self, step: int) -> None:
        if step - self._step >= self._steps_ahead or step < self._step:
            self._step, began_s = step, time.monotonic()
            self.wait()
            max_steps = self._steps_ahead * _SECONDS_AHEAD / max(time.monotonic() - began_s, 1e-9)
            self._steps_ahead = int(min(max(max_steps, 1), STEPS_AHEAD))

    # --- memory

    def checksum(self, array: Array) -> int:
        self.wait()
        return checksum(array)

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.module.ndarray)

    def as_array(self, value: Any) -> Any:
        return value

    def to_host(self, value: Any) -> Any:
        if not self.holds(value):
            return value
        self.wait()
        return value.get()

    def from_host(self, array: Any, like: Any) -> Any:
        return self.module.asarray(array) if self.holds(like) and np.ndim(array) else array

    def copy_to_host(self, host_array: Any, array: Array) -> None:
        self.wait()
        if array.size:
            array.get(out=host_array)

    def copy(self, to: int, src: int, size_bytes: int, stream: Any) -> None:
        if size_bytes:
            self._memcpy(to, src, size_bytes, MEMCPY_DEFAULT, stream.ptr)

    @cached_property
    def _memcpy(self) -> Any:
        """CUDA's function, kept: its look-up takes half as long as a call."""
        return self.module.cuda.runtime.memcpyAsync

    def assign(self, into: Array, array: Array) -> None:
        if self.holds(array) and array.dtype == into.dtype:  # by a kernel that is compiled ahead
            self.backend.permute_into(into, array, range(into.ndim))
        else:
            into[...] = array

    def block(self, array: Array, dtype: DType) -> Array:
        # The block outlives the stream, and a pool keeps a stream's memory for that stream: see
        # `DeviceQueue.empty`.
        queue = self.backend.queue()
        block = queue.empty(array.shape, dtype)
        converted = array if array.dtype == dtype else array.astype(dtype)
        self.wait()
        queue.permute(block, converted, range(converted.ndim))
        queue.synchronize()
        return block

    def let_go(self, is_orderly: bool) -> None:
        exported, self.exported = self.exported, []
        if exported and not is_orderly:
            arguments = exported, [*self.peers]
            threading.Thread(target=_drop_later, args=arguments, daemon=True).start()
        else:
            _drop(exported)


class _RankStreams:
    """Streams that ranks use in turn: a memory pool keeps a stream's memory for that stream."""

    def __init__(self, make: Callable[..., Any]) -> None:  # makes a stream of the current device
        self.stream, self.copies, self.capturing = (make(non_blocking=True) for _ in range(3))
        #: For exchanges during a function: its kernels would delay those of the same priority.
        self.side = make(non_blocking=True, priority=-1)
        self.queue = DeviceQueue("cupy", leave_bandwidth=True, has_own_streams=True)


def _drop_later(exported: list[Any], readers: Sequence[PeerMemory]) -> None:
    """Drop exported memory when its readers' processes have ended, or must have closed it."""
    deadline_s = time.monotonic() + tuning.current.window_linger_s
    while time.monotonic() < deadline_s and not (readers and all(r.has_ended for r in readers)):
        time.sleep(_LOOK_S)
    _drop(exported)


def _drop(exported: list[Any]) -> None:
    if exported:
        with device_work():
            exported.clear()


# Slabs of fields in host memory, for steps that go through a GPU.


class SlabGpu(_Gpu):
    """A GPU whose current stream does all work."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        array: Array = self.module.empty(tuple(shape), dtype)
        return array

    def checksum(self, array: Array) -> int:
        self.module.cuda.get_current_stream().synchronize()
        return super().checksum(array)

    def to_host(self, value: Any) -> Any:
        return value.get()

    def assign(self, into: Array, array: Array) -> None:
        into[...] = array


class SlabSlots:
    """Slots of a GPU for slabs in turn, and its three streams.

    A *staged* part goes in and out through a slot of pinned host memory, which threads fill before
    "up", and empty before they fill it for a later part.
    """

    def __init__(
        self,
        slot_bytes: int,
        count: int,
        warn: Callable[..., None],
        is_timed: bool = False,  # whether events measure how long actions take
        is_staged: bool = False,
    ) -> None:
        self.count, self._is_timed, self._is_staged = count, is_timed, is_staged
        self._streams = HostStreams(warn)
        self._ring = Ring(self._streams, count, slot_bytes, slot_bytes)
        self._results = defaultdict[int, list[tuple[Array, Array]]](list)  # by part, to be emptied
        with self._streams.streams["up"]:
            for slot in self._ring.slots:
                slot.memory[...] = 0  # rows are copied whole, with halos that no step fills
        self._streams.synchronize()
        self.array = self._ring.on_device
        self._events: dict[str, list[tuple[Any, Any]]] = defaultdict(list)  # by name of action

    @contextmanager
    def action(self, name: str, part: int, after: Sequence[tuple[str, int]]) -> Iterator[None]:
        """Return a context that queues an action of a part, after these actions of parts."""
        with self._ring.queue_action(name, part, after) as stream, stream:
            if not self._is_timed:
                yield
                return
            start, stop = (self._streams.cupy.cuda.Event() for _ in range(2))
            start.record(stream)
            yield
            stop.record(stream)
            self._events[name].append((start, stop))

    def copy_in(self, part: int, to: Array, rows: Array) -> None:
        source = rows
        if self._is_staged:
            self._empty(part - self.count)
            source = self._staged(part, to, rows)
            copy_on_host(source, rows)
        self._streams.copy_up(to, source)

    def copy_out(self, part: int, rows: Array, array: Array) -> None:
        to = rows
        if self._is_staged:
            to = self._staged(part, array, rows)
            self._results[part].append((rows, to))
        self._streams.copy_down(to, array)

    def _staged(self, part: int, array: Array, like: Array) -> Array:
        slot = self._ring.slots[part % self.count].memory
        return self._ring.on_host(part, array.data.ptr - slot.data.ptr, like)

    def _empty(self, part: int) -> None:
        for rows, staged_rows in self._results.pop(part, ()):
            self._ring.wait("down", part)
            copy_on_host(rows, staged_rows)

    def wait(self) -> None:
        """Wait until no copy uses the fields' memory."""
        self._streams.synchronize()
        for part in [*self._results]:
            self._empty(part)

    def action_s(self, name: str) -> float:
        """Return the median time of the actions with this name in the first visit; 0: too few."""
        elapsed_ms = self._streams.cupy.cuda.get_elapsed_time
        # The first slab may compile kernels, and the last one is thinner.
        times_ms = [elapsed_ms(*pair) for pair in self._events[name][1:-1]]
        return median(times_ms) / 1e3 if times_ms else 0.0
