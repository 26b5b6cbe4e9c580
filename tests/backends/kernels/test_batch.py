"""Copies of many regions, and the kernel's own source executed from their plans."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_p2p.backends
from dask_p2p.backends.kernels import copies
from dask_p2p.backends.kernels.copies import pack_batch, pack_regions, plan_region
from tests.backends.emulator import compiled, needs_compiler
from tests.support import run_command

SOURCE = Path(dask_p2p.backends.__file__).with_name("kernels") / "regions.cu"
HARNESS = """
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
struct Index { unsigned x, y; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
#include SOURCE
extern "C" unsigned long long batch_bytes() { return sizeof(Batch); }
extern "C" void launch(const Batch *batch, unsigned columns, unsigned rows, unsigned threads)
{
    gridDim = {columns, rows};
    blockDim = {threads, 1};
    for (unsigned y = 0; y < rows; ++y)
        for (unsigned x = 0; x < columns; ++x)
            for (unsigned t = 0; t < threads; ++t) {
                blockIdx = {x, y};
                threadIdx = {t, 0};
                copy_regions(*batch);
            }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded = compiled(tmp_path_factory.mktemp("regions"), SOURCE, HARNESS)
    loaded.batch_bytes.restype = ctypes.c_ulonglong
    loaded.launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 3]
    return loaded


def copy(library, regions):
    """Copy regions, pairs of arrays of one shape, as one launch."""
    layouts, rows = [], []
    for dst, src in regions:
        into, source = dst.ctypes.data, src.ctypes.data
        alignment = (into | source) & 15
        layout = plan_region(dst.shape, dst.itemsize, src.strides, dst.strides, alignment)
        layouts.append(layout)
        rows.append(copies.shift_regions(pack_regions([layout.at(0, 0)]), into, source))
    batch = pack_batch(np.concatenate(rows))
    grid = copies.launch_grid(max(layout.words for layout in layouts), len(regions))
    library.launch(batch.ctypes.data, *grid, copies.THREADS)


@needs_compiler
def test_the_struct_is_that_of_the_kernel(library):
    assert pack_batch(pack_regions([])).nbytes == library.batch_bytes()
    assert library.batch_bytes() <= 4096
    assert f"MAX_REGIONS = {copies.MAX_REGIONS};" in SOURCE.read_text()


@needs_compiler
@settings(max_examples=60)
@given(st.data())
def test_regions_of_any_strides(library, data):
    """The rest of each target stays as it is."""
    regions, wholes, expected = [], [], []
    for number in range(data.draw(st.integers(1, 5))):
        dtype = np.dtype(data.draw(st.sampled_from(["i1", "i2", "f4", "f8", "c16", "V3"])))
        # An item of three bytes is an axis of its own.
        ndim = data.draw(st.integers(0, 3 if dtype.itemsize == 3 else 4))
        shape = data.draw(st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim))
        axes = data.draw(st.permutations(range(ndim)))
        steps = data.draw(st.lists(st.sampled_from([1, 2, -1]), min_size=ndim, max_size=ndim))
        rng = np.random.default_rng(number)
        source = rng.integers(0, 256, (*(2 * n for n in shape), dtype.itemsize), "u1")
        source = source.view(dtype)[..., 0]
        at = tuple(
            slice(None, n * step if step > 0 else None, step)
            for n, step in zip(shape, steps, strict=True)
        )
        cut = tuple(slice(n) for n in shape)
        src = source[(*at, ...)][(*cut, ...)].transpose(axes)
        target = np.zeros([n + 2 for n in src.shape], dtype)
        inside = (*(slice(1, 1 + n) for n in src.shape), ...)
        result = target.copy()
        result[inside] = src
        regions.append((target[inside], src))
        wholes.append(target)
        expected.append(result)
    copy(library, regions)
    for target, result in zip(wholes, expected, strict=True):
        assert target.tobytes() == result.tobytes()


@needs_compiler
def test_one_item_everywhere(library):
    """A constant is a source with strides of 0."""
    for item in (np.float32("nan"), np.complex128(2 + 3j), np.int8(7)):
        target = np.zeros((5, 6), item.dtype)
        copy(library, [(target[1:4, 2:5], np.broadcast_to(item, (3, 3)))])
        expected = np.zeros((5, 6), item.dtype)
        expected[1:4, 2:5] = item
        assert target.tobytes() == expected.tobytes()


def test_regions_that_do_not_fit():
    shape = (2, 3, 2, 3, 2)
    source = np.zeros([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
    target = np.zeros(shape)
    assert plan_region(shape, 8, source.strides, target.strides, 0) is None
    assert plan_region((3, 0), 8, (8, 8), (8, 8), 0) is None


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["75", "90"])
def test_the_kernel_compiles(tmp_path, arch):
    command = ["nvcc", "-std=c++17", "-Werror", "all-warnings", "-cubin", f"-arch=sm_{arch}"]
    command += ["-Xptxas", "-v", str(SOURCE), "-o", str(tmp_path / "out")]
    process = run_command(*command)
    assert process.returncode == 0, process.stderr
    assert "0 bytes stack frame, 0 bytes spill stores" in process.stderr
