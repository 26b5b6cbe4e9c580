"""Messages between ranks with the items of one superstep.

A message has a header, and then the bytes of its arrays. Both ranks compute the regions of
assembled blocks from plans, so the header does not list them. Ranks of one host read large arrays
in each other's memory: then the header has a descriptor in place of the bytes. The owner keeps such
an array until the reader has acknowledged the read. A failed value is sent
in place of all its regions.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from distributed.protocol.pickle import dumps

from dask_p2p.backends import order_of
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.fusing.assembling import Assembling, in_task, is_plain, pieces_of
from dask_p2p.fusing.failures import FailedValue
from dask_p2p.fusing.program import Item, Superstep, WholeValue
from dask_p2p.geometry import box_shape, box_slices, round_up
from dask_p2p.sections.exchange.regions import LEAST_BYTES, Reads
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType, Key

_HEADER = struct.Struct("<Q")  # length of the header
_ALIGNMENT_BYTES = 16  # of the arrays in a message


class _Sent(NamedTuple):
    """An array that is sent whole."""

    dtype: DType
    shape: tuple[int, ...]  # with the axes in their order in memory
    axes: tuple[int, ...]  # by axis of the array: its number in that order
    descriptor: bytes | None  # None: its bytes are in the message


class Messages:
    """The exchanges of a rank with the other ranks of its gang."""

    def __init__(
        self,
        connections: Connections,
        reads: Reads | None,  # of other ranks' memory; None: all arrays are sent
        assembling: Assembling,
    ) -> None:
        self._connections, self._reads, self._assembling = connections, reads, assembling
        #: Returns the value that is sent in place of an unsuitable one; None: its error is raised.
        self.failed_value: Callable[[Exception], FailedValue] | None = None

    def exchange(self, number: int, superstep: Superstep, values: MutableMapping[Key, Any]) -> None:
        """Send and receive the items of a superstep; add received whole values to `values`."""
        text = f"superstep {number} of a fused graph"
        packed = {rank: _Packing(self, rank) for rank in superstep.sends}
        sends = {rank: each.message(superstep.sends[rank], values) for rank, each in packed.items()}
        found = self._connections.exchange(text, sends, dict.fromkeys(superstep.receives))
        unpacked = {rank: _Unpacking(self, rank, found[rank]) for rank in superstep.receives}
        for rank, message in unpacked.items():
            message.take(superstep.receives[rank], values)
        read = {rank: b"" for rank, message in unpacked.items() if message.has_read}
        readers = {rank: bytearray() for rank, each in packed.items() if each.lent}
        if readers or read:  # arrays that other ranks read stay until then
            self._connections.exchange(f"{text}, read", read, {**readers})

    def descriptor_for(self, rank: int, array: Array) -> bytes | None:
        """Return the descriptor of an array that a rank reads in place; None: send its bytes."""
        if self._reads is None or array.nbytes < LEAST_BYTES:
            return None
        descriptor = self._reads.descriptor_for(rank, array)
        return descriptor if descriptor is not None and any(descriptor) else None

    def read(
        self, rank: int, descriptor: bytes, shape: Sequence[int], into: Array, axes: Sequence[int]
    ) -> None:
        """Read an array of another rank into memory here, with its axes permuted."""
        assert self._reads is not None, "descriptors are only sent to ranks that read memory"
        region = self._reads.read(rank, descriptor, shape, into, axes, _allocated)
        self._connections.count(rank, into.nbytes)
        if region is not None:
            NUMPY.permute_into(into, region, axes)

    @property
    def assembling(self) -> Assembling:
        """The blocks that regions are part of."""
        return self._assembling


class _Packing:
    """One message to a rank."""

    def __init__(self, messages: Messages, rank: int) -> None:
        self._messages, self._rank = messages, rank
        self._heads: list[Any] = []  # by array or value, in the order of items
        self._failed: dict[int, bytes] = {}  # pickled failed values, by number of the item
        self._arrays: list[Array] = []  # arrays whose bytes are sent
        self.lent: list[Array] = []  # arrays that the rank reads in place; some are copies

    def message(self, items: Sequence[Item], values: Mapping[Key, Any]) -> bytearray:
        """Return the message with some items."""
        assembling = self._messages.assembling
        for number, item in enumerate(items):
            value = values[item.key]
            if type(value) is FailedValue:
                self._failed[number] = pickle.dumps(value)
                continue
            if isinstance(item, WholeValue):
                self._add_whole(value)
                continue
            try:
                with in_task(item.block.key):
                    source = assembling.source(item.block, item.number, item.key, value)
            except Exception as exc:
                if self._messages.failed_value is None:
                    raise
                self._failed[number] = pickle.dumps(self._messages.failed_value(exc))
                continue
            pieces = pieces_of(assembling.plan(item.block), item.number)
            if item.block.dtype is None:
                if not is_plain(source):
                    self._heads.append(dumps([source[box_slices(src)] for _, src, _ in pieces]))
                    continue
                self._heads.append(source.dtype)
            for _, src, _ in pieces:
                self._heads.append(self._descriptor(source[box_slices(src)]))
        return self._bytes()

    def _add_whole(self, value: Any) -> None:
        if type(value) is not np.ndarray or value.dtype.hasobject:
            self._heads.append(dumps(value))
            return
        order = order_of(value.strides)
        in_memory = value.transpose(order)
        axes = tuple(order.index(axis) for axis in range(value.ndim))
        descriptor = self._descriptor(in_memory)
        self._heads.append(_Sent(value.dtype, in_memory.shape, axes, descriptor))

    def _descriptor(self, array: Array) -> bytes | None:
        descriptor = self._messages.descriptor_for(self._rank, array)
        (self._arrays if descriptor is None else self.lent).append(array)
        return descriptor

    def _bytes(self) -> bytearray:
        heads = (self._heads, self._failed) if self._failed else self._heads
        header = pickle.dumps(heads, 5)  # without values of users: faster than `dumps`
        starts, size_bytes = [], _HEADER.size + len(header)
        for array in self._arrays:
            starts.append(start := _aligned(size_bytes))
            size_bytes = start + array.nbytes
        message = bytearray(size_bytes)
        _HEADER.pack_into(message, 0, len(header))
        message[_HEADER.size : _HEADER.size + len(header)] = header
        for start, array in zip(starts, self._arrays, strict=True):
            if array.nbytes:
                target = _array_at(message, start, array.shape, array.dtype)
                NUMPY.permute_into(target, array, range(array.ndim))
        return message


class _Unpacking:
    """One message from a rank."""

    def __init__(self, messages: Messages, rank: int, message: memoryview) -> None:
        self._messages, self._rank, self._message = messages, rank, message
        (length,) = _HEADER.unpack_from(message)
        self._next = _HEADER.size + length  # position after the bytes that are unpacked
        heads = pickle.loads(message[_HEADER.size : self._next])
        heads, self._failed = heads if isinstance(heads, tuple) else (heads, {})
        self._heads = iter(heads)
        self.has_read = False  # whether memory of the rank was read

    def take(self, items: Sequence[Item], values: MutableMapping[Key, Any]) -> None:
        """Take the items of the message: values, and regions of the blocks that are assembled."""
        assembling = self._messages.assembling
        for number, item in enumerate(items):
            if number in self._failed:
                key = item.key if isinstance(item, WholeValue) else item.block.key
                values[key] = pickle.loads(self._failed[number])
                continue
            if isinstance(item, WholeValue):
                values[item.key] = self._whole(next(self._heads))
                continue
            plan = assembling.plan(item.block)
            pieces = pieces_of(plan, item.number)
            dtype = next(self._heads) if item.block.dtype is None else item.block.dtype
            if isinstance(dtype, bytes):
                assembling.add_others(item.block, item.number, pickle.loads(dtype))
                continue
            out = assembling.begun(item.block, dtype)
            into = [out[box_slices(dst)] for _, _, dst in pieces]
            if out.dtype != dtype:  # of an undeclared array
                into = [NUMPY.empty(each.shape, dtype) for each in into]
                assembling.add_others(item.block, item.number, into)
            for (_, src, _), target in zip(pieces, into, strict=True):
                self._take(next(self._heads), box_shape(src), target, plan.axes)

    def _whole(self, head: Any) -> Any:
        if not isinstance(head, _Sent):
            return pickle.loads(head)
        array = NUMPY.empty(head.shape, head.dtype)
        self._take(head.descriptor, head.shape, array, range(array.ndim))
        return array.transpose(head.axes)

    def _take(
        self, descriptor: bytes | None, shape: tuple[int, ...], into: Array, axes: Sequence[int]
    ) -> None:
        if descriptor is not None:
            self._messages.read(self._rank, descriptor, shape, into, axes)
            self.has_read = True
            return
        start = _aligned(self._next)
        self._next = start + into.nbytes
        if into.nbytes:
            NUMPY.permute_into(into, _array_at(self._message, start, shape, into.dtype), axes)


def _aligned(position: int) -> int:
    return round_up(position, _ALIGNMENT_BYTES)


def _array_at(memory: Any, start: int, shape: Sequence[int], dtype: DType) -> Array:
    """Return the array at a position of a message."""
    return np.frombuffer(memory, dtype, prod(shape), start).reshape(shape)


def _allocated(size_bytes: int) -> Array:
    return np.empty(size_bytes, np.uint8)
