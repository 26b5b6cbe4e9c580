"""Kernels of CUDA: permuted copies, copies of many small regions, and checksums.

Import this module only if CuPy is installed; `dask_p2p.backends.cupy` does so.

Launches get addresses, not arrays, so CuPy does not check them. The source of a copy may therefore
also be another GPU's memory that is mapped into this process (`cupy.ndarray` over an
`UnownedMemory`). The modules `launch` and `copies` plan the launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import resources
from math import prod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import cupy
import numpy as np

from dask_p2p.backends.base import transpose_view
from dask_p2p.backends.device import MEMCPY_DEFAULT
from dask_p2p.backends.host import IdentityCache
from dask_p2p.backends.kernels.copies import (
    MAX_REGIONS,
    THREADS,
    launch_grid,
    pack_batch,
    pack_regions,
    plan_region,
    shift_regions,
)
from dask_p2p.backends.kernels.launch import ENTRIES, WORD_SIZES_BYTES, plan_launches
from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans import Fill, Piece
from dask_p2p.types import Array

_T = TypeVar("_T")

# Unused shared memory that a block reserves for low occupancy. With it two blocks of any kernel fit
# on a multiprocessor (of an A100, H100 or H200; one on smaller GPUs), without it four or more.
# Measured between four H200s: 328 GB/s a GPU with two blocks, 313 with four, 319 with one.
LOW_OCCUPANCY_BYTES = 60 * 1024
# Least bytes of a region that has a launch of its own, which takes the host 40 us. A region with
# permuted axes needs it for tiles, and one in order for the full bandwidth of the memory.
_LARGE_BYTES, _LARGE_BYTES_IN_ORDER = 2**22, 2**24
_ALIGNMENT = 15
_MOST_LAUNCHES = 256  # that are kept, for the same copies of the same arrays


class CudaSource(Generic[_T]):
    """The kernels of a CUDA source file, loaded once on each device.

    `load` returns the kernels, from the compiled `cupy.RawModule` on the current device.
    """

    def __init__(self, file: str, load: Callable[[Any], _T], *options: str) -> None:
        self._file, self._load, self._options = file, load, ("--std=c++17", *options)
        self._loaded: dict[int, _T] = {}  # by device
        self._loading = threading.Lock()

    def on(self, device_id: int) -> _T:
        kernels = self._loaded.get(device_id)
        if kernels is None:
            with self._loading:  # other threads wait for the compilation
                kernels = self._loaded.get(device_id)
                if kernels is None:
                    source = resources.files("dask_p2p.backends.kernels").joinpath(self._file)
                    code = source.read_text("utf-8")  # CuPy keeps the binary on disk
                    module = cupy.RawModule(code=code, options=self._options)
                    kernels = self._loaded[device_id] = self._load(module)
        return kernels


def permute_into(
    dst: Array,
    src: Array,
    axes: Sequence[int],
    *,
    stream: Any | None = None,
    low_occupancy: bool = False,
) -> None:
    """Do ``dst[...] = src.transpose(axes)`` on the device of `dst`.

    See `Backend.permute_into`. The call returns when the work is queued; keep both arrays until its
    end. `low_occupancy` leaves multiprocessors room: a kernel at full speed takes all bandwidth of
    the device's memory, and nearly stops copy engines that use this memory.
    """
    view = transpose_view(dst, src, axes)
    launches = plan_launches(
        dst.data.ptr, view.data.ptr, dst.shape, dst.dtype.itemsize, dst.strides, view.strides
    )
    if not launches:
        return
    device_id = dst.data.device_id
    is_current = cupy.cuda.runtime.getDevice() == device_id
    with nullcontext() if is_current else cupy.cuda.Device(device_id):
        on_stream = cupy.cuda.get_current_stream() if stream is None else stream
        for launch in launches:
            if launch.entry == "memcpy":
                cupy.cuda.runtime.memcpyAsync(
                    launch.dst, launch.src, launch.i.extent, MEMCPY_DEFAULT, on_stream.ptr
                )
                continue
            loaded = _KERNELS[launch.word_bytes].on(device_id)[launch.entry]
            unused_bytes = loaded.unused_bytes if low_occupancy else 0
            # The stream is an argument, because making it current takes as long as a launch.
            loaded.function(
                (launch.grid,), launch.threads, (launch.pack(),), unused_bytes, stream=on_stream
            )


class _Kernel(NamedTuple):
    """A kernel on a device."""

    function: Any  # cupy.cuda.Function
    unused_bytes: int  # shared memory to reserve for low occupancy


def _load_kernels(word_bytes: int, module: Any) -> dict[str, _Kernel]:
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    kernels = {}
    for name in ENTRIES:
        if name.endswith(f"_{word_bytes}"):
            kernel = module.get_function(name)
            room_bytes = device["sharedMemPerBlockOptin"] - kernel.shared_size_bytes
            unused_bytes = max(0, min(LOW_OCCUPANCY_BYTES, room_bytes))
            kernel.max_dynamic_shared_size_bytes = unused_bytes
            kernels[name] = _Kernel(kernel.kernel, unused_bytes)
    return kernels


#: By word size: each is compiled for itself.
_KERNELS = {
    size: CudaSource("transpose.cu", partial(_load_kernels, size), f"-DONLY_WORD_BYTES={size}")
    for size in WORD_SIZES_BYTES
}


class _PlannedCopies(NamedTuple):
    """The copies of some pieces of an array, relative to the addresses of the two arrays."""

    packed: Any  # by piece the words of the struct `Region`: `pack_regions`
    words: int  # of the largest piece
    large: Sequence[Piece]  # those that are worth launches of their own


class _PendingCopies(NamedTuple):
    """Copies that are to be enqueued."""

    copies: _PlannedCopies
    dst: int  # addresses of the two arrays
    src: int
    arrays: tuple[Array, Array]  # which keep their memory


class _RegionLaunch(NamedTuple):
    grid: tuple[int, int]
    batch: Any  # the kernel's argument


#: Launches, and their copies: so that no others get the identities of these.
_CachedLaunches: TypeAlias = tuple[Sequence[_PlannedCopies], Sequence[_RegionLaunch]]


_REGIONS = CudaSource("regions.cu", lambda module: module.get_function("copy_regions").kernel)


class RegionBatch:
    """Copies of regions that are enqueued together, on the current stream.

    The arrays must not change before `flush`.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingCopies] = []
        self._copies = IdentityCache[_PlannedCopies]()  # a plan takes longer than its launch
        self._launches = IdentityCache[_CachedLaunches](_MOST_LAUNCHES)  # by copies and addresses
        self._fills = IdentityCache[list[tuple[Array, Sequence[Piece]]]]()

    def copy_pieces(
        self, dst: Array, src: Array, pieces: Sequence[Piece], axes: Sequence[int]
    ) -> Sequence[Piece]:
        """Add copies of pieces of an array; return large pieces, which are left to the caller."""
        if dst.dtype != src.dtype:
            raise BlockMismatchError(f"expected arrays of one dtype, got {src.dtype}, {dst.dtype}")
        dst_ptr, src_ptr, item_bytes = dst.data.ptr, src.data.ptr, dst.dtype.itemsize
        layout = dst.strides, src.strides, tuple(axes), item_bytes, _ALIGNMENT & (dst_ptr | src_ptr)
        copies = self._copies.get(pieces, layout, lambda: _plan_copies(pieces, *layout))
        if len(copies.packed):
            self._pending.append(_PendingCopies(copies, dst_ptr, src_ptr, (dst, src)))
        return copies.large

    def fill(self, dst: Array, fills: Sequence[Fill]) -> None:
        by_item = self._fills.get(fills, dst.dtype.str, lambda: [*_group_by_item(fills, dst.dtype)])
        for item, pieces in by_item:
            everywhere = cupy.broadcast_to(item, dst.shape)
            for _, _, box in self.copy_pieces(dst, everywhere, pieces, range(dst.ndim)):
                permute_into(dst[box_slices(box)], everywhere[box_slices(box)], range(dst.ndim))

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        key = tuple([(id(copies), dst, src) for copies, dst, src, _ in pending])
        _, launches = self._launches.get(_REGIONS, key, lambda: _plan_launches(pending))
        copy = _REGIONS.on(cupy.cuda.runtime.getDevice())
        stream = cupy.cuda.get_current_stream()
        for grid, batch in launches:
            copy(grid, (THREADS,), (batch,), 0, stream=stream)


def _plan_launches(pending: Sequence[_PendingCopies]) -> _CachedLaunches:
    shifted = (shift_regions(copies.packed, dst, src) for copies, dst, src, _ in pending)
    regions = np.concatenate([*shifted])
    words = max(copies.words for copies, *_ in pending)
    parts = [regions[n : n + MAX_REGIONS] for n in range(0, len(regions), MAX_REGIONS)]
    launches = [_RegionLaunch(launch_grid(words, len(part)), pack_batch(part)) for part in parts]
    return [copies for copies, *_ in pending], launches


def _plan_copies(
    pieces: Sequence[Piece],
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    axes: tuple[int, ...],
    item_bytes: int,
    alignment: int,
) -> _PlannedCopies:
    strides = tuple(src_strides[axis] for axis in axes)
    regions, large, max_words = [], [], 0
    is_in_order = axes == tuple(range(len(axes)))
    large_bytes = _LARGE_BYTES_IN_ORDER if is_in_order else _LARGE_BYTES
    for piece in pieces:
        _, src, dst = piece
        src_start, dst_start = (
            sum(low * stride for (low, _), stride in zip(box, box_strides, strict=True))
            for box, box_strides in ((src, src_strides), (dst, dst_strides))
        )
        shape = box_shape(dst)
        if 0 in shape:
            continue
        aligned = (alignment | src_start | dst_start) & _ALIGNMENT
        layout = None
        if prod(shape) * item_bytes < large_bytes:
            layout = plan_region(shape, item_bytes, strides, dst_strides, aligned)
        if layout is None:
            large.append(piece)
        else:
            regions.append(layout.at(dst_start, src_start))
            max_words = max(max_words, layout.words)
    return _PlannedCopies(pack_regions(regions), max_words, large)


def _group_by_item(fills: Sequence[Fill], dtype: Any) -> Iterator[tuple[Array, Sequence[Piece]]]:
    groups: dict[bytes, list[Piece]] = {}
    for box, value in fills:
        item = np.full((), value, dtype).tobytes()
        groups.setdefault(item, []).append(Piece(0, box, box))
    for item, pieces in groups.items():
        yield cupy.asarray(np.frombuffer(item, dtype).reshape(())), pieces


# A checksum is a sum modulo 2**64 over words of 8 bytes, the last one padded with zeros. Each word
# is first mixed with its position (by the finaliser of splitmix64). This map is one to one for each
# position, so the checksum finds every change within one word. One in 2**64 of all other changes
# passes. A sum of words times odd weights would be one to one as well, but two flipped signs
# anywhere would cancel each other.
_CHECKSUM_THREADS = 256
_MOST_CHECKSUM_BLOCKS = 512  # enough to use the memory's bandwidth; each thread adds to one total
_WORD_BYTES = 8

_CHECKSUMS = CudaSource("checksums.cu", lambda module: module.get_function("add_mixed").kernel)


def checksum_bytes(data: Array) -> int:
    """Return the checksum of contiguous bytes on the current stream, and wait for it."""
    if data.data.ptr % _WORD_BYTES:
        data = data.copy()
    total = cupy.zeros((), np.uint64)
    blocks = min(_MOST_CHECKSUM_BLOCKS, -(-data.size // (_CHECKSUM_THREADS * _WORD_BYTES)))
    add = _CHECKSUMS.on(cupy.cuda.runtime.getDevice())
    arguments = (data.data.ptr, np.uint64(data.size), total.data.ptr)
    add((blocks,), (_CHECKSUM_THREADS,), arguments, 0, stream=cupy.cuda.get_current_stream())
    return int(total.get())


SOURCES = (*_KERNELS.values(), _REGIONS, _CHECKSUMS)


def load_all(sources: Iterable[CudaSource[Any]] = SOURCES) -> None:
    """Load sources on the current device before their first use. Do not call it on an event loop.

    The first call on a machine compiles them, about 0.8 s each. Threads compile them concurrently,
    so all together take little longer.
    """
    device_id = cupy.cuda.runtime.getDevice()

    def load(source: CudaSource[Any]) -> None:
        with cupy.cuda.Device(device_id):
            source.on(device_id)

    with ThreadPoolExecutor(thread_name_prefix="dask-p2p-compile") as pool:
        for loading in [pool.submit(load, source) for source in sources]:
            loading.result()
