"""Permuted copies on a GPU: plans of `_launch`, executed with transpose.cu.

Import this module only if CuPy is installed; `dask_p2p.backends.cupy` does so.

Launches get addresses, not arrays, so CuPy does not check them. The source may therefore also be
another GPU's memory that is mapped into this process (`cupy.ndarray` over an `UnownedMemory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import cupy

from dask_p2p.backends.base import transposed
from dask_p2p.backends.device import MEMCPY_DEFAULT
from dask_p2p.backends.kernels.launch import ENTRIES, WORD_SIZES_BYTES, plan_launches
from dask_p2p.backends.kernels.source import CudaSource
from dask_p2p.types import Array

# Unused shared memory that a block reserves for low occupancy. With it two blocks of any kernel fit
# on a multiprocessor (of an A100, H100 or H200; one on smaller GPUs), without it four or more.
# Measured between four H200s: 328 GB/s a GPU with two blocks, 313 with four, 319 with one.
LOW_OCCUPANCY_BYTES = 60 * 1024


def permute_into(
    dst: Array,
    src: Array,
    axes: Sequence[int],
    *,
    stream: Any | None = None,
    low_occupancy: bool = False,
) -> None:
    """Do ``dst[...] = src.transpose(axes)`` on the device of `dst`.

    See `dask_p2p.backends.base.Backend`. The call returns when the work is queued; keep both arrays
    until its end.

    Parameters
    ----------
    dst, src, axes
        As for `Backend.permute_into`.
    stream
        A `cupy.cuda.Stream` of the device of `dst`; default: the device's current stream.
    low_occupancy
        Run fewer thread blocks on a multiprocessor. A kernel at full speed takes all bandwidth of
        the device's memory, and nearly stops copy engines that use this memory.
    """
    view = transposed(dst, src, axes)
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


class _Loaded(NamedTuple):
    """A kernel on a device."""

    function: Any  # cupy.cuda.Function
    unused_bytes: int  # shared memory to reserve for low occupancy


def _loaded(word_bytes: int, module: Any) -> dict[str, _Loaded]:
    """Return the kernels for a word size by name."""
    names = [name for name in ENTRIES if name.endswith(f"_{word_bytes}")]
    return {name: _with_low_occupancy(module.get_function(name)) for name in names}


def _with_low_occupancy(kernel: Any) -> _Loaded:
    """Allow a kernel to reserve the shared memory for low occupancy."""
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    room_bytes = device["sharedMemPerBlockOptin"] - kernel.shared_size_bytes
    unused_bytes = max(0, min(LOW_OCCUPANCY_BYTES, room_bytes))
    kernel.max_dynamic_shared_size_bytes = unused_bytes
    return _Loaded(kernel.kernel, unused_bytes)


#: By word size: each is compiled for itself.
_KERNELS = {
    size: CudaSource("transpose.cu", partial(_loaded, size), f"-DONLY_WORD_BYTES={size}")
    for size in WORD_SIZES_BYTES
}
SOURCES = tuple(_KERNELS.values())
