"""Executes the launches of a plan on the processor, with the source of the CUDA kernels itself."""

import ctypes
import functools
import mmap
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

import dask_p2p.backends
from dask_p2p.backends.kernels.launch import MAX_GRID, plan_launches

SOURCE = Path(dask_p2p.backends.__file__).with_name("kernels") / "transpose.cu"
HARNESS = Path(__file__).with_name("emulate.cpp")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@functools.cache
def library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="dask-p2p-emulate-"))
    loaded = compiled(folder, SOURCE, HARNESS.read_text())
    loaded.launch.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 3, ctypes.c_void_p, ctypes.c_int]
    loaded.work_bytes.restype = ctypes.c_ulonglong
    return loaded


def compiled(folder, source, harness):
    """Compile a harness that includes a CUDA source as ``SOURCE``, for the processor."""
    (folder / "harness.cpp").write_text(harness)
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE"]
    # Misaligned accesses work on many processors, but on no GPU.
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    command += ["-Wno-unknown-pragmas", f'-DSOURCE="{source}"']
    subprocess.run([*command, folder / "harness.cpp", "-o", folder / "so"], check=True)
    return ctypes.CDLL(str(folder / "so"))


def permute(dst, src, axes, *, backwards=False, max_grid=MAX_GRID):
    """Do what kernels.cuda.permute_into does; return the names of the kernels used."""
    view = src.transpose(axes)
    assert dst.shape == view.shape
    launches = plan_launches(
        dst.ctypes.data,
        view.ctypes.data,
        dst.shape,
        dst.itemsize,
        dst.strides,
        view.strides,
        max_grid=max_grid,
    )
    for launch in launches:
        if launch.entry == "memcpy":
            ctypes.memmove(launch.dst, launch.src, launch.i.extent)
            continue
        packed = launch.pack()
        failure = library().launch(
            launch.entry.encode(), launch.grid, *launch.threads, packed.ctypes.data, backwards
        )
        assert failure == 0, f"{launch} stopped with signal {failure}"
    return [launch.entry for launch in launches]


class GuardedBytes:
    """Memory between two pages that must not be touched."""

    def __init__(self, size_bytes: int) -> None:
        page = mmap.PAGESIZE
        self._size = -(-size_bytes // page) * page
        self._map = mmap.mmap(-1, self._size + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for guard in (base, base + page + self._size):
            if libc.mprotect(guard, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        pages = (ctypes.c_ubyte * self._size).from_address(base + page)
        self._bytes = np.ctypeslib.as_array(pages)

    def take(self, size_bytes: int, flush: str, shift: int = 0) -> np.ndarray:
        """Return bytes that start at the first guard, or end at the second, but for `shift`."""
        start = shift if flush == "start" else self._size - size_bytes - shift
        return self._bytes[start : start + size_bytes]


@functools.cache
def guarded(name: str, size_bytes: int = 1 << 22) -> GuardedBytes:
    return GuardedBytes(size_bytes)
