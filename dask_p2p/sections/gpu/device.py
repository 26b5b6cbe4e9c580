"""A GPU with local blocks: its streams, and the exchanges between ranks."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.cupy import region_batch
from dask_p2p.backends.kernels.copies import whole_piece
from dask_p2p.config import Options
from dask_p2p.errors import InputError, TransferError
from dask_p2p.geometry import box_size, box_slices
from dask_p2p.plans import Fill, Piece
from dask_p2p.sections.exchange.device import HOST, Host, Lending, SourcePieces
from dask_p2p.sections.exchange.regions import ExchangeCall, HaloMover
from dask_p2p.sections.gpu.halo_windows import HaloWindows
from dask_p2p.sections.gpu.messages import EVENTS, READ, WRITTEN, LentArrays, MessageLender
from dask_p2p.sections.gpu.regions import GpuRegions, read_in_parts
from dask_p2p.sections.gpu.streams import GpuStreams
from dask_p2p.sections.gpu.windows import (
    DeviceBarrier,
    OwnWindow,
    PeerWindow,
    map_descriptor,
    opened,
    opened_by_all,
)
from dask_p2p.sections.wire.connections import ONE_RANK, Connections
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.cuda_ipc import ipc_part_bytes
from dask_p2p.types import Array, Kind


class Gpu(GpuStreams):
    """The GPU of a rank, with its exchanges."""

    def __init__(
        self, connections: Connections = ONE_RANK, has_windows: bool = True, part_bytes: int = 0
    ) -> None:
        super().__init__(connections, has_windows, part_bytes)
        if not connections.is_alone:
            connections.lender = MessageLender(self, connections)

    def halo_mover(self, calls: Sequence[ExchangeCall], connections: Connections) -> HaloMover:
        return HaloWindows(self, calls, connections)

    def region_mover(self, connections: Connections, reads_memory: bool) -> GpuRegions:
        return GpuRegions(self, connections, reads_memory)

    def lending(self, connections: Connections) -> Lending | None:
        return GpuLending(self, connections)


def device_for(kind: Kind, options: Options, connections: Connections = ONE_RANK) -> Host:
    """Return the device of a rank's local blocks of this kind."""
    if kind == HOST.kind:
        return HOST
    return Gpu(connections, "ipc" in options.order(kind), ipc_part_bytes(options) or 0)


# Arrays in GPU memory that ranks lend each other, any number in one exchange.
#
# `lent` has the events that order reads and writes. The next message of a reader to the holder
# acknowledges its reads. If arrays of many bytes are lent, the reader sends a message immediately.
# Both ends add up these bytes.
#
# Arrays that other ranks cannot read go through host memory.


class _Read(NamedTuple):
    """A read of pieces of another rank's array."""

    owner: int
    descriptor: bytes
    into: Array
    pieces: Sequence[Piece]
    axes: Sequence[int]


_LargeCopy: TypeAlias = tuple[Array, Array, Sequence[int]]  # target, region, and its axes


class GpuLending(LentArrays, Lending):
    """Arrays in the memory of a rank's GPU. Making it is a collective call of all ranks."""

    lends_whole = True

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        LentArrays.__init__(self, gpu)
        Lending.__init__(self, connections)
        self.backend = gpu.backend
        self._batch = region_batch()
        self._before: dict[int, int] = {}  # by reader: number of arrays of earlier exchanges
        self._owed_bytes: Counter[int] = Counter()  # by owner: bytes read and not acknowledged
        self._pending: list[_Read] = []  # reads of the present exchange
        self._large: list[_LargeCopy] = []  # of this rank's own arrays, before `flush`
        if not connections.is_alone:
            self._open()

    def _open(self) -> None:
        self._own_events, self._near = opened_by_all(
            self._gpu, self._connections, "lending of arrays", EVENTS
        )

    def holds(self, value: Any) -> bool:
        return self._gpu.holds(value)

    def copy_pieces(
        self, into: Array, array: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        self._large += self._add(into, array, pieces, axes)

    def _add(
        self, into: Array, array: Array, pieces: Sequence[Piece], axes: Sequence[int]
    ) -> list[_LargeCopy]:
        large = self._batch.copy_pieces(into, array, pieces, axes)
        return [(into[box_slices(dst)], array[box_slices(src)], axes) for _, src, dst in large]

    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        self._batch.fill(into, fills)

    def flush(self) -> None:
        self._batch.flush()
        while self._large:
            self.backend.permute_into(*self._large.pop())

    def is_lent(self, array: Array) -> bool:
        memory = array.data.mem
        return any(block.data.mem is memory for lent in self._lent.values() for block in lent)

    def begin(self, ranks: Collection[int]) -> None:
        self._pending.clear()
        for rank in ranks:
            self._owed_bytes.pop(rank, None)
        self._before = {rank: len(arrays) for rank, arrays in self._lent.items()}
        self._record(WRITTEN)

    def received(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._release(rank, self._before.get(rank, 0))

    def descriptor(self, rank: int, array: Array) -> bytes | None:
        if rank not in self._near or not array.nbytes:
            return None
        return self._lend(rank, array)

    def read(
        self, rank: int, descriptor: bytes, shape: Sequence[int], into: Array, axes: Sequence[int]
    ) -> None:
        pieces = whole_piece(tuple(shape), into.shape)
        self._pending.append(_Read(rank, descriptor, into, pieces, axes))

    def read_pieces(
        self, rank: int, descriptor: bytes, into: Array, pieces: SourcePieces, axes: Sequence[int]
    ) -> None:
        self._pending.append(_Read(rank, descriptor, into, pieces, axes))

    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        gpu = self._gpu
        if read and self._own_events is not None:
            with gpu.reading:  # until all reads are enqueued
                gpu.check_goes_on()
                for rank in read:
                    self._near[rank].wait(gpu.stream, WRITTEN)
                large = self._add_reads()
                if large:
                    self._enqueue_large(large)
                self.flush()
            self._record(READ)
        most_bytes = tuning.current.lent_bytes
        owed = [rank for rank in read if self._owed_bytes[rank] >= most_bytes]
        full_ranks = [
            rank
            for rank in readers
            if sum(array.nbytes for array in self._lent[rank]) >= most_bytes
        ]
        if owed or full_ranks:
            receives = {rank: bytearray() for rank in full_ranks}
            call = f"{text}, read by GPUs"
            self._connections.exchange(call, dict.fromkeys(owed, b""), {**receives})
        for rank in owed:
            del self._owed_bytes[rank]
        for rank in full_ranks:
            self._release(rank, len(self._lent[rank]))

    def _add_reads(self) -> list[_LargeCopy]:
        # In diagonal order: no two ranks begin with the memory of the same one.
        rank, size = self._connections.rank_and_size
        self._pending.sort(key=lambda read: (read.owner - rank) % size)
        large: list[_LargeCopy] = []
        for owner, descriptor, into, pieces, axes in self._pending:
            _, ((_, array),) = map_descriptor(self._near[owner], descriptor, into.dtype)
            self._owed_bytes[owner] += array.nbytes
            elements = sum(box_size(src) for _, src, _ in pieces)
            self._count(owner, elements * into.dtype.itemsize)
            large += self._add(into, array, pieces, axes)
        return large

    def _count(self, rank: int, size_bytes: int) -> None:
        self._connections.count(rank, size_bytes)

    def _enqueue_large(self, reads: Sequence[_LargeCopy]) -> None:
        queue, (large, self._large) = self._gpu.queue, (self._large, [])
        with queue.within(self._gpu.stream):
            for copy in large:
                queue.permute(*copy, concurrent=True)
            for number, (into, region, axes) in enumerate(reads, 1):
                read_in_parts(self._gpu, region, into, axes, is_last=number == len(reads))

    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        self.backend.permute_into(into, self._gpu.module.asarray(array), axes)


# Arrays that ranks lend each other in a CUDA graph.
#
# All ranks capture the same exchanges. Each exchange has a device barrier: behind it, all arrays
# that others lend are written. The graph ends with one more. Behind that one, others have read this
# rank's arrays, and the next replay may write them. So replays exchange data without messages of
# hosts.
#
# The graph has the addresses of all arrays. Lent ones stay as long as the graph.

_SLOT_BYTES = 1  # of windows that have counters alone


class GraphLending(GpuLending):
    """Arrays in the memory of a rank's GPU, while its stream is captured.

    Making it is a collective call of all ranks. `place` raises `TransferError`, since the array of
    a message is in host memory.
    """

    _barrier: DeviceBarrier | None = None  # None: one rank

    def __init__(self, gpu: GpuStreams, connections: Connections) -> None:
        self._read_bytes = Counter[int]()  # by rank, in a replay
        super().__init__(gpu, connections)

    def _open(self) -> None:
        gpu, (rank, size) = self._gpu, self._connections.rank_and_size
        window, near = opened(
            gpu,
            self._connections,
            "lending in graphs",
            {*range(size)} - {rank},
            lambda ranks: OwnWindow(gpu, dict.fromkeys(ranks, _SLOT_BYTES)),
            lambda _, descriptor: PeerWindow(gpu, descriptor, _SLOT_BYTES),
        )
        self._near = {**near}
        if window is not None and near:
            self._barrier = DeviceBarrier(gpu, window, [*near.values()])

    @property
    def is_complete(self) -> bool:
        _, size = self._connections.rank_and_size
        return len(self._near) == size - 1

    def begin(self, ranks: Collection[int]) -> None:
        self._pending.clear()

    def received(self, ranks: Collection[int]) -> None:
        pass  # no rank reads before the graph runs

    def end(self, text: str, readers: Collection[int], read: Collection[int]) -> None:
        self.put_barrier()
        for copy in self._add_reads():
            self.backend.permute_into(*copy)
        self.flush()

    def fill(self, into: Array, fills: Sequence[Fill]) -> None:
        for box, item in fills:  # as arguments of kernels: an upload would need its host memory
            into[box_slices(box)] = np.full((), item, into.dtype)[()]

    def count_reads(self) -> None:
        for rank, size_bytes in self._read_bytes.items():
            self._connections.count(rank, size_bytes)

    def _count(self, rank: int, size_bytes: int) -> None:
        self._read_bytes[rank] += size_bytes

    def put_barrier(self) -> None:
        """Enqueue a device barrier of all ranks: they have done all that they enqueued before."""
        if self._barrier is not None:
            self._barrier.enqueue()

    def place(self, into: Array, array: Any, axes: Sequence[int]) -> None:
        raise TransferError("expected arrays of GPU memory alone in a CUDA graph")


# Memory pools for graphs, by device. They are never dropped: memory of a function that raised is
# freed later, and CuPy crashes if the garbage collector finds a pool and its memory together.
_pools: defaultdict[int, list[Any]] = defaultdict(list)
_lock = threading.Lock()

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NAME_BYTES = 32  # size of a GPU's name


def can_wait_for_peers() -> bool:
    """Return whether the work of a stream may wait for a peer, and other streams go on.

    With one connection all streams of a process share a queue. Two gangs then wait in a circle: in
    the queue of each GPU the work of one gang waits, and that of the other one is behind it.
    """
    return os.environ.get(_CONNECTIONS) != "1"


def own_gpu() -> bytes:
    """Return the name of this rank's GPU, for `share_gpus`: as many bytes on each rank."""
    return cuda_ipc.gpu_uuid().encode().ljust(_NAME_BYTES)


def share_gpus(names: Sequence[bytes]) -> bool:
    """Return whether ranks share a GPU, from the name of each rank's GPU.

    Ranks that wait on the same GPU for each other take turns: a time slice each.
    """
    return len({*names}) < len(names)


def captured(gpu: GpuStreams, work: Callable[[], None]) -> Callable[[], None]:
    """Capture all that `work` enqueues; return a function that launches it as one graph.

    The work is not executed now. The graph holds the addresses of the current arrays, and memory
    that `work` allocates stays until the section ends. Raises `InputError` if the work cannot be
    captured.
    """
    cuda, stream = gpu.module.cuda, gpu.stream
    pools = _pools[cuda.runtime.getDevice()]
    with _lock:
        pool = pools.pop() if pools else cuda.MemoryPool()
    gpu.closing.append(partial(pools.append, pool))
    gpu.closing.append(pool.free_all_blocks)  # called first, from the end of the list
    try:
        with cuda.using_allocator(pool.malloc), gpu.capturing() as capturing:
            capturing.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(cuda.runtime.CUDARuntimeError):
                    capturing.end_capture()
                raise
            graph = capturing.end_capture()
    except MemoryError:
        pool.free_all_blocks()
        raise
    except RuntimeError as exc:  # from CUDA, or from CuPy, which refuses some calls itself
        pool.free_all_blocks()
        if not isinstance(exc, cuda.runtime.CUDARuntimeError) and "captur" not in str(exc):
            raise
        raise InputError(
            f"capture: expected a function that only enqueues work on the current stream, got one "
            f"that ended the capture: {exc}. Leave out capture=True, or remove all calls that wait "
            f"for the GPU or read from it."
        ) from exc
    return partial(graph.launch, stream)
