"""The source of the checksums' kernel, executed on the processor."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import dask_p2p.backends
from tests.backends.emulator import compiled, needs_compiler
from tests.backends.support import mixed_sum, random_bits

pytestmark = needs_compiler

SOURCE = Path(dask_p2p.backends.__file__).with_name("kernels") / "checksums.cu"
HARNESS = """
#define __device__
#define __forceinline__ inline
#define __global__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static void atomicAdd(unsigned long long *to, unsigned long long value) { *to += value; }
#include SOURCE
extern "C" u64 sum(const u8 *data, u64 size_bytes, unsigned blocks, unsigned threads)
{
    u64 total = 0;
    gridDim = {blocks};
    blockDim = {threads};
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            add_mixed(data, size_bytes, &total);
    return total;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded = compiled(tmp_path_factory.mktemp("checksums"), SOURCE, HARNESS)
    loaded.sum.restype = ctypes.c_ulonglong
    loaded.sum.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint]
    return loaded


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (3, 64), (512, 256)])
@pytest.mark.parametrize("size_bytes", [1, 7, 8, 9, 64, 257, 999, 4096, 5003])
def test_any_grid_gives_the_sum_of_numpy(library, blocks, threads, size_bytes):
    data = random_bits((size_bytes,), "u1")
    checksum = library.sum(data.ctypes.data, size_bytes, blocks, threads)
    assert checksum == mixed_sum(data)
