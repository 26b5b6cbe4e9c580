"""Arrays of one kind of memory that ranks lend each other, any number in one exchange.

A rank that lends an array sends its descriptor. It does not change the array while `is_lent`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import Backend
from dask_p2p.backends.host import KeptResults
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.geometry import Slices, box_slices
from dask_p2p.plans import Fill, Piece
from dask_p2p.sections.exchange.regions import Reads
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.types import Array, DType

#: The items of fills, and the indices of their regions.
_Filled: TypeAlias = Sequence[tuple[Slices, Array]]


class SourcePieces(tuple[Piece, ...]):
    """The pieces of one source of a block. Later exchanges use them again."""

    @cached_property
    def indices(self) -> Sequence[tuple[Slices, Slices]]:
        """The index of each piece in the source, and in the block."""
        return [(box_slices(src), box_slices(dst)) for _, src, dst in self]


class Lending(ABC):
    """The arrays of a rank, and its reads of other ranks' arrays.

    An exchange consists of `begin`, descriptors in messages to other ranks, `received` when their
    messages are here, reads of the arrays that others have described, and `end`.
    """

    backend: Backend  # of the arrays
    #: Whether arrays are lent as a whole, since others read any regions of them.
    lends_whole: ClassVar[bool] = False

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Return whether a value is a plain array in this memory, without Python objects."""

    @abstractmethod
    def copy_pieces(
        self, into: Array, array: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        """Copy pieces of an array with its axes permuted, before `flush` returns."""

    @abstractmethod
    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        """Set regions of an array, before `flush` returns."""

    @abstractmethod
    def flush(self) -> None:
        """Do all copies, or enqueue them on the rank's stream."""

    @abstractmethod
    def is_lent(self, array: Array) -> bool:
        """Return whether other ranks may still be reading the memory of an array."""

    @abstractmethod
    def begin(self, ranks: Collection[int]) -> None:
        """Begin an exchange of arrays that are made by now, with messages to these ranks."""

    @abstractmethod
    def received(self, ranks: Collection[int]) -> None:
        """Take note of messages from ranks: they have read all that earlier exchanges lent them."""

    @abstractmethod
    def descriptor(self, rank: int, array: Array) -> bytes | None:
        """Return the descriptor of an array for a rank; None if its bytes have to be sent."""

    @abstractmethod
    def read(
        self, rank: int, descriptor: bytes, shape: Sequence[int], into: Array, axes: Sequence[int]
    ) -> None:
        """Read an array of another rank into memory here, with its axes permuted."""

    def read_pieces(
        self, rank: int, descriptor: bytes, into: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        """Read pieces of an array of another rank, before `end` returns: if `lends_whole`."""
        raise NotImplementedError

    def lent_bytes(self, rank: int, size_bytes: int) -> Array | None:
        """Return memory for packed arrays, which a rank reads; None: they are sent."""
        return None

    def read_bytes(self, rank: int, address: int, start: int, size_bytes: int) -> memoryview:
        """Return bytes of packed arrays from the memory of another rank, at a position."""
        raise NotImplementedError

    @abstractmethod
    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        """End an exchange: all reads are done, or enqueued on the rank's stream.

        `readers` are the ranks with descriptors of this one, `read` those whose arrays it has read.
        """

    @abstractmethod
    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        """Put an array of host memory, from a message, into memory here, with its axes permuted."""


class HostLending(Lending):
    """Arrays in host memory."""

    backend = NUMPY

    def __init__(
        self,
        connections: Connections = ONE_RANK,
        reads: Reads | None = None,  # of other ranks' memory; None: all arrays are sent
    ) -> None:
        self._connections, self._reads = connections, reads
        self._fills = KeptResults[_Filled]()

    def holds(self, value: Any) -> bool:
        return type(value) is np.ndarray and not value.dtype.hasobject

    def copy_pieces(
        self, into: Array, array: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        for of, at in pieces.indices:
            NUMPY.permute_into(into[at], array[of], axes)

    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        dtype = into.dtype
        for index, item in self._fills.of(fills, dtype, lambda: _filled(fills, dtype)):
            into[index] = item

    def flush(self) -> None:
        pass

    def is_lent(self, array: Array) -> bool:
        return False  # `end` has waited

    def begin(self, ranks: Collection[int]) -> None:
        pass

    def received(self, ranks: Collection[int]) -> None:
        pass

    def lent_bytes(self, rank: int, size_bytes: int) -> Array | None:
        if (
            self._reads is None
            or size_bytes < tuning.current.read_bytes
            or not self._reads.is_read_by(rank)
        ):
            return None
        memory: Array = NUMPY.allocate(size_bytes)
        return memory

    def read_bytes(self, rank: int, address: int, start: int, size_bytes: int) -> memoryview:
        assert self._reads is not None, "addresses are only sent to ranks that read memory"
        memory = NUMPY.allocate(size_bytes)
        self._reads.read_bytes(rank, address + start, memory)
        self._connections.count(rank, size_bytes)
        return memoryview(memory)

    def descriptor(self, rank: int, array: Array) -> bytes | None:
        if self._reads is None or array.nbytes < tuning.current.lent_read_bytes:
            return None
        descriptor = self._reads.descriptor_for(rank, array)
        return descriptor if descriptor is not None and any(descriptor) else None

    def read(
        self, rank: int, descriptor: bytes, shape: Sequence[int], into: Array, axes: Sequence[int]
    ) -> None:
        assert self._reads is not None, "descriptors are only sent to ranks that read memory"
        region = self._reads.read(rank, descriptor, shape, into, axes, NUMPY.allocate)
        self._connections.count(rank, into.nbytes)
        if region is not None:
            NUMPY.permute_into(into, region, axes)

    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        if readers or read:
            receives = {rank: bytearray() for rank in readers}
            self._connections.exchange(f"{text}, read", dict.fromkeys(read, b""), {**receives})

    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        NUMPY.permute_into(into, array, axes)


def _filled(fills: Sequence[Fill], dtype: DType) -> _Filled:
    return [(box_slices(box), np.full((), item, dtype)) for box, item in fills]


HOST_ARRAYS = HostLending()  # of a rank alone
