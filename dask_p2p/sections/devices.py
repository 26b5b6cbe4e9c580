"""Where members' shares lie: in host memory, or in that of a GPU, and what differs between these.

On a GPU a member has a stream of its own. Its function and its exchanges put work there and wait
for nothing. Whatever the host needs is copied down when the stream has come so far.

Dask-CUDA spills what a worker's store holds: outputs, and copies of inputs that others refer to.
What a member works with is in no store, so nothing of it is spilled.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import inf
from typing import Any, ClassVar

import numpy as np

from dask_p2p.backends import Backend, backend_for, backend_named, device_of
from dask_p2p.backends.checksum import checksum
from dask_p2p.backends.device import device_work, wait_until_written
from dask_p2p.backends.device_queue import DeviceQueue
from dask_p2p.backends.driver import MEMCPY_DEFAULT
from dask_p2p.config import Options
from dask_p2p.errors import DeviceLostError, InputError, UnsupportedArrayError
from dask_p2p.sections.gpu_regions import GpuRegions
from dask_p2p.sections.link import AttemptEndedError
from dask_p2p.sections.links import Links
from dask_p2p.sections.recorder import recorder_of
from dask_p2p.sections.regions import Regions
from dask_p2p.sections.rim_messages import RimCall, RimMessages
from dask_p2p.sections.rim_windows import RimWindows
from dask_p2p.sections.windows import PeerMemory
from dask_p2p.transports.in_place.ipc import IpcTransport
from dask_p2p.types import Array, DType, DTypeLike, Kind

STEPS_AHEAD = 64  # that the host is ahead of a GPU at most
# The same, of longer steps. The GPU does them also when the attempt has ended, and memory of a
# process that has died is not free before.
_SECONDS_AHEAD = 0.5
_SPIN_S = 2e-4  # that a GPU is asked without a pause
_PAUSE_S = 5e-5
# After the end of an attempt. An event of a process that is gone may never happen, and what waits
# for it on a GPU ends with this process only.
_LONGEST_S = 30.0
_LINGER_S = 60.0  # that windows stay which peers may still read, after an attempt that failed
_LOOK_S = 0.05  # between looks at the processes of these peers
_NOT_READY = 600  # of CUDA: cudaErrorNotReady


class Host:
    """The host: what is called has been done when it returns."""

    kind: ClassVar[Kind] = "numpy"
    has_ended = False  # for a device that works on while members are lost

    @property
    def backend(self) -> Backend:
        """Of the arrays."""
        return backend_named(self.kind)

    @property
    def module(self) -> Any:
        """The arrays' package."""
        return self.backend.module

    def running(self, blocks: Sequence[Array]) -> AbstractContextManager[None]:
        """Return a context for all that a member does with its blocks; at its end that is done."""
        return nullcontext()

    def zeros(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array of zeros."""
        return self.module.zeros(tuple(shape), dtype)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array whose values are not set."""
        return self.backend.empty(shape, dtype)

    has_read_only: ClassVar[bool] = True  # whether arrays can refuse to be written to

    def read_only(self, array: Array) -> Array:
        """Return a view that cannot be written to, where `has_read_only`; else the array."""
        view: Array = array.view()
        view.flags.writeable = False
        return view

    def recorder(self, out: Array) -> Any:
        """Return a view that refuses numbers of another kind; None if there is no such view."""
        return recorder_of(out)

    def checksum(self, array: Array) -> int:
        """Return the checksum of an array's bytes, once they are there."""
        return checksum(array)

    def as_array(self, value: Any) -> Any:
        """Return what users give as an array, as far as that is plain to do."""
        return np.asanyarray(value)

    def to_host(self, value: Any) -> Any:
        """Return an array of this device as one of NumPy, and anything else as it is."""
        return value

    def from_host(self, array: Any, like: Any) -> Any:
        """Return an array of NumPy as one of this device, if `like` is such, and has dimensions."""
        return array

    def copy_to_host(self, place: Any, array: Array) -> None:
        """Copy an array to where it belongs in host memory."""
        np.copyto(place, array)

    def copy_from_host(self, array: Array, place: Any) -> None:
        """Copy what is in host memory into an array."""
        np.copyto(array, place)

    def block(self, array: Array, dtype: DType) -> Array:
        """Return a copy of an array that the task hands on."""
        made: Array = np.array(array, dtype)
        return made

    def moved_rims(self, call: RimCall) -> RimMessages | RimWindows:
        """Return what brings packed rims to other members, and theirs here."""
        return RimMessages(call)

    def moved_regions(self, links: Links | None, reads_memory: bool) -> Regions | GpuRegions:
        """Return what brings regions of shares to other members, and theirs here."""
        return Regions(links, reads_memory)

    def keep_up(self, step: int) -> None:
        """Have the device do what it was given, now and then; `step` counts what was given."""

    def let_go(self, is_orderly: bool) -> None:
        """Give back what other members read: nobody does any more if the end `is_orderly`."""


HOST = Host()


class Gpu(Host):
    """A GPU: what is called has been put on the member's stream when it returns."""

    kind: ClassVar[Kind] = "cupy"
    stream: Any  # what computes
    copies: Any  # what reads the windows of others

    _idle: ClassVar[defaultdict[int, list[_Streams]]] = defaultdict(list)
    _lost: ClassVar[list[_Streams]] = []  # which wait for what does not come
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        links: Links | None,  # to other members; None if there are none
        has_windows: bool = True,  # whether members of one host may read each other's memory
        part_bytes: int = 0,  # that copy engines bring at a time of regions; 0: kernels read them
    ) -> None:
        self._links, self.has_windows, self.part_bytes = links, has_windows, part_bytes
        #: Called when all is done: closes what is others'.
        self.closing: list[Callable[[], None]] = []
        #: What others read. It goes when they have closed it.
        self.exported: list[Any] = []
        #: Called when the attempt has ended: has the GPU wait for others no more.
        self.ending: list[Callable[[], None]] = []
        #: Memory and events of others. The GPU may wait for these events.
        self.peers: list[PeerMemory] = []
        #: The GPU waits for others no more: nothing made since then is right.
        self.has_ended = False
        self._step = 0  # at which the GPU was waited for last
        self._steps_ahead = STEPS_AHEAD  # that the host may be until the next wait

    @contextmanager
    def running(self, blocks: Sequence[Array]) -> Iterator[None]:
        with device_work(), device_of(*blocks):
            wait_until_written(blocks)
            device = self.module.cuda.runtime.getDevice()
            with self._lock:
                idle = self._idle[device]
                self._streams = streams = idle.pop() if idle else _Streams(self.module.cuda.Stream)
            self.stream, self.copies = streams.stream, streams.copies
            # Streams stay: what a function that raised has allocated goes later, and RMM gives
            # memory back on the stream that it was taken on.
            kept = self._lost
            with self.stream:
                try:
                    yield
                finally:
                    try:
                        self._drain()  # also for all others, since the stream waits for these
                        streams.queue.synchronize()
                        kept = self._idle[device]
                    finally:
                        with self._lock:
                            kept.append(streams)
                    while self.closing:
                        self.closing.pop()()

    @contextmanager
    def capturing(self) -> Iterator[Any]:
        """Return a context in which work goes to a stream that can be captured, which it yields.

        That has no memory of its own: RMM ends the capture of a stream as soon as any thread gives
        memory back that was allocated on it, and the garbage collector may do so at any time.
        """
        own, self.stream = self.stream, self._streams.capturing
        try:
            with self.stream:
                yield self.stream
        finally:
            self.stream = own

    @property
    def queue(self) -> DeviceQueue:
        """What reads regions of others, and permutes: always `within` the stream."""
        return self._streams.queue

    def wait(self) -> None:
        """Wait until all that was put on the stream is done.

        Raises
        ------
        AttemptEndedError
            If the attempt has, and with it meetings: nothing made since then is right.
        DeviceLostError
            If it does not end though the attempt has, and nothing can end it.
        """
        self._drain()
        if self.has_ended:
            raise AttemptEndedError("the attempt has ended")

    def _drain(self) -> None:
        runtime = self.module.cuda.runtime
        began_s, ended_s = time.monotonic(), inf
        while runtime.streamQuery(self.stream.ptr) == _NOT_READY:
            now_s = time.monotonic()
            if self._links is not None and self._links.has_ended:
                ended_s = min(ended_s, now_s)
                while self.ending:
                    self.has_ended = True
                    self.ending.pop()()
                for peer in self.peers:
                    peer.check_waits()
            if now_s - ended_s > _LONGEST_S:
                raise DeviceLostError(
                    f"the GPU has waited {_LONGEST_S:g} s for a member of its gang that has gone. "
                    f"Only a new process helps."
                )
            time.sleep(0 if now_s - began_s < _SPIN_S else _PAUSE_S)
        self.stream.synchronize()  # which raises what has gone wrong

    def keep_up(self, step: int) -> None:
        if step - self._step >= self._steps_ahead or step < self._step:
            self._step, began_s = step, time.monotonic()
            self.wait()
            waited_s = time.monotonic() - began_s
            most = self._steps_ahead * _SECONDS_AHEAD / max(waited_s, 1e-9)
            self._steps_ahead = int(min(max(most, 1), STEPS_AHEAD))

    # --- memory

    has_read_only: ClassVar[bool] = False

    def read_only(self, array: Array) -> Array:
        return array

    def checksum(self, array: Array) -> int:
        self.wait()
        return checksum(array)

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, self.module.ndarray)

    def as_array(self, value: Any) -> Any:
        return value

    def to_host(self, value: Any) -> Any:
        if not self._is_own(value):
            return value
        self.wait()
        return value.get()

    def from_host(self, array: Any, like: Any) -> Any:
        return self.module.asarray(array) if self._is_own(like) and np.ndim(array) else array

    def copy_to_host(self, place: Any, array: Array) -> None:
        self.wait()
        if array.size:
            array.get(out=place)

    def copy_from_host(self, array: Array, place: Any) -> None:
        array[...] = self.module.asarray(place)

    def copy(self, to: int, of: int, size_bytes: int, stream: Any) -> None:
        """Put a copy from an address to another on a stream."""
        if size_bytes:
            self._memcpy(to, of, size_bytes, MEMCPY_DEFAULT, stream.ptr)

    @cached_property
    def _memcpy(self) -> Any:
        """The function, which takes half as long to look up as to call."""
        return self.module.cuda.runtime.memcpyAsync

    def block(self, array: Array, dtype: DType) -> Array:
        # It outlives the stream, whose memory a pool keeps for that: see `DeviceQueue.empty`.
        queue = self.backend.queue()
        made = queue.empty(array.shape, dtype)
        own = array if array.dtype == dtype else array.astype(dtype)
        self.wait()
        queue.permute(made, own, range(own.ndim))
        queue.synchronize()
        return made

    def moved_rims(self, call: RimCall) -> RimMessages | RimWindows:
        return RimWindows(self, call)

    def moved_regions(self, links: Links | None, reads_memory: bool) -> Regions | GpuRegions:
        return GpuRegions(self, links, reads_memory)

    def let_go(self, is_orderly: bool) -> None:
        exported, self.exported = self.exported, []
        if exported and not is_orderly:
            readers = [*self.peers]
            threading.Thread(target=_drop_later, args=(exported, readers), daemon=True).start()
        else:
            _drop(exported)


class _Streams:
    """What one member after the other has: a pool keeps the memory of a stream for that one."""

    def __init__(self, make: Callable[..., Any]) -> None:  # makes a stream of the current device
        self.stream, self.copies, self.capturing = (make(non_blocking=True) for _ in range(3))
        self.queue = DeviceQueue("cupy", leave_bandwidth=True, has_own_streams=True)


def _drop_later(exported: list[Any], readers: Sequence[PeerMemory]) -> None:
    """Drop it when its readers' processes have ended; when they must have closed it, at last."""
    deadline_s = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline_s:
        if readers and all(reader.has_ended for reader in readers):
            break
        time.sleep(_LOOK_S)
    _drop(exported)


def _drop(exported: list[Any]) -> None:
    if exported:
        with device_work():
            exported.clear()


def device_for(kind: Kind, options: Options, links: Links | None = None) -> Host:
    """Return where a member's shares lie that are arrays of this kind."""
    if kind == HOST.kind:
        return HOST
    part_bytes = IpcTransport.footprint(options, kind).part_bytes or 0
    return Gpu(links, "ipc" in options.order(kind), part_bytes)


def check_kind(device: Host, name: str, array: Any) -> None:
    """Refuse an array that is no plain one of a device.

    `UnsupportedArrayError` if it is of no known kind, or more than its bytes; `InputError` if it is
    of another kind.
    """
    kind = backend_for(array).name
    if kind != device.kind:
        module = device.module.__name__
        raise InputError(
            f"{name}: expected an array of {module}, as the section's are, got one of {kind}. "
            f"Convert it: {'cupy.asarray' if module == 'cupy' else 'cupy.asnumpy'}({name})."
        )


def check_not_masked(name: str, value: Any) -> None:
    """Refuse an array whose mask would be lost: `UnsupportedArrayError`."""
    if np.ma.isMaskedArray(value):
        raise UnsupportedArrayError(
            f"{name}: expected a plain array or a number, got {type(value).__name__}, whose mask "
            f"would be lost. Fill it first, np.ma.filled(...)."
        )
