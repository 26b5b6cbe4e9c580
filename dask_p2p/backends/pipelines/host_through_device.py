"""The queue of NumPy blocks that a GPU permutes: copy up, kernel, copy down.

::

    host      [fill 0][fill 1][fill 2]       [empty 0][fill 3] ...
    up                [part 0][part 1][part 2]                [part 3]
    run                       [part 0][part 1][part 2]
    down                              [part 0][part 1][part 2]

Regions are divided into parts, which go through slots of memory on both sides. A slot is used again
when its part is in the output. If a region or the output lies in pinned memory, copies begin or end
there, and the host does not fill or empty slots. A new queue imports CuPy.

The slots are those of `part_streams`. The order of the steps is another one: regions arrive one by
one, and the host copies each region before it returns, so that the region's memory can be reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.base import SLOTS, Backend, transposed
from dask_p2p.backends.host.copies import copy_on_host
from dask_p2p.backends.host.hardware import on_gpu
from dask_p2p.backends.host.pinned import is_pinned
from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.backends.pipelines.host_streams import HostStreams, pitch_of
from dask_p2p.backends.pipelines.ring import Ring
from dask_p2p.geometry import box_slices, split_box, whole_box
from dask_p2p.types import Array, DType

_PART_BYTES = 2**24
_ALIGNMENT_BYTES = 512  # alignment of arrays on a GPU
_SHARE = 4  # slots take at most a quarter of the staging limit
_HALVES = 2  # halves of a slot, on either side: for the source and for the result
#: By item size: the dtype that kernels use; they do not interpret items.
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def is_for_device(where: str, nbytes: int, dtype: DType | None = None) -> bool:
    """Return true if a GPU permutes NumPy blocks of this size, and of this dtype if given.

    A GPU never permutes objects, structures, or items of a size that no number has. `where` is the
    option ``p2p.permute-numpy``: "auto", "cpu" or "gpu". "auto" depends on this process.
    """
    if dtype is not None and (dtype.hasobject or dtype.names or dtype.itemsize not in _WORDS):
        return False
    is_large = nbytes >= tuning.current.permute_on_gpu_bytes
    return where == "gpu" or (where == "auto" and is_large and on_gpu())


def part_bytes(limit_bytes: int) -> int:
    """Return the size of parts, given the limit of all staging."""
    most_bytes = limit_bytes // _SHARE // (2 * _HALVES * SLOTS)
    return max(1, min(_PART_BYTES, most_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def slots_bytes(limit_bytes: int) -> int:
    """Return the bytes of a queue's slots, in host memory and again in device memory."""
    return _HALVES * SLOTS * part_bytes(limit_bytes)


class _UnderWay(NamedTuple):
    """A part that is queued on the streams."""

    source: Any  # kept until it has been read
    target: np.ndarray[Any, Any]
    staged: np.ndarray[Any, Any] | None  # memory of the result if it is not the target
    part: int  # its number


class HostThroughDeviceQueue(HostQueue):
    """The queue of NumPy blocks that the current GPU permutes.

    Without GPU memory or pinned memory it calls `warn` with the problem, its cause and its effect.
    """

    def __init__(
        self,
        backend: Backend,  # NumPy's
        size_bytes: int,  # size of the largest part, a multiple of 512
        warn: Callable[..., None],
    ) -> None:
        from dask_p2p.backends.kernels import permute as kernels

        super().__init__(backend, pinned_output=True)
        self._kernels = kernels
        self._streams = HostStreams(warn)
        self._size_bytes, self._warn = size_bytes, warn
        self._under_way: deque[_UnderWay] = deque()  # the oldest first
        self._ring: Ring | None = None  # while parts are in transit
        self._on_host = False  # true if the CPU permutes for lack of GPU memory

    def permute(
        self, dst: Array, src: Array, axes: Sequence[int], *, concurrent: bool = False
    ) -> None:
        transposed(dst, src, axes)
        if (ring := self._taken_ring()) is None:
            super().permute(dst, src, axes)
            return
        word = _WORDS[src.dtype.itemsize]
        target, source = dst.view(word), src.view(word)
        whole = whole_box(src.shape)
        for box in split_box(whole, self._size_bytes // src.dtype.itemsize):
            target_slices = box_slices(tuple(box[axis] for axis in axes))
            self._put(ring, target[target_slices], source[box_slices(box)], axes)

    def fill(self, dst: Array, value: Any) -> None:
        super().permute(dst, np.broadcast_to(value, dst.shape), range(dst.ndim))

    def synchronize(self) -> None:
        if self._ring is None:
            return
        try:
            self._finish_all()
        finally:  # also after an error, no stream may use the memory that is given back
            self._streams.synchronize()
            self._under_way.clear()
            self._ring.give_back()
            self._ring = None

    def _taken_ring(self) -> Ring | None:
        """Return the slots, which `synchronize` gives back; None without memory of the GPU."""
        if self._ring is None and not self._on_host:
            slot_bytes = _HALVES * self._size_bytes
            try:
                self._ring = Ring(self._streams, SLOTS, slot_bytes, slot_bytes)
            except MemoryError as exc:  # from CuPy or RMM
                self._on_host = True
                cause = f"{type(exc).__name__}: {exc}"
                self._warn("its GPU is out of memory", cause, "Its CPU permutes NumPy blocks.")
        return self._ring

    def _put(
        self, ring: Ring, dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any], axes: Any
    ) -> None:
        """Queue a part on the streams, in the next slot."""
        while len(self._under_way) >= SLOTS:
            self._finish_first()
        part, streams, half = ring.parts, self._streams, self._size_bytes
        given, made = ring.on_device(part, 0, src), ring.on_device(part, half, dst)
        pitch = pitch_of(src) if is_pinned(src) else None
        if pitch is None:
            filled = ring.to_fill(part, 0, src)
            copy_on_host(filled, src)
            src = filled
        with ring.queued("up", part):
            streams.copy_up(given, src, pitch)
        with ring.queued("run", part, [("up", part)]) as stream:
            self._kernels.permute_into(made, given, axes, stream=stream)
        staged, pitch = None, pitch_of(dst) if is_pinned(dst) else None
        if pitch is None:
            staged = ring.on_host(part, half, dst)
        elif any(each.staged is not None for each in self._under_way):
            self._finish_all()  # keeps the order: a failed part may have the same target
        with ring.queued("down", part, [("run", part)]):
            streams.copy_down(dst if staged is None else staged, made, pitch)
        self._under_way.append(_UnderWay(src, dst, staged, part))

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the oldest part, which frees its slot."""
        assert self._ring is not None
        first = self._under_way.popleft()
        self._ring.wait("down", first.part)
        if first.staged is not None:
            copy_on_host(first.target, first.staged)
