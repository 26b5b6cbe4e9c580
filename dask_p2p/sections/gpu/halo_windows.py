"""Halo exchange between GPUs: through windows on one host, else by messages.

An exchange packs halos into a slot of this rank's window and records that slot's event. Then it
sends the readers an empty message. So mismatched calls are found, and the end of an attempt ends
all waits. When a peer's message has arrived, the copy stream waits for the peer's event, and copies
the packed halo. The compute stream waits for the copies. The host waits for messages alone.

Contiguous halos, such as those of slabs, are copied without a kernel, from a peer's window directly
into the local block. Kernel launches take most of the time of a small exchange.

Slots are used in turn, and two of them are enough. When an exchange packs into a slot, the halo of
two exchanges before has been read from it::

    own pack(t+2)  follows  own pull(t+1)     on the own streams
    own pull(t+1)  follows  peer's pack(t+1)  by the peer's event
    peer's pack(t+1)  follows  peer's pull(t)  on the peer's streams

This holds for two peers that read each other's windows. Other peers get messages: by UCX from GPU
memory, where the connection carries messages of that size, else through host memory.

The same holds with a device barrier in place of events and messages. The stream of t+1 passes the
barrier when the peer has packed for t+1, which the peer does after its pull of t.

An event is never recorded again before a peer's stream waits for it. The peer enqueues its wait of
t before it sends the message of t+1, and this rank has that message before it records for t+2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.host_memory import Pinned
from dask_p2p.backends.kernels.copies import find_pitch
from dask_p2p.geometry import box_shape, c_strides
from dask_p2p.sections.exchange.regions import (
    ExchangeCall,
    HaloMover,
    Packed,
    PackedLayout,
    begin_in_order,
    receive_layouts,
    send_layouts,
    text_of,
)
from dask_p2p.sections.gpu.windows import SLOTS, DeviceBarrier, OwnWindow, PeerWindow, opened
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams


class _ByteRun(NamedTuple):
    """A contiguous region of one of the arrays."""

    number: int  # of the array
    start_bytes: int  # offset in the array
    packed_bytes: int  # offset in the packed buffer
    size_bytes: int


class HaloWindows(HaloMover):
    """Exchanges halos in GPU memory. `HaloMessages` is its counterpart for host memory."""

    def __init__(
        self, gpu: GpuStreams, calls: Sequence[ExchangeCall], connections: Connections
    ) -> None:
        self._gpu, self._connections = gpu, connections
        self._text, self._order = text_of(calls), calls[0].order
        self._sends, receives = send_layouts(calls), receive_layouts(calls)
        shapes = [call.exchange.after for call in calls]
        self._sent, self._placed = (
            {rank: _runs(layout, shapes) for rank, layout in layouts.items()}
            for layouts in (self._sends, receives)
        )
        self._received = {rank: self._packed(layout) for rank, layout in receives.items()}
        self._item_bytes = sum(call.dtype.itemsize for call in calls)
        self._slots: list[dict[int, Packed]] = []  # by slot and rank; made at the first exchange
        self._window: OwnWindow | None = None
        self._windows: dict[int, PeerWindow] = {}  # by rank
        # Messages to send and to receive, by rank: packed halo, and the buffer for the message. The
        # buffer is the packed memory itself, or host memory.
        self._down: dict[int, tuple[Packed, Array]] = {}
        self._up: dict[int, tuple[Packed, Array]] = {}
        self._pulled: Any = None  # event after all copies out of windows
        self._barrier: DeviceBarrier | None = None

    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        """Return whether halos by messages take longer than the two calls for the boundary.

        In a graph, so may halos in windows, and the calls are two kernels.
        """
        now = tuning.current
        least_bytes = now.graph_overlap_bytes if in_graph else now.gpu_overlap_bytes
        senders = self._received if in_graph else self._up
        return bool(senders) and elements * self._item_bytes >= least_bytes

    def begin(self, arrays: Sequence[Array], in_background: bool) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that waits for messages and enqueues the rest."""
        if self._connections.is_alone:
            return None
        if not self._slots:
            self._open()
        slot, self.count = self.count % SLOTS, self.count + 1
        self._pack(slot, arrays)
        if self._window is not None:
            self._window.events[slot].record(self._gpu.stream)
        for packed, memory in self._down.values():
            if isinstance(memory, np.ndarray):
                self._copy(memory, packed.buffer)
        if self._down or self._up:
            self._gpu.wait()  # for these copies, and for the last ones out of message buffers
        sends: dict[int, Buffer] = dict.fromkeys(self._windows, b"")
        receives: dict[int, Buffer | None] = {rank: bytearray() for rank in self._windows}
        sends |= {rank: _buffer(memory) for rank, (_, memory) in self._down.items()}
        receives |= {rank: _buffer(memory) for rank, (_, memory) in self._up.items()}
        in_background = in_background and bool(self._down or self._up)  # else no large message
        order, text = self._order, self._text
        end = begin_in_order(self._connections, order, text, sends, receives, in_background)
        return partial(self._end, arrays, end, slot)

    def enqueue(self, arrays: Sequence[Array]) -> None:
        """Enqueue a whole exchange on the stream, without messages: only if `can_enqueue`.

        It synchronizes by a device barrier, so all ranks must make the same calls of `enqueue`
        in the same order.
        """
        slot, self.count = self.count % SLOTS, self.count + 1
        if self._barrier is None:
            return
        self._pack(slot, arrays)
        self._barrier.enqueue()
        for rank, window in self._windows.items():
            self._pull(rank, window.address(slot), arrays, self._gpu.stream)
            if self._placed[rank] is None:
                self._received[rank].unpack(arrays)

    def can_enqueue(self) -> bool:
        """Prepare for `enqueue` after the first exchange; return whether it can be used."""
        if self._barrier is None and self._window is not None:
            self._barrier = DeviceBarrier(self._gpu, self._window, [*self._windows.values()])
        return not self._down and not self._up

    def _pack(self, slot: int, arrays: Sequence[Array]) -> None:
        for rank, packed in self._slots[slot].items():
            runs = self._sent[rank]
            if runs is None:
                packed.pack(arrays)
            for run in runs or ():
                to = packed.buffer.data.ptr + run.packed_bytes
                src = arrays[run.number].data.ptr + run.start_bytes
                self._gpu.copy(to, src, run.size_bytes, self._gpu.stream)

    def _end(self, arrays: Sequence[Array], end: Callable[[], Any], slot: int) -> None:
        end()
        copies, stream = self._gpu.copies, self._gpu.stream
        if self._window is not None:
            # Own event, too: kernels that read the old halo have ended then.
            copies.wait_event(self._window.events[slot])
            with self._gpu.reading:
                self._gpu.check_goes_on()
                for rank, window in self._windows.items():
                    window.wait(copies, slot)
                    self._pull(rank, window.address(slot), arrays, copies)
                    self._connections.count(rank, self._received[rank].buffer.nbytes)
            self._pulled.record(copies)
            stream.wait_event(self._pulled)
        for packed, memory in self._up.values():
            if isinstance(memory, np.ndarray):
                self._copy(packed.buffer, memory)
        for rank, packed in self._received.items():
            if rank in self._up or self._placed[rank] is None:
                packed.unpack(arrays)

    def _pull(self, rank: int, address: int, arrays: Sequence[Array], stream: Any) -> None:
        """Copy a peer's packed halos into the local blocks, or into a buffer to unpack."""
        runs, into = self._placed[rank], self._received[rank].buffer
        if runs is None:
            self._gpu.copy(into.data.ptr, address, into.nbytes, stream)
            return
        for run in runs:
            to = arrays[run.number].data.ptr + run.start_bytes
            self._gpu.copy(to, address + run.packed_bytes, run.size_bytes, stream)

    def _copy(self, to: Any, src: Any) -> None:
        to_ptr, of_ptr = (
            array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
            for array in (to, src)
        )
        self._gpu.copy(to_ptr, of_ptr, src.nbytes, self._gpu.stream)

    def _packed(self, layout: PackedLayout) -> Packed:
        return Packed(layout, self._gpu.empty((layout.positions.size_bytes,), np.uint8))

    # --- once

    def _open(self) -> None:
        """Open peers' windows, and allocate packed memory."""
        gpu, sends = self._gpu, self._sends
        window, self._windows = opened(
            gpu,
            self._connections,
            self._text,
            sends.keys() & self._received.keys(),
            lambda near: OwnWindow(gpu, {r: sends[r].positions.size_bytes for r in near}),
            lambda rank, descriptor: PeerWindow(
                gpu, descriptor, self._received[rank].buffer.nbytes
            ),
        )
        slots: list[dict[int, Packed]] = [{} for _ in range(SLOTS)]
        if window is not None and self._windows:
            self._window = window
            self._pulled = gpu.module.cuda.Event(disable_timing=True)
            slots = [
                {rank: Packed(sends[rank], window.memory(rank, n)) for rank in self._windows}
                for n in range(SLOTS)
            ]
        for rank, layout in sends.items():
            if rank not in self._windows:
                packed = self._packed(layout)
                self._down[rank] = packed, self._message_memory(rank, packed.buffer)
        for rank in self._received.keys() - self._windows.keys():
            packed = self._received[rank]
            self._up[rank] = packed, self._message_memory(rank, packed.buffer)
        down = {rank: packed for rank, (packed, _) in self._down.items()}
        self._slots = [slot | down for slot in slots]

    def _message_memory(self, rank: int, buffer: Array) -> Array:
        if self._connections.carries(rank, buffer.nbytes):
            return buffer
        with suppress(Exception):  # no pinned memory: copies are slower then
            return np.asarray(Pinned(buffer.nbytes))[: buffer.nbytes]
        return np.empty(buffer.nbytes, np.uint8)


def _runs(layout: PackedLayout, shapes: Sequence[tuple[int, ...]]) -> list[_ByteRun] | None:
    """Return the runs of contiguous regions of arrays in C order; None if one is scattered."""
    runs = []
    of_arrays = zip(layout.boxes, layout.dtypes, shapes, layout.positions.starts, strict=True)
    for number, (boxes, dtype, shape, packed_bytes) in enumerate(of_arrays):
        strides = c_strides(shape, dtype.itemsize)
        for box in boxes:
            pitch = find_pitch(box_shape(box), strides, dtype.itemsize)
            if pitch is None or pitch.rows > 1:
                return None
            start_bytes = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
            runs.append(_ByteRun(number, start_bytes, packed_bytes, pitch.run_bytes))
            packed_bytes += pitch.run_bytes
    return runs


def _buffer(memory: Array) -> Any:
    return memory.data if isinstance(memory, np.ndarray) else memory
