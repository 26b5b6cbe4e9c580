"""Messages between ranks with the items of one superstep.

A message has a header, and then the bytes of its arrays. Both ranks compute the regions of
assembled blocks from plans, so the header does not list them. Ranks of one host read large arrays,
and all arrays of GPUs, in each other's memory: then the header has a descriptor in place of the
bytes. They also read the bytes of many small arrays there, packed, in parts. The owner keeps such
memory until the reader has acknowledged the read. A failed value is sent in place of all its
regions.
"""

from __future__ import annotations

import pickle
import struct
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from distributed.protocol.pickle import dumps

from dask_p2p import tuning
from dask_p2p.backends import memory_order
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.fusing.planning.sizes import Item, Regions, Superstep, WholeValue
from dask_p2p.fusing.running.assembling import Assembling, name_task, planned
from dask_p2p.geometry import box_shape, round_up
from dask_p2p.sections.exchange.device import Lending
from dask_p2p.sections.gang.rank import pickled_error
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType, Key

# Length of the header; address and length of the arrays' bytes if they are read, otherwise 0.
_HEADER = struct.Struct("<QQQ")


class _InMemory(NamedTuple):
    """An array in another memory than the host's."""

    number: int  # of the memory
    descriptor: bytes | None


#: The descriptor of an array; None: its bytes are in the message.
_Head: TypeAlias = bytes | _InMemory | None


class _Sent(NamedTuple):
    """An array that is sent whole."""

    dtype: DType
    shape: tuple[int, ...]  # with the axes in their order in memory
    axes: tuple[int, ...]  # by axis of the array: its number in that order
    head: _Head


class Messages:
    """The exchanges of a rank with the other ranks of its gang."""

    def __init__(self, connections: Connections, assembling: Assembling) -> None:
        self._connections = connections
        self.assembling = assembling  # the blocks that regions are part of
        #: Returns the value that is sent in place of an unsuitable one; None: its error is raised.
        self.failed_value: Callable[[Exception], FailedValue] | None = None

    def exchange(self, number: int, superstep: Superstep, values: MutableMapping[Key, Any]) -> None:
        text = text_of(number)
        memories = self.assembling.memories
        for memory in memories:
            memory.begin(superstep.sends)
        packed = {rank: Packing(self, rank) for rank in superstep.sends}
        sends = self._sends(packed, superstep, values)
        received = self._connections.begin(text, sends, dict.fromkeys(superstep.receives))
        self.assembling.begin_local(superstep, values)
        incoming = received()
        for memory in memories:
            memory.received(superstep.receives)
        read = defaultdict[Lending, list[int]](list)  # ranks by memory
        for rank, items in superstep.receives.items():
            message = _Unpacking(self, rank, incoming.pop(rank))
            message.take(items, values)
            for memory in message.read:
                read[memory].append(rank)
        for memory in memories:
            readers = [rank for rank, packing in packed.items() if memory in packing.lent]
            memory.end(text, readers, read[memory])

    def _sends(
        self, packed: Mapping[int, Packing], superstep: Superstep, values: Mapping[Key, Any]
    ) -> dict[int, bytearray]:
        items = superstep.sends
        return {rank: packing.message(items[rank], values) for rank, packing in packed.items()}


class Packing:
    """One message to a rank."""

    def __init__(self, messages: Messages, rank: int) -> None:
        self._messages, self._rank = messages, rank
        self._heads: list[Any] = []  # by array or value, in the order of items
        self._failed: dict[int, bytes] = {}  # pickled failed values, by number of the item
        self._arrays: list[Array] = []  # arrays whose bytes are sent
        #: By memory: arrays that the rank reads in place; some are copies.
        self.lent: dict[Lending, list[Array]] = {}

    def message(self, items: Sequence[Item], values: Mapping[Key, Any]) -> bytearray:
        assembling = self._messages.assembling
        for number, item in enumerate(items):
            value = values[item.key]
            if type(value) is FailedValue:
                self._failed[number] = pickle.dumps(value)
                continue
            try:
                if isinstance(item, WholeValue):
                    self._add_whole(value)
                    continue
                plan, of_sources = planned(item.block)
                shape = plan.source_shapes[item.number]
                source = assembling.source(item.block, shape, item.key, value)
            except Exception as exc:
                name_task(exc, item.received_key)
                if self._messages.failed_value is None:
                    raise
                self._failed[number] = pickle.dumps(self._messages.failed_value(exc))
                continue
            memory = assembling.memory_of(source)
            assert memory is not None, "sources are plain arrays"
            lent = self._lent(memory, source) if memory.lends_whole else None
            if lent is not None:
                self._heads.append(lent)
                continue
            add, pieces = self._sent if memory.lends_whole else self._head, of_sources[item.number]
            self._heads += [add(memory, source[src]) for src, _ in pieces.indices]
        return self._bytes()

    def _add_whole(self, value: Any) -> None:
        small = quick_form(value)
        if small is not None:
            self._heads.append(small)
            return
        memory = self._messages.assembling.memory_of(value)
        if memory is None:
            self._heads.append(dumps(value))
            return
        order = memory_order(value.strides)
        in_memory = value.transpose(order)
        axes = tuple(order.index(axis) for axis in range(value.ndim))
        head = self._head(memory, in_memory)
        self._heads.append(_Sent(value.dtype, in_memory.shape, axes, head))

    def _head(self, memory: Lending, array: Array) -> _Head:
        return self._lent(memory, array) or self._sent(memory, array)

    def _lent(self, memory: Lending, array: Array) -> _Head:
        descriptor = memory.descriptor(self._rank, array)
        if descriptor is None:
            return None
        self.lent.setdefault(memory, []).append(array)
        return self._in(memory, descriptor)

    def _sent(self, memory: Lending, array: Array) -> _Head:
        self._arrays.append(memory.backend.to_host(array))
        return self._in(memory, None)

    def _in(self, memory: Lending, descriptor: bytes | None) -> _Head:
        number = self._messages.assembling.memories.index(memory)
        return _InMemory(number, descriptor) if number else descriptor

    def _bytes(self) -> bytearray:
        heads = (self._heads, self._failed) if self._failed else self._heads
        header = pickle.dumps(heads, 5)  # without values of users: faster than `dumps`
        starts, size_bytes = [], 0
        for array in self._arrays:
            starts.append(start := aligned(size_bytes))
            size_bytes = start + array.nbytes
        start_bytes, host = aligned(_HEADER.size + len(header)), self._messages.assembling.host
        lent = host.lent_bytes(self._rank, size_bytes)
        if lent is None:
            message = bytearray(start_bytes + size_bytes)
            _HEADER.pack_into(message, 0, len(header), 0, 0)
            self._pack(memoryview(message)[start_bytes:], starts)
        else:
            message = bytearray(start_bytes)
            _HEADER.pack_into(message, 0, len(header), lent.ctypes.data, size_bytes)
            self._pack(lent.data, starts)
            self.lent.setdefault(host, []).append(lent)
        message[_HEADER.size : _HEADER.size + len(header)] = header
        return message

    def _pack(self, into: memoryview, starts: Sequence[int]) -> None:
        for start, array in zip(starts, self._arrays, strict=True):
            if array.nbytes:
                target = array_at(into, start, array.shape, array.dtype)
                NUMPY.permute_into(target, array, range(array.ndim))


class _Unpacking:
    """One message from a rank."""

    def __init__(self, messages: Messages, rank: int, message: memoryview) -> None:
        self._messages, self._rank = messages, rank
        length, address, size_bytes = _HEADER.unpack_from(message)
        heads = pickle.loads(message[_HEADER.size : _HEADER.size + length])
        heads, self._failed = heads if isinstance(heads, tuple) else (heads, {})
        self._heads: Iterator[Any] = iter(heads)
        self.read: set[Lending] = set()  # memory of the rank that was read
        if address:
            host = messages.assembling.host
            read = partial(host.read_bytes, rank, address)
            self._arrays = PackedArrays(memoryview(b""), size_bytes, read)
            self.read.add(host)
        else:
            self._arrays = PackedArrays(message[aligned(_HEADER.size + length) :])

    def take(self, items: Sequence[Item], values: MutableMapping[Key, Any]) -> None:
        for number, item in enumerate(items):
            if number in self._failed:
                key = item.received_key
                values[key] = pickle.loads(self._failed[number])
                continue
            if isinstance(item, WholeValue):
                values[item.key] = self._take_whole(next(self._heads))
                continue
            self._take_regions(item)

    def _take_regions(self, item: Regions) -> None:
        assembling, block = self._messages.assembling, item.block
        plan, of_sources = planned(block)
        pieces, axes = of_sources[item.number], plan.axes
        memory, descriptor = self._where(head := next(self._heads))
        out = assembling.begun(block, memory)
        if descriptor is not None and memory.lends_whole:
            memory.read_pieces(self._rank, descriptor, out, pieces, axes)
            self.read.add(memory)
            return
        heads = [head, *(next(self._heads) for _ in pieces[1:])]
        for region_head, (_, src, _), (_, dst) in zip(heads, pieces, pieces.indices, strict=True):
            self._take(region_head, box_shape(src), out[dst], axes)

    def _where(self, head: _Head) -> tuple[Lending, bytes | None]:
        number, descriptor = head if isinstance(head, _InMemory) else (0, head)
        return self._messages.assembling.memories[number], descriptor

    def _take_whole(self, sent: Any) -> Any:
        if isinstance(sent, bytes):
            return pickle.loads(sent)
        if not isinstance(sent, _Sent):
            return from_quick_form(sent)
        memory, _ = self._where(sent.head)
        array = memory.backend.empty(sent.shape, sent.dtype)
        self._take(sent.head, sent.shape, array, range(array.ndim))
        return array.transpose(sent.axes)

    def _take(self, head: _Head, shape: tuple[int, ...], into: Array, axes: Sequence[int]) -> None:
        memory, descriptor = self._where(head)
        if descriptor is not None:
            memory.read(self._rank, descriptor, shape, into, axes)
            self.read.add(memory)
            return
        if into.nbytes:
            memory.place(into, self._arrays.take(shape, into.dtype), axes)


def text_of(number: int) -> str:
    """Return the text of the call that exchanges the items of a superstep."""
    return f"superstep {number} of a fused graph"


# The packed arrays of a message, which its receiver takes one after the other.
#
# They are in the message, or in the memory of the sender. There the receiver reads a part of them
# at a time, so that it never holds a second copy of all.

_ALIGNMENT_BYTES = 16  # of the arrays in a message


class PackedArrays:
    """Packed arrays, in their order."""

    def __init__(
        self,
        message: memoryview,  # the bytes of the arrays, if they are in it
        size_bytes: int = 0,  # otherwise their size
        read: Callable[[int, int], memoryview] | None = None,  # reads bytes of the sender
    ) -> None:
        self._part: memoryview | None = message
        self._start, self._stop = 0, len(message) if read is None else 0  # position of the part
        self._size_bytes, self._read = size_bytes, read
        self._next = 0  # position after the arrays that are taken

    def take(self, shape: Sequence[int], dtype: DType) -> Array:
        """Return the next array, which is not empty. It is valid until the next call."""
        start = aligned(self._next)
        self._next = stop = start + prod(shape) * dtype.itemsize
        if self._read is not None and stop > self._stop:
            self._part = None  # before the next one takes memory
            least_bytes = tuning.current.packed_part_bytes
            self._start, self._stop = start, min(max(stop, start + least_bytes), self._size_bytes)
            self._part = self._read(start, self._stop - start)
        return array_at(self._part, start - self._start, shape, dtype)


def aligned(position: int) -> int:
    """Return the position of an array in a message, at or after this one."""
    return round_up(position, _ALIGNMENT_BYTES)


def array_at(memory: Any, start: int, shape: Sequence[int], dtype: DType) -> Array:
    """Return the array at a position of a message."""
    return np.frombuffer(memory, dtype, prod(shape), start).reshape(shape)


# Forms of numbers and small arrays, such as the parts of a sum, that are pickled quickly.
#
# A header of a superstep's message is one pickle of all its values. Pickles of arrays take up to 20
# us, since they contain dtypes. A pickle of text and bytes takes 1 us. Messages of `ctx.send` hold
# one value each, as bytes without a pickle: see `sections.exchange.values`.

_MOST_BYTES = 2**8
_NUMBERS = {bool, int, float, complex}
# Dtypes of native byte order without metadata: a process has one object of each.
_DTYPES: dict[str, Any] = {char: np.dtype(char) for char in "?bBhHiIlLqQefdFD"}


def quick_form(value: Any) -> Any:
    """Return a value in a form that is pickled quickly; None for other values than small ones."""
    kind = type(value)
    if kind in _NUMBERS:
        return value
    is_array = kind is np.ndarray
    if not is_array and not isinstance(value, np.generic):
        return None
    dtype = value.dtype
    is_plain = dtype.char in _DTYPES and dtype is _DTYPES[dtype.char]
    if not is_plain or value.nbytes > _MOST_BYTES:
        return None
    if not is_array:
        return (dtype.char, None, value.tobytes()) if kind is dtype.type else None
    return (dtype.char, value.shape, value.tobytes()) if value.flags.c_contiguous else None


def from_quick_form(form: Any) -> Any:
    """Return the value of a form."""
    if type(form) is not tuple:
        return form
    char, shape, data = form
    if shape is None:
        return np.frombuffer(data, _DTYPES[char])[0]
    return np.ndarray(shape, _DTYPES[char], bytearray(data))


# Values of tasks that have failed, in a gang that goes on.
#
# A task that reads such a value fails as well, on any rank and in later calls. So the messages of
# all ranks stay the same.


@dataclass(frozen=True)
class FailedValue:
    """Takes the place of a value whose task has failed."""

    error: bytes  # pickled exception

    @classmethod
    def from_exception(cls, exc: Exception, rank: int) -> FailedValue:
        if exc.__cause__ is None:  # else its notes name the rank
            exc.add_note(f"Raised on rank {rank}.")
        error, _ = pickled_error(exc, rank)
        traceback.clear_frames(exc.__traceback__)  # their arrays are not used any more
        return cls(error)
