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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from distributed.protocol.pickle import dumps

from dask_p2p.backends import order_of
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.fusing.planning.program import Item, Regions, Superstep, WholeValue
from dask_p2p.fusing.running.assembling import Assembling, in_task, planned
from dask_p2p.fusing.running.failures import FailedValue
from dask_p2p.fusing.running.packed_arrays import PackedArrays, aligned, array_at
from dask_p2p.fusing.running.quick_pickles import from_quick_form, quick_form
from dask_p2p.geometry import box_shape, whole_box
from dask_p2p.plans import Piece
from dask_p2p.sections.exchange.lending import Lending, SourcePieces
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
        """Send and receive the items of a superstep; add received whole values to `values`."""
        text = text_of(number)
        memories = self.assembling.memories
        for memory in memories:
            memory.begin(superstep.sends)
        packed = {rank: Packing(self, rank) for rank in superstep.sends}
        sends = self._sends(packed, superstep, values)
        received = self._connections.begin(text, sends, dict.fromkeys(superstep.receives))
        self.assembling.begin_local(superstep, values)
        found = received()
        for memory in memories:
            memory.received(superstep.receives)
        read = defaultdict[Lending, list[int]](list)  # ranks by memory
        for rank, items in superstep.receives.items():
            message = _Unpacking(self, rank, found.pop(rank))
            message.take(items, values)
            for memory in message.read:
                read[memory].append(rank)
        for memory in memories:
            readers = [rank for rank, each in packed.items() if memory in each.lent]
            memory.end(text, readers, read[memory])

    def _sends(
        self, packed: Mapping[int, Packing], superstep: Superstep, values: Mapping[Key, Any]
    ) -> dict[int, bytearray]:
        """Return the messages of a superstep by rank."""
        return {rank: each.message(superstep.sends[rank], values) for rank, each in packed.items()}


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
        """Return the message with some items."""
        assembling = self._messages.assembling
        for number, item in enumerate(items):
            value = values[item.key]
            if type(value) is FailedValue:
                self._failed[number] = pickle.dumps(value)
                continue
            key = item.received_key
            try:
                with in_task(key):
                    if isinstance(item, WholeValue):
                        self._add_whole(value)
                        continue
                    plan, of_sources = planned(item.block)
                    shape = plan.source_shapes[item.number]
                    source = assembling.source(item.block, shape, item.key, value)
            except Exception as exc:
                if self._messages.failed_value is None:
                    raise
                self._failed[number] = pickle.dumps(self._messages.failed_value(exc))
                continue
            pieces = of_sources[item.number]
            memory = assembling.memory_of(source)
            if memory is None:
                self._heads.append(dumps([source[of] for of, _ in pieces.indices]))
                continue
            if item.block.dtype is None:
                self._heads.append(source.dtype)
            self._add_regions(memory, source, pieces)
        return self._bytes()

    def _add_regions(self, memory: Lending, source: Array, pieces: SourcePieces) -> None:
        lent = self._lent(memory, source) if memory.lends_whole else None
        if lent is not None:
            self._heads.append(lent)
            return
        add = self._sent if memory.lends_whole else self._head
        self._heads += [add(memory, source[of]) for of, _ in pieces.indices]

    def _add_whole(self, value: Any) -> None:
        small = quick_form(value)
        if small is not None:
            self._heads.append(small)
            return
        memory = self._messages.assembling.memory_of(value)
        if memory is None:
            self._heads.append(dumps(value))
            return
        order = order_of(value.strides)
        in_memory = value.transpose(order)
        axes = tuple(order.index(axis) for axis in range(value.ndim))
        head = self._head(memory, in_memory)
        self._heads.append(_Sent(value.dtype, in_memory.shape, axes, head))

    def _head(self, memory: Lending, array: Array) -> _Head:
        """Return the head of an array: lent if the rank reads it, else its bytes are sent."""
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
        """Take the items of the message: values, and regions of the blocks that are assembled."""
        assembling = self._messages.assembling
        for number, item in enumerate(items):
            if number in self._failed:
                key = item.received_key
                values[key] = pickle.loads(self._failed[number])
                continue
            if isinstance(item, WholeValue):
                values[item.key] = self._whole(next(self._heads))
                continue
            dtype = next(self._heads) if item.block.dtype is None else item.block.dtype
            if isinstance(dtype, bytes):
                assembling.add_others(item.block, item.number, pickle.loads(dtype))
            else:
                self._take_regions(item, dtype)

    def _take_regions(self, item: Regions, dtype: DType) -> None:
        assembling, block = self._messages.assembling, item.block
        plan, of_sources = planned(block)
        pieces, axes = of_sources[item.number], plan.axes
        memory, descriptor = self._where(head := next(self._heads))
        out = assembling.begun(block, dtype, memory)
        targets: list[tuple[Array, SourcePieces]] = [(out, pieces)]
        if out.dtype != dtype or not memory.holds(out):  # of an undeclared array
            into = [memory.backend.empty(box_shape(dst), dtype) for _, _, dst in pieces]
            assembling.add_others(block, item.number, into)
            targets = [
                (each, SourcePieces([Piece(0, src, whole_box(each.shape))]))
                for each, (_, src, _) in zip(into, pieces, strict=True)
            ]
        if descriptor is not None and memory.lends_whole:
            for target, parts in targets:
                memory.read_pieces(self._rank, descriptor, target, parts, axes)
            self.read.add(memory)
            return
        heads = [head, *(next(self._heads) for _ in pieces[1:])]
        regions = [into[at] for into, parts in targets for _, at in parts.indices]
        for each, (_, src, _), region in zip(heads, pieces, regions, strict=True):
            self._take(each, box_shape(src), region, axes)

    def _where(self, head: _Head) -> tuple[Lending, bytes | None]:
        """Return the memory of an array, and its descriptor."""
        number, descriptor = head if isinstance(head, _InMemory) else (0, head)
        return self._messages.assembling.memories[number], descriptor

    def _whole(self, sent: Any) -> Any:
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
