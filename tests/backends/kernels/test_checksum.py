"""Checksums: every kind of array, every bit; the GPU's as defined."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

import dask_p2p.backends
from dask_p2p.backends import checksum
from tests.backends.emulator import compiled, needs_compiler
from tests.backends.support import DTYPES, cupy, mixed_sum, random_bits

LENGTHS = [0, 1, 7, 8, 9, 15, 16, 63, 64, 1000, 2**18 - 1, 2**18, 2**18 + 8, 2**18 + 13]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_count_and_nothing_else(dtype):
    array = random_bits((5, 7), dtype)
    expected = checksum(np.frombuffer(array.tobytes(), "u1"))
    readonly = array.view()
    readonly.flags.writeable = False
    shifted = np.empty(array.nbytes + 1, "u1")[1:].view(dtype).reshape(5, 7)
    shifted.reshape(-1).view("u1")[...] = array.reshape(-1).view("u1")
    same_values = [array, readonly, shifted]
    if not (dtype.fields and dtype.isalignedstruct):  # NumPy does not copy what is between fields
        same_values += [np.asfortranarray(array), array[::-1].copy()[::-1]]
    for same in same_values:
        assert checksum(same) == expected


def test_arrays_without_dimensions_or_items():
    assert checksum(np.array(7.5)) == checksum(np.array([7.5]))
    for empty in (np.zeros((0, 3)), np.zeros(3, "V0")):
        assert checksum(empty) == 0


def test_every_flipped_bit_is_found():
    array = random_bits((40,), "u1")
    sums = {checksum(array)}
    for bit in range(8 * array.size):
        array[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(array))
        array[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * array.size


def on_gpu(array):
    """Copy an array to the GPU, and wait for the copy: small copies go on by themselves."""
    copied = cupy.asarray(array)
    cupy.cuda.Stream.null.synchronize()
    return copied


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("length", [*LENGTHS, 2**24, 2**24 + 5, 3 * 2**24 - 3])
    def test_as_defined(self, length):
        array = random_bits((length,), "u1")
        assert checksum(on_gpu(array)) == mixed_sum(array)

    def test_strided_and_misaligned_arrays(self):
        array = random_bits((65, 33), "u1")
        copied = on_gpu(array)
        for cut in (np.s_[1:, :], np.s_[:, 3:], np.s_[::-1, ::2], np.s_[3:3]):
            assert checksum(copied[cut]) == mixed_sum(array[cut].reshape(-1))

    def test_every_flipped_bit_is_found(self):
        copied = on_gpu(random_bits((2**24 + 13,), "u1"))
        good = checksum(copied)
        bits = 8 * copied.size
        rng = np.random.default_rng(0)
        for bit in [0, 1, 63, 64, bits // 2, bits - 1, *map(int, rng.integers(0, bits, 200))]:
            copied[bit // 8] ^= 1 << bit % 8
            cupy.cuda.Stream.null.synchronize()
            assert checksum(copied) != good, bit
            copied[bit // 8] ^= 1 << bit % 8
        cupy.cuda.Stream.null.synchronize()
        assert checksum(copied) == good


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


@needs_compiler
@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (3, 64), (512, 256)])
@pytest.mark.parametrize("size_bytes", [1, 7, 8, 9, 64, 257, 999, 4096, 5003])
def test_any_grid_gives_the_sum_of_numpy(library, blocks, threads, size_bytes):
    data = random_bits((size_bytes,), "u1")
    assert library.sum(data.ctypes.data, size_bytes, blocks, threads) == mixed_sum(data)
