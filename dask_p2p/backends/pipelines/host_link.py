"""A short measurement of the speed of copies between pinned host memory and a GPU.

Functions import CuPy; the import of this module does not.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_p2p import tuning
from dask_p2p.backends.base import HostLink
from dask_p2p.backends.host.pinned import is_pinned
from dask_p2p.backends.pipelines.host_streams import HostStreams
from dask_p2p.backends.pipelines.slots import Slot


def measured_host_link(warn: Callable[..., None]) -> HostLink | None:
    """Measure the link of the current GPU.

    If no memory can be pinned, call `warn` with the reason and return None. The call blocks: make
    it from a thread, in `device_work`.
    """
    half, copies = tuning.current.link_copy_bytes, tuning.current.link_copies
    whole = 2 * half
    streams = HostStreams(warn)
    slots = streams.device_slots(1, whole)
    host_slots = streams.host_slots(1, whole)
    memory, host = slots[0], host_slots[0]
    try:
        if not is_pinned(host.memory):
            return None
        streams.copy_up(memory.memory[:whole], host.memory[:whole])
        streams.synchronize()
        up_s, down_s, both_s = (
            min(_seconds(streams, memory, host, directions) for _ in range(copies))
            for directions in (("up",), ("down",), ("up", "down"))
        )
        return HostLink(*(n * half / s / 1e9 for n, s in ((1, up_s), (1, down_s), (2, both_s))))
    finally:
        streams.synchronize()
        streams.keep(slots, host_slots)


def _seconds(of: HostStreams, memory: Slot, host: Slot, directions: tuple[str, ...]) -> float:
    """Return the seconds of copies that start together, until the end of the last one."""
    half = tuning.current.link_copy_bytes
    cuda = of.cupy.cuda
    first, *others = (of.streams[direction] for direction in directions)
    start, stop = cuda.Event(), cuda.Event()
    start.record(first)
    for stream in others:
        stream.wait_event(start)
    if "up" in directions:
        of.copy_up(memory.memory[:half], host.memory[:half])
    if "down" in directions:
        of.copy_down(host.memory[half : 2 * half], memory.memory[half : 2 * half])
    for stream in others:
        first.wait_event(stream.record())
    stop.record(first)
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3
