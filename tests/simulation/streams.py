"""A CuPy that does nothing late, but knows what could be: streams, events and memory, recorded.

Each stream and the host have a clock of all of them (Lamport; Fidge, Mattern). An access of memory
is ordered after another one if its clock has seen that. So one run finds every read that may come
before its write, every write that may come before a read, and memory that is given back while a
stream may still use it, in whatever order a GPU would have done it.

Several threads may use it. The host is one timeline for all: what one of them has waited for all
others know to be done.
"""

import ctypes
import sys
import threading
import time
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np

import dask_p2p.backends
from dask_p2p.backends import device
from dask_p2p.backends import host_memory as pinned
from dask_p2p.backends import pipelines as part_streams
from dask_p2p.backends.device_queue import DeviceQueue, SlotCache
from dask_p2p.backends.pipelines import HostStreams
from tests.simulation.gpu import OneDevice

HOST = "host"
_MEMORY_BYTES = 2**22
_ALIGNMENT_BYTES = 512
_WORD_BYTES = 8
_DEVICES = weakref.WeakValueDictionary()  # by id


class RaceError(AssertionError):
    """Two accesses of the same memory, of which at least one is a write, in no order."""


def of_thread(name):
    """A property of the current thread, which is None until it is set."""
    return property(
        lambda recorder: getattr(recorder._per_thread, name, None),
        lambda recorder, value: setattr(recorder._per_thread, name, value),
    )


def _device(number):
    return _DEVICES[number]


class Recorder:
    """The device: its memory, its streams, and all accesses so far."""

    def __init__(self):
        self.clocks = defaultdict(lambda: defaultdict(int))  # by timeline
        self.barrier_timeout_s = 60.0
        self.memory = np.zeros(_MEMORY_BYTES, "u1")
        self.base = address_of(self.memory)
        self.used_bytes = 0
        self.idle = defaultdict(list)  # memory that came back, by stream and size
        self.accesses = defaultdict(tuple)  # of (work, timeline, tick, is_write), by word
        self.streams, self.events = {}, {}
        self._numbers = iter(range(1, 2**62))  # which can be pickled
        self.lock = threading.RLock()
        self._null, self._per_thread = self.stream("null"), threading.local()
        self.pinned = {}  # sizes by address, of the host
        self.can_pin = True
        self.live_bytes = self.most_bytes = 0
        self.limit_bytes = _MEMORY_BYTES
        self.pageable_copies = 0
        self.barriers = {}  # clocks by the address of a counter, and its value
        self.cupy = _cupy(self)

    def __reduce__(self):
        """Copies of functions have the same device."""
        _DEVICES[id(self)] = self
        return _device, (id(self),)

    @property
    def current(self):
        """The streams that this thread has made current, the last of them is."""
        if not hasattr(self._per_thread, "current"):
            self._per_thread.current = [self._null]
        return self._per_thread.current

    #: The `Capture` of a stream that this thread has begun; None if there is none.
    capture = of_thread("capture")
    #: That of a graph's operation, during its launch; None: that of the current stream.
    timeline = of_thread("timeline")
    #: Where this thread's allocations stay; None if they go when they are dropped.
    pool = of_thread("pool")

    # --- clocks ---

    def stream(self, name=None):
        with self.lock:
            number = next(self._numbers)
            stream = self.streams[number] = Stream(self, number, name or f"stream {number}")
            return stream

    def join(self, timeline, clock):
        clock_of_timeline = self.clocks[timeline]
        for other_timeline, tick in clock.items():
            clock_of_timeline[other_timeline] = max(clock_of_timeline[other_timeline], tick)

    def run(self, timeline, work, action, reads=(), writes=()):
        """Do an operation and what it does to values, or have a graph do both later.

        A graph has addresses: it keeps no memory.
        """
        reads, writes = (
            [getattr(array, "values", array) for array in arrays] for arrays in (reads, writes)
        )

        def on(timeline):
            self.do(timeline, work, reads, writes)
            action()

        if self.capture is None:
            on(timeline)
        else:
            self.capture.add(timeline, on)

    def check_no_capture(self):
        if self.capture is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def do(self, timeline, work, reads=(), writes=()):
        """Note an operation that the host gives to a timeline now."""
        with self.lock:
            self.join(timeline, self.clocks[HOST])
            clock = self.clocks[timeline]
            clock[timeline] += 1
            for arrays, is_write in ((reads, False), (writes, True)):
                for array in arrays:
                    self.access(work, timeline, clock, addresses(array), is_write)

    def access(self, work, timeline, clock, where, is_write):
        """Note an access of these words, of which a test may know more."""
        access, followed = (work, timeline, clock[timeline], is_write), {}
        for address in where:
            earlier = self.accesses[address]
            if id(earlier) not in followed:  # most words have them in common
                self._check_order(earlier, work, timeline, clock, is_write)
                # Later accesses that are ordered after a write are after those before it, too.
                followed[id(earlier)] = earlier, (access,) if is_write else (*earlier, access)
            _, self.accesses[address] = followed[id(earlier)]

    def _check_order(self, earlier, work, timeline, clock, is_write):
        if not is_write and not any(written for *_, written in earlier):
            raise RaceError(f"{work} on {timeline} reads what nobody has written")
        for other_timeline, its_timeline, tick, written in earlier:
            if (written or is_write) and clock[its_timeline] < tick:
                raise RaceError(
                    f"{work} on {timeline} may come before {other_timeline} on {its_timeline}"
                )

    def _of_words(self, start, size_bytes):
        """What has accessed one of these words."""
        words = range(start // _WORD_BYTES, (start + size_bytes) // _WORD_BYTES)
        return {access for word in words for access in self.accesses.get(word, ())}

    # --- memory ---

    def empty(self, shape, dtype):
        """Allocate as a pool does: on the current stream, what came back to it first."""
        with self.lock:
            return self._empty(self.current[-1], shape, np.dtype(dtype))

    def _empty(self, stream, shape, dtype):
        nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        size_bytes = -(-max(1, nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self.live_bytes + size_bytes > self.limit_bytes:
            raise MemoryError(f"{size_bytes} bytes are wanted")
        self.live_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        idle = self.idle[stream, size_bytes]
        if idle:
            start = idle.pop()
        else:
            start, self.used_bytes = self.used_bytes, self.used_bytes + size_bytes
            assert self.used_bytes <= _MEMORY_BYTES
        owner = Allocation()
        give_back = self._give_back
        if self.pool is not None:
            self.pool.append(owner)
            give_back = self._give_back_to_cupy
        weakref.finalize(owner, give_back, stream, start, size_bytes).atexit = False
        values = self.memory[start : start + nbytes].view(dtype).reshape(shape)
        return Array(self, values, owner)

    def _give_back(self, stream, start, size_bytes):
        """Do so as RMM does, which ends a capture of the stream, of whatever thread that is."""
        stream.is_invalidated = True
        self._give_back_to_cupy(stream, start, size_bytes)

    def _give_back_to_cupy(self, stream, start, size_bytes):
        """What comes next on the stream of its allocation may use it; on others it must be idle."""
        with self.lock:
            self._check_idle(stream, start, size_bytes)
            self.idle[stream, size_bytes].append(start)

    def _check_idle(self, stream, start, size_bytes):
        self.live_bytes -= size_bytes
        clock = defaultdict(int, self.clocks[HOST])
        for timeline, tick in self.clocks[stream.name].items():
            clock[timeline] = max(clock[timeline], tick)
        for work, timeline, tick, _ in self._of_words(self.base + start, size_bytes):
            if clock[timeline] < tick:
                self.failed = RaceError(f"memory is given back before {work} on {timeline} is done")

    failed = None  # what a finalizer found, which may not raise

    def check(self):
        if self.failed is not None:
            raise self.failed

    def written(self, values, stream=None):
        """An array that holds these values, written by a task on a stream that is waited for."""
        array = self.empty(values.shape, values.dtype)
        if stream is None:
            self._written_by_task(array)
        else:
            self.do(stream.name, "the producer", writes=[array])
        array.values[...] = values
        return array

    def _written_by_task(self, array):
        """Write on a new stream, after the stream that gave the memory; the host waits for that."""
        with self.lock:
            task = f"task {next(self._numbers)}"
            self.join(task, self.clocks[self.current[-1].name])
            self.do(task, "the producer", writes=[array])
            self.clocks[HOST][task] = self.clocks[task][task]

    def borrowed(self, address, size_bytes, owner, device):
        """Bytes of the device, or of pinned memory, as an array that keeps their owner alive."""
        return Array(self, self.at(address, (1, size_bytes), (size_bytes, 1))[0], owner)

    def at(self, pointer, shape, strides):
        """Bytes of the device or of the host, as a copy engine reaches them."""
        if 0 <= pointer - self.base < _MEMORY_BYTES:
            return np.ndarray(shape, "u1", self.memory, pointer - self.base, strides)
        pinned = self.pinned.copy().items()
        starts = [start for start, size in pinned if 0 <= pointer - start < size]
        self.pageable_copies += not starts
        size_bytes = (shape[0] - 1) * strides[0] + shape[-1]
        raw = (ctypes.c_char * size_bytes).from_address(pointer)
        return np.ndarray(shape, "u1", raw, 0, strides)

    def pin(self, pointer, size_bytes, flags):
        if not self.can_pin:
            raise RuntimeError("cudaErrorMemoryAllocation")
        pinned = self.pinned.items()
        if any(pointer < at + size and at < pointer + size_bytes for at, size in pinned):
            raise RuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self.pinned[pointer] = size_bytes

    def unpin(self, pointer):
        size_bytes = self.pinned.pop(pointer)
        clock = self.clocks[HOST]
        for work, timeline, tick, _ in self._of_words(pointer, size_bytes):
            if clock[timeline] < tick:
                self.failed = RaceError(f"memory is unpinned before {work} on {timeline}")

    def synchronize(self):
        """As allocating memory does: wait for all streams."""
        with self.lock:
            for stream in self.streams.values():
                stream.synchronize()
        return 0

    def read(self, array):
        """Read an array on the host, as a peer may that knows it to be written."""
        self.do(HOST, "a reader", reads=[array])
        return array.values.copy()


class Allocation:
    """What all arrays of one piece of memory keep alive."""


class Array:
    """Stands for `cupy.ndarray`; its values are those that a GPU would give in the right order."""

    __module__ = "cupy"
    device = OneDevice()

    def __init__(self, recorder, values, owner):
        self.recorder, self.values, self.owner = recorder, values, owner

    def __getattr__(self, name):  # shape, strides, dtype and the like
        if name.startswith("__array"):
            raise AttributeError(name)
        return getattr(self.values, name)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getitem__(self, item):
        return Array(self.recorder, self.values[getattr(item, "values", item)], self.owner)

    def __setitem__(self, item, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        is_mask = isinstance(item, Array)
        reads = [array for array in (item, value) if isinstance(array, Array)]
        values, new_values = self.values, getattr(value, "values", value)
        where = item.values if is_mask else item

        def fill():
            values[where] = new_values

        written = self if is_mask else self[item]
        self.recorder.run(self._stream, "a kernel", fill, reads=reads, writes=[written])

    def __len__(self):
        return len(self.values)

    @property
    def _stream(self):
        return self.recorder.current[-1].name

    def view(self, dtype):
        return Array(self.recorder, self.values.view(dtype), self.owner)

    def reshape(self, *shape):
        return Array(self.recorder, self.values.reshape(*shape), self.owner)

    def transpose(self, *axes):
        return Array(self.recorder, self.values.transpose(*axes), self.owner)

    def apply(self, function, *operands):
        """A new array of what a function of NumPy makes of this one, and others."""
        arrays = [operand for operand in (self, *operands) if isinstance(operand, Array)]
        operand_values = self.values, *(getattr(operand, "values", operand) for operand in operands)
        values = np.asarray(function(*operand_values))
        new = self.recorder.empty(values.shape, values.dtype)
        result = new.values

        def fill():
            result[...] = function(*operand_values)

        self.recorder.run(self._stream, "a kernel", fill, reads=arrays, writes=[new])
        return new

    @property
    def T(self):  # noqa: N802
        return self.transpose()

    def astype(self, dtype, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return self.apply(lambda values: values.astype(dtype))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None):
        if out is None:
            return self.apply(lambda values: ufunc(*(getattr(x, "values", x) for x in inputs)))
        (target,), input_values = out, [operand.values for operand in inputs]

        def compute():
            ufunc(*input_values, out=target.values)

        self.recorder.run(self._stream, "a kernel", compute, reads=inputs, writes=[target])
        return target

    def __imul__(self, factor):
        values = self.values

        def multiply():
            values[...] *= factor

        self.recorder.run(self._stream, "a kernel", multiply, reads=[self], writes=[self])
        return self

    def __eq__(self, array):
        return self.apply(np.equal, array)

    def __and__(self, array):
        return self.apply(np.logical_and, array)

    __hash__ = None

    def __int__(self):
        return int(self.get())

    def __bool__(self):
        return bool(self.get())

    def __float__(self):
        return float(self.get())

    def __abs__(self):
        return self.apply(np.abs)

    def max(self):
        return self.apply(np.max)

    @property
    def data(self):
        return SimpleNamespace(ptr=address_of(self.values), device_id=0, mem=self.owner, array=self)

    def copy(self, order="C"):
        copy = self.recorder.empty(self.shape, self.dtype)
        self.recorder.cupy.copyto(copy, self)
        return copy

    def set(self, values, stream):
        self.recorder.do(stream.name, "an upload", writes=[self])
        self.values[...] = values

    def get(self, stream=None, out=None):
        stream = stream or self.recorder.current[-1]
        self.recorder.check_no_capture()
        self.recorder.do(stream.name, "a download", reads=[self])
        stream.synchronize()
        if out is not None:
            np.copyto(out, self.values)
        return self.values.copy() if out is None else out


class Stream:
    is_invalidated = False  # the capture that it has begun

    def __init__(self, recorder, ptr, name):
        self.recorder, self.ptr, self.name = recorder, ptr, name

    def record(self, event=None):
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def wait_event(self, event):
        capture = self.recorder.capture
        if capture is not None:
            capture.wait(self.name, event)
            return
        with self.recorder.lock:
            self.recorder.join(self.name, event.clock)

    def synchronize(self):
        with self.recorder.lock:
            self.recorder.join(HOST, self.recorder.clocks[self.name])

    def begin_capture(self):
        self.recorder.capture, self.is_invalidated = Capture(self), False

    def end_capture(self):
        capture, self.recorder.capture = self.recorder.capture, None
        return SimpleNamespace(launch=capture.launcher())

    def __enter__(self):
        self.recorder.current.append(self)
        return self

    def __exit__(self, *exc):
        self.recorder.current.pop()


class Capture:
    """The operations of a graph: those of a stream, and of streams that wait for its events.

    A launch runs them on the stream that it gets. Those of other streams get timelines of their
    own, which only the captured events order.
    """

    def __init__(self, stream):
        self.stream, self.recorder = stream, stream.recorder
        self.operations, self.counts = [], {stream.name: 0}
        self.events = {}  # by event: number of the record, its stream, and the stream's operations
        self.joined = {}  # by stream: its operations that the first stream has waited for

    def add(self, name, operation):
        if self.stream.is_invalidated:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        assert name in self.counts, f"{name} is not captured"
        self.counts[name] += 1
        self.operations.append((name, operation))

    def record(self, name, event):
        self.add(name, lambda timeline: self.recorder.do(timeline, "an event"))
        self.events[event] = len(self.operations), name, self.counts[name]

    def wait(self, name, event):
        number, stream_name, count = self.events[event]
        self.counts.setdefault(name, 0)
        self.add(name, lambda timeline: self._join(timeline, number))
        if name == self.stream.name:
            self.joined[stream_name] = count

    def _join(self, timeline, number):
        with self.recorder.lock:
            self.recorder.join(timeline, self.clocks[number])

    def launcher(self):
        """A function that launches the graph, on a stream."""
        other_streams = {name: n for name, n in self.counts.items() if name != self.stream.name}
        if other_streams != {name: self.joined.get(name) for name in other_streams}:
            raise RuntimeError("cudaErrorStreamCaptureUnjoined")
        return self.launch

    def launch(self, stream):
        recorder, self.clocks = self.recorder, {}
        for number, (name, operation) in enumerate(self.operations, 1):
            timeline = stream.name if name == self.stream.name else f"{name} in {stream.name}"
            recorder.timeline = timeline
            operation(timeline)
            with recorder.lock:
                self.clocks[number] = dict(recorder.clocks[timeline])
        recorder.timeline = None


def launches(monkeypatch):
    """A list that gets the captured stream of each graph that is launched from now on."""
    launched, original = [], Stream.end_capture

    def noted(stream):
        graph = original(stream)
        return SimpleNamespace(launch=lambda on: (launched.append(stream), graph.launch(on)))

    monkeypatch.setattr(Stream, "end_capture", noted)
    return launched


class Event:
    done = False

    def __init__(self, recorder, interprocess=False):
        self.recorder, self.clock = recorder, {}
        if interprocess:
            self.ptr = len(recorder.events) + 1
            recorder.events[self.ptr] = self

    def record(self, stream):
        if self.recorder.capture is not None:
            self.recorder.capture.record(stream.name, self)
            return
        with self.recorder.lock:
            self.recorder.do(stream.name, "an event")
            self.clock = dict(self.recorder.clocks[stream.name])

    def synchronize(self):
        with self.recorder.lock:
            self.recorder.join(HOST, self.clock)


class Pool(list):
    """Stands for `cupy.cuda.MemoryPool`: what is allocated of it stays."""

    free_all_blocks = list.clear

    def malloc(self, size_bytes):
        raise NotImplementedError


@contextmanager
def using_allocator(recorder, malloc):
    recorder.pool = malloc.__self__
    try:
        yield
    finally:
        recorder.pool = None


class BarrierKernel:
    """Stands for the kernel of `dask_p2p.sections.gpu.windows`, and orders the work of streams."""

    def __init__(self, recorder, source, name):
        assert name in source
        self.recorder = recorder

    def compile(self):
        self.recorder.check_no_capture()

    def __call__(self, grid, block, arguments):
        self.recorder.run(
            self.recorder.current[-1].name,
            "a device barrier",
            partial(self.wait_for_peers, *arguments),
        )

    def wait_for_peers(self, own_flags, peer_flags, peers):
        recorder = self.recorder
        timeline = recorder.timeline or recorder.current[-1].name
        assert len(peer_flags.values) == peers
        with recorder.lock:
            number = own_flags.values[0] + np.uint64(1)
            recorder.barriers[address_of(own_flags.values), number] = dict(
                recorder.clocks[timeline]
            )
            own_flags.values[0] = number
        until_s = time.monotonic() + recorder.barrier_timeout_s
        for address in map(int, peer_flags.values):
            their = recorder.at(address, (1, 8), (8, 1)).view(np.uint64).reshape(())
            while their < number and not own_flags.values[1]:
                assert time.monotonic() < until_s, "no peer comes to the device barrier"
                time.sleep(0)
            with recorder.lock:
                recorder.join(timeline, recorder.barriers[address, number])


def address_of(values):
    return values.__array_interface__["data"][0]


def addresses(array):
    """The words of 8 bytes in which items of an array begin."""
    values = getattr(array, "values", array)
    first = address_of(values)
    if values.flags.c_contiguous and values.size and values.itemsize <= _WORD_BYTES:
        last = first + values.nbytes - values.itemsize
        return range(first // _WORD_BYTES, last // _WORD_BYTES + 1)
    offsets = np.full((), first)
    for length, stride in zip(values.shape, values.strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(length) * stride)
    return set((offsets.ravel() // _WORD_BYTES).tolist())


def _cupy(recorder):
    """Stands for the package, as far as queues use it."""

    def memcpy2d(dst, dst_pitch, src, src_pitch, width, height, kind, stream):
        to = recorder.at(dst, (height, width), (dst_pitch, 1))
        source = recorder.at(src, (height, width), (src_pitch, 1))
        work, copy = "a copy engine", partial(np.copyto, to, source)
        recorder.run(recorder.streams[stream].name, work, copy, reads=[source], writes=[to])

    def memcpy(dst, src, size_bytes, kind, stream):
        memcpy2d(dst, size_bytes, src, size_bytes, size_bytes, 1, kind, stream)

    def memset(pointer, value, size_bytes, stream):
        recorder.at(pointer, (1, size_bytes), (size_bytes, 1))[...] = value

    def make_stream(non_blocking=True, priority=0):
        return recorder.stream()

    make_stream.null = recorder.current[0]
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        malloc=lambda size_bytes: recorder.synchronize(),
        deviceSynchronize=lambda: recorder.synchronize(),
        free=lambda address: None,
        hostRegister=lambda *args: recorder.pin(*args),
        hostUnregister=lambda pointer: recorder.unpin(pointer),
        memcpyAsync=memcpy,
        memsetAsync=memset,
        streamIsCapturing=lambda stream: False,
        streamQuery=lambda stream: 0,
        memGetInfo=lambda: (recorder.limit_bytes - recorder.live_bytes, recorder.limit_bytes),
        ipcGetEventHandle=lambda event: event.to_bytes(8, "little"),
        ipcOpenEventHandle=lambda handle: int.from_bytes(handle, "little"),
        eventDestroy=lambda event: None,
        eventRecord=lambda event, stream: recorder.events[event].record(recorder.streams[stream]),
        streamWaitEvent=lambda stream, event: recorder.streams[stream].wait_event(
            recorder.events[event]
        ),
        ipcOpenMemHandle=lambda handle: int.from_bytes(handle, "little"),
        ipcCloseMemHandle=lambda address: None,
        memcpy2DAsync=memcpy2d,
    )
    cuda = SimpleNamespace(
        Stream=make_stream,
        Device=lambda number: nullcontext(),
        Event=lambda disable_timing=False, interprocess=False: Event(recorder, interprocess),
        alloc=lambda size_bytes: recorder.empty((size_bytes,), "u1").data,
        UnownedMemory=lambda *args: SimpleNamespace(array=recorder.borrowed(*args)),
        MemoryPointer=lambda memory, offset_bytes: SimpleNamespace(
            array=memory.array, offset_bytes=offset_bytes
        ),
        get_current_stream=lambda: recorder.current[-1],
        get_elapsed_time=lambda start, stop: 1.0,
        MemoryPool=Pool,
        using_allocator=partial(using_allocator, recorder),
        runtime=runtime,
    )

    class AnyArray(type):
        """The type of arrays, and what makes one in memory that is there."""

        def __instancecheck__(cls, instance):
            return isinstance(instance, Array)

        def __call__(cls, shape, dtype, data, strides=None):
            if np.dtype(dtype).kind not in "biufc" or not np.dtype(dtype).isnative:
                raise TypeError(f"Unsupported dtype {dtype}")
            if strides is not None:
                memory = data.array.values, data.offset_bytes, strides
                return Array(recorder, np.ndarray(shape, dtype, *memory), data.array.owner)
            size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
            raw = data.array.values.reshape(-1)[:size]
            return Array(recorder, raw.view(dtype).reshape(shape), data.array.owner)

    class ndarray(metaclass=AnyArray):  # noqa: N801
        pass

    def broadcast_to(array, shape):
        return Array(recorder, np.broadcast_to(array.values, shape), array.owner)

    def zeros(shape, dtype):
        array = recorder.empty(shape, dtype)
        array[...] = np.zeros((), dtype)
        return array

    def asarray(values):
        if isinstance(values, Array):
            return values
        array = recorder.empty(np.shape(values), np.asarray(values).dtype)
        array.set(np.asarray(values), recorder.current[-1])
        return array

    def copyto(dst, src):
        copy = partial(np.copyto, dst.values, src.values)
        recorder.run(recorder.current[-1].name, "a kernel", copy, reads=[src], writes=[dst])

    return SimpleNamespace(
        __name__="cupy",
        cuda=cuda,
        empty=recorder.empty,
        ndarray=ndarray,
        broadcast_to=broadcast_to,
        copyto=copyto,
        RawKernel=partial(BarrierKernel, recorder),
        zeros=zeros,
        asarray=asarray,
        count_nonzero=lambda array: array.apply(np.count_nonzero),
        nan_to_num=lambda array: array.apply(np.nan_to_num),
        allclose=lambda a, b, *limits, **options: a.apply(
            lambda *arrays: np.allclose(*arrays, *limits, **options), b
        ),
        may_share_memory=lambda a, b: np.may_share_memory(a.values, b.values),
    )


def kernels(recorder):
    """Stands for `dask_p2p.backends.kernels.cuda`."""

    def permute_into(dst, src, axes, *, stream=None, low_occupancy=False):
        stream = stream or recorder.current[-1]
        into, source = dst.values, src.values.transpose(axes)
        copy = partial(np.copyto, into, source)
        recorder.run(stream.name, "a kernel", copy, reads=[src], writes=[dst])

    return SimpleNamespace(permute_into=permute_into)


def drop_host_slots():
    """Give the host's memory back that is kept for the next block."""
    HostStreams._kept_host_slots.clear()


def drop_queue_slots():
    """Give the device's memory back that queues have kept for the next one."""
    DeviceQueue._kept_slots.clear()


def emulated(monkeypatch):
    """A recorder in the place of CuPy, of its kernels, and of what host arrays go through."""
    recorder = Recorder()

    threads = recorder.cupy.cuda.Stream()

    def start_copy(to, source):
        recorder.do(threads.name, "a thread", reads=[source], writes=[to])
        to[...] = source
        return threads.record().synchronize

    def copy_on_host(to, source):
        start_copy(to, source)()

    monkeypatch.setitem(sys.modules, "cupy", recorder.cupy)
    monkeypatch.setattr(dask_p2p.backends.kernels, "cuda", kernels(recorder), raising=False)
    for where, name, value in (
        (DeviceQueue, "_per_thread", threading.local()),
        (DeviceQueue, "_kept_slots", SlotCache()),
        (HostStreams, "_streams", {}),
        (HostStreams, "_kept_slots", SlotCache()),
        (HostStreams, "_kept_host_slots", SlotCache()),
        (device, "_private", {}),
        (pinned, "_start", lambda: None),
        (pinned, "_leaving", SimpleNamespace(put=lambda item: item[0]())),  # at once
        (pinned, "_warned", set()),
        (part_streams, "start_copy", start_copy),
        (part_streams, "copy_on_host", copy_on_host),
    ):
        monkeypatch.setattr(where, name, value)
    return recorder
