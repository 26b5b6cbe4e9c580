"""The kernel of the wave, on a processor: threads of C++ in the place of CUDA's."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest

from benchmarks.rivals import wave
from tests.backends.emulator import needs_compiler

BEFORE = r"""
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
using std::min;
struct Place { int x, y, z; };
thread_local Place threadIdx, blockIdx;
std::barrier<>* all;
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() all->arrive_and_wait()
"""
AFTER = r"""
extern "C" void run(const int* grid, const int* block, const float* u, const float* before,
                    float* out, const int* n, int planes, const long long* strides) {
    const long long* s = strides;
    for (int z = 0; z < grid[2]; z++) for (int y = 0; y < grid[1]; y++)
    for (int x = 0; x < grid[0]; x++) {
        std::barrier<> barrier(block[0] * block[1]);
        all = &barrier;
        std::vector<std::thread> threads;
        for (int j = 0; j < block[1]; j++) for (int i = 0; i < block[0]; i++)
            threads.emplace_back([=] {
                threadIdx = {i, j, 0};
                blockIdx = {x, y, z};
                wave(u, before, out, n[0], n[1], n[2], planes, s[0], s[1], s[2], s[3], s[4], s[5]);
            });
        for (auto& thread : threads) thread.join();
    }
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wave")
    text, library = folder / "wave.cpp", folder / "wave.so"
    text.write_text(BEFORE + wave.source() + AFTER)
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run(["g++", *options, "-o", library, text], check=True)
    loaded = ctypes.CDLL(str(library)).run
    numbers, pointer = np.ctypeslib.ndpointer(np.int32), ctypes.c_void_p
    strides = np.ctypeslib.ndpointer(np.int64)
    loaded.argtypes = [numbers, numbers, *[pointer] * 3, numbers, ctypes.c_int, strides]
    return loaded


@needs_compiler
@pytest.mark.programs
@pytest.mark.parametrize("shape", [(5, 16, 12), (20, 17, 33), (33, 5, 40)], ids=str)
def test_the_kernel(run, shape):
    """Of several blocks along each axis, of sizes that are no multiples, and views."""
    nx, ny, nz = shape
    rng = np.random.default_rng(0)
    u = rng.random((nx + 2 * wave.RADIUS, ny + 3, nz), "f4")[:, 3:]
    before, whole = rng.random((nx, ny, nz + 1), "f4")[..., 1:], np.full((nx, ny + 1, nz), 7, "f4")
    out, expected = whole[:, 1:], np.empty(shape, "f4")
    wave.wave(u, before, expected)
    grid, block, planes = wave.launch(shape)
    arrays = u, before, out
    run(
        np.array(grid, np.int32),
        np.array(block, np.int32),
        *(array.ctypes.data for array in arrays),
        np.array(shape, np.int32),
        planes,
        np.array([stride // 4 for array in arrays for stride in array.strides[:2]], np.int64),
    )
    assert abs(out - expected).max() < 1e-5
    assert (whole[:, 0] == 7).all()
