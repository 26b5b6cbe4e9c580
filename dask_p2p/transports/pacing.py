"""How a reader asks for regions, and how much memory that takes. Pure arithmetic.

What an assembling task holds beside its inputs and its output are the parts of regions that are on
their way. It stays below `Options.staging_limit_bytes`, since parts are cut to what then fits:

====== =======================================================================================
comm   the parts in flight and the one that is put into place; with CuPy blocks they come to host
       memory, and as many as kernels read are in device memory
ucx    the same in buffers, whose sizes are powers of two
pinned the same in such buffers of the host; with CuPy blocks those that are put into place, and
       the next, are in device memory
cma    the part that is put into place, in such a buffer
ipc    the slots of the queue
====== =======================================================================================

A task that reads from some workers by ipc and from others by another transport has slots and parts
at the same time, but never parts of two of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dask_p2p.config import Options
from dask_p2p.kernels.queue import MOST_UNREAD, SLOTS
from dask_p2p.transports.buffers import buffer_bytes

__all__ = [
    "Pacing",
    "cma_pacing",
    "comm_pacing",
    "idle_bytes",
    "ipc_pacing",
    "packed_bytes",
    "pinned_pacing",
    "staging_bytes",
    "ucx_pacing",
]

_SMALLEST_SLOT_BYTES = 2**16  # below, a copy engine takes longer to start than a kernel to read
_MOST_SMALL = 16  # parts in flight, of those smaller than they might be
_MOST_CMA_BYTES = 2**30  # a system call reads 2 GiB at most
_PINNED_IN_FLIGHT = 3  # one that is packed, one that is told of, one that is asked for
# Buffers of one part each that are kept for later; of pinned so many in host and in device memory.
_IDLE_PARTS = {"ucx": 5, "cma": 2, "pinned": 5}


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a reader asks for regions."""

    part_bytes: int | None  # at most so many in one request; None: any number
    parts_in_flight: int  # requests under way while the part before them is put into place

    def for_regions(self, largest_bytes: int) -> Pacing:
        """Return the same for regions of at most so many bytes.

        If they are smaller than a part, more of them are on their way, as many as weigh no more:
        an answer takes its time, however small it is.
        """
        if not self.part_bytes or not self.parts_in_flight:
            return self
        in_flight_bytes = self.parts_in_flight * self.part_bytes
        as_many = in_flight_bytes // buffer_bytes(min(largest_bytes, self.part_bytes))
        return replace(self, parts_in_flight=max(self.parts_in_flight, min(as_many, _MOST_SMALL)))


def ipc_pacing(options: Options) -> Pacing:
    """Return parts as large as a slot of the queue; what is requested is there at once."""
    slot_bytes = _ipc_bytes(options) // SLOTS
    return Pacing(slot_bytes if slot_bytes >= _SMALLEST_SLOT_BYTES else None, parts_in_flight=0)


def ucx_pacing(options: Options, kind: str) -> Pacing:
    """Return parts of the configured size, or the largest for which there is room.

    Blocks are asked for in their turn. A holder that is asked ahead of it, by all readers at once,
    packs for each of them before the first one gets anything (four H200: 7 instead of 4 ms).
    """
    part_bytes = options.ucx_part_bytes if kind == "cupy" else options.ucx_host_part_bytes
    return _in_buffers("ucx", part_bytes, options.ucx_parts_in_flight, options, kind)


def pinned_pacing(options: Options, kind: str) -> Pacing:
    """Return parts of the configured size, or the largest for which there is room."""
    return _in_buffers("pinned", options.pinned_part_bytes, _PINNED_IN_FLIGHT, options, kind)


def _in_buffers(
    transport: str, part_bytes: int, in_flight: int, options: Options, kind: str
) -> Pacing:
    """Return parts in buffers, several of them in flight if there is room for the smallest."""
    smallest_bytes = buffer_bytes(1)
    left_bytes = _left_bytes(options, kind)
    if left_bytes // _held(transport, in_flight, kind) < smallest_bytes:
        in_flight = 0
    most_bytes = max(smallest_bytes, left_bytes // _held(transport, in_flight, kind))
    return Pacing(_buffered(part_bytes, most_bytes), in_flight)


def cma_pacing(options: Options) -> Pacing:
    """Return parts that are read one at a time: the reader's own thread does it."""
    part_bytes = min(options.cma_part_bytes, _MOST_CMA_BYTES)
    return Pacing(_buffered(part_bytes, options.staging_limit_bytes), parts_in_flight=0)


def comm_pacing(options: Options, kind: str) -> Pacing:
    """Parts are as large as is configured, or as fits."""
    in_flight = options.comm_parts_in_flight
    most_bytes = _left_bytes(options, kind) // _held("comm", in_flight, kind)
    return Pacing(max(1, min(options.comm_part_bytes, most_bytes)), in_flight)


@lru_cache(maxsize=1024)  # each task of an array asks the same, before it does anything else
def staging_bytes(
    options: Options, kind: str, largest_bytes: int, remote_bytes: int, item_bytes: int
) -> int:
    """Return what one task holds at most beyond its inputs and its output.

    Parameters
    ----------
    options, kind
        The task's.
    largest_bytes
        Of the largest region that it reads from one block.
    remote_bytes
        All that comes from other workers.
    item_bytes
        Of one element: no part is smaller.
    """
    order = options.order(kind)
    slots_bytes = 0
    if "ipc" in order and kind == "cupy":
        slots_bytes = SLOTS * min(ipc_pacing(options).part_bytes or 0, largest_bytes)
    parts_bytes = 0
    if "ucx" in order:
        pacing = ucx_pacing(options, kind).for_regions(largest_bytes)
        part_bytes = buffer_bytes(min(max(item_bytes, pacing.part_bytes or 0), largest_bytes))
        held = _held("ucx", pacing.parts_in_flight, kind)
        parts_bytes = min(held * part_bytes, 2 * remote_bytes)
    if "pinned" in order:  # small parts come together
        pacing = pinned_pacing(options, kind)
        part_bytes = buffer_bytes(min(max(item_bytes, pacing.part_bytes or 0), remote_bytes))
        held = _held("pinned", pacing.parts_in_flight, kind)
        parts_bytes = max(parts_bytes, min(held * part_bytes, 2 * remote_bytes))
    if "cma" in order and kind == "numpy":
        pacing = cma_pacing(options)
        part_bytes = buffer_bytes(min(max(item_bytes, pacing.part_bytes or 0), largest_bytes))
        parts_bytes = max(parts_bytes, min(part_bytes, 2 * remote_bytes))
    pacing = comm_pacing(options, kind)  # small parts come together
    part_bytes = min(max(item_bytes, pacing.part_bytes or 0), remote_bytes)
    held = _held("comm", pacing.parts_in_flight, kind)
    copies = 2 if kind == "cupy" else 1  # in host and in device memory
    return slots_bytes + max(parts_bytes, min(held * part_bytes, copies * remote_bytes))


def packed_bytes(options: Options, kind: str, readers: int, remote_bytes: int) -> int:
    """Return what one worker has packed at most, for so many tasks that read from it at a time.

    Parameters
    ----------
    options, kind
        Of the tasks, and of the worker.
    readers
        Tasks that may read from it at a time.
    remote_bytes
        All that they ever read from it.
    """
    copies = 2 if kind == "cupy" else 1  # ucx packs into powers of two; comm copies to the host
    part_bytes = comm_pacing(options, kind).part_bytes or 0
    each_bytes = (options.comm_parts_in_flight + 1) * part_bytes
    if "ucx" in options.order(kind):
        copies = 2
        part_bytes = buffer_bytes(ucx_pacing(options, kind).part_bytes or 0)
        each_bytes = max(each_bytes, (options.ucx_parts_in_flight + 2) * part_bytes)
    return min(options.staging_limit_bytes, readers * each_bytes, copies * remote_bytes)


def idle_bytes(transport: str, options: Options, kind: str) -> int:
    """Return what a transport keeps in buffers for later at most."""
    if transport not in _IDLE_PARTS or (transport == "cma" and kind != "numpy"):
        return 0
    if transport == "cma":
        pacing = cma_pacing(options)
    else:
        pacing = (ucx_pacing if transport == "ucx" else pinned_pacing)(options, kind)
    most_bytes = _IDLE_PARTS[transport] * buffer_bytes(pacing.part_bytes or 0)
    return min(most_bytes, options.staging_limit_bytes)


def _buffered(part_bytes: int, most_bytes: int) -> int:
    """Return a part's size, or where its buffer is larger than that, the power of two below."""
    if buffer_bytes(part_bytes) > most_bytes:
        return 1 << (most_bytes.bit_length() - 1)
    return part_bytes


def _held(transport: str, in_flight: int, kind: str) -> int:
    """Return how many parts a task holds at a time: those in flight, and those being placed."""
    if kind != "cupy":
        return in_flight + 1
    on_device = {"comm": 1, "pinned": 2}.get(transport, 0)  # beside those in host memory
    return in_flight + 1 + MOST_UNREAD + on_device


def _ipc_bytes(options: Options) -> int:
    """Return what the slots of a queue may take: at most half, since other ways must remain."""
    return min(options.ipc_staging_bytes, options.staging_limit_bytes // 2)


def _left_bytes(options: Options, kind: str) -> int:
    """Return what parts of ucx or of comm may take."""
    slots = kind == "cupy" and "ipc" in options.order(kind)
    return options.staging_limit_bytes - (_ipc_bytes(options) if slots else 0)
