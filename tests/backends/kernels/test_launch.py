"""Plans for the GPU, and the kernels' own source executed from them on the processor."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_p2p.backends.kernels import launch as launch_module
from dask_p2p.backends.kernels.launch import VECTOR_TILE, WORD_SIZES_BYTES, plan_launches
from tests.backends.emulator import guarded, library, needs_compiler, permute
from tests.backends.support import POISON, bits, boxes, permutations, random_bits
from tests.support import BOUND_S, loaded_anew, pairwise


def launches(shape, itemsize, axes=None):
    """What is launched for a C-ordered source of this shape and a C-ordered target."""
    axes = tuple(reversed(range(len(shape)))) if axes is None else axes
    target, of_source = [shape[a] for a in axes], strides(shape, itemsize)
    of_axes = [of_source[a] for a in axes]
    return plan_launches(0, 0, target, itemsize, strides(target, itemsize), of_axes)


def strides(shape, itemsize):
    return [itemsize * int(np.prod(shape[n + 1 :], dtype=int)) for n in range(len(shape))]


def check(src, dst, dst_box, axes, **options):
    """Permute into a box of `dst`, and look at all of `dst`. Return the kernels that were used."""
    dst.reshape(-1).view("u1")[...] = POISON
    expected = dst.copy()
    dst_box = dst_box if isinstance(dst_box, tuple) else (dst_box,)
    dst_box = dst_box if ... in dst_box else (*dst_box, ...)  # an array even without axes
    expected[dst_box] = src.transpose(axes)
    entries = permute(dst[dst_box], src, axes, **options)
    assert bits(dst) == bits(expected)
    return entries


MOST_BYTES = 1 << 22  # of guarded memory


def guarded_array(name, shape, itemsize, flush="end", shift=0):
    size = int(np.prod(shape, dtype=int)) * itemsize
    flat = guarded(name).take(size, flush, shift)
    return flat.view(f"V{itemsize}").reshape(shape)


@needs_compiler
def test_the_struct_is_what_is_packed():
    (launch,) = launches((64, 64), 8)
    assert library().work_bytes() == launch.pack().nbytes


@needs_compiler
@pytest.mark.parametrize(
    ("word", "flush", "backwards"), pairwise(WORD_SIZES_BYTES, ["start", "end"], [False, True])
)
class TestTwoAxes:
    """Boxes of larger blocks next to memory that must not be touched."""

    def run(self, word, flush, backwards, src_shape, src_box, dst_shape, dst_box):
        src = guarded_array("src", src_shape, word, flush)
        src.view("u1")[...] = random_bits((src.nbytes,), "u1").reshape(src.view("u1").shape)
        dst = guarded_array("dst", dst_shape, word, flush)
        return check(src[src_box], dst, dst_box, (1, 0), backwards=backwards)

    def test_whole_arrays(self, word, flush, backwards):
        side = VECTOR_TILE[word]
        for rows, columns in [(side, side), (4 * side + 16, 2 * side), (side + 16, 2 * side + 32)]:
            shape = (rows, columns)
            used = self.run(word, flush, backwards, shape, ..., shape[::-1], ...)
            assert used == [f"permute_vector_{word}"]

    def test_boxes_at_any_place_of_aligned_rows(self, word, flush, backwards):
        side = VECTOR_TILE[word]
        ld_src, ld_dst = 2 * side + 32, side + 48
        for top, column in [(0, 1), (3, 0), (5, 7), (1, 16)]:
            rows, columns = side + 5, side + 9
            src_box = np.s_[top : top + rows, column : column + columns]
            dst_box = np.s_[column % 9 : column % 9 + columns, top : top + rows]
            boxes = (rows + 6, ld_src), src_box, (columns + 9, ld_dst), dst_box
            used = self.run(word, flush, backwards, *boxes)
            assert used == [f"permute_vector_{word}"]


@needs_compiler
@pytest.mark.parametrize(
    ("itemsize", "cell", "flush"),
    pairwise(
        [*WORD_SIZES_BYTES, 3, 6, 12, 24], [(16, 16), (33, 33), (2, 5), (20, 7)], ["start", "end"]
    ),
)
class TestCells:
    """Batches of small matrices: a block moves several, the last one what is left."""

    def test_a_batch(self, itemsize, cell, flush):
        src = guarded_array("src", (150, *cell), itemsize, flush)
        src.view("u1")[...] = random_bits((src.nbytes,), "u1").reshape(src.view("u1").shape)
        dst = guarded_array("dst", (150, *cell[::-1]), itemsize, flush)
        word = itemsize & -itemsize
        assert check(src, dst, ..., (0, 2, 1)) == [f"permute_cells_{word}"]


@needs_compiler
def test_more_axes_than_a_kernel_takes():
    shape = (2, 3) * 5
    axes = (9, 7, 5, 3, 1, 8, 6, 4, 2, 0)
    src = random_bits(shape, "f4")
    dst = np.empty([shape[a] for a in axes], "f4")
    assert len(check(src, dst, ..., axes)) > 1
    assert len(shape) - 2 > launch_module.MAX_OUTER


@needs_compiler
@pytest.mark.parametrize("max_grid", [1, 2, 5])
@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 0, 1), (1, 0, 2)])
def test_more_tiles_than_a_grid_takes(axes, max_grid):
    src = random_bits((3, 100, 68), "f4")
    dst = np.empty([src.shape[a] for a in axes], "f4")
    assert len(check(src, dst, ..., axes, max_grid=max_grid)) > 1 or max_grid == 5


@needs_compiler
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0,), (3, 0, 4), (5,), (1, 700, 1)])
def test_least_shapes(shape):
    src = random_bits(shape, "f8")
    axes = tuple(reversed(range(len(shape))))
    dst = np.empty(shape[::-1], "f8")
    if dst.size:
        check(src, dst, ..., axes)
    else:
        assert permute(dst, src, axes) == []


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    permutations(min_side=1, max_side=40, max_ndim=4),
    st.sampled_from([*range(1, 18), 20, 24, 32, 48]),
    st.sampled_from(["start", "end"]),
)
def test_any_boxes(data, case, itemsize, flush):
    shape, axes = case
    while np.prod(shape, dtype=int) > 8000:
        shape = tuple(-(-extent // 2) for extent in shape)
    outer, box = data.draw(boxes(shape))
    dst_outer, dst_box = data.draw(boxes([shape[a] for a in axes]))
    assume(max(np.prod(outer), np.prod(dst_outer)) * itemsize < MOST_BYTES)
    src, dst = (
        guarded_array(name, box, itemsize, flush, data.draw(st.integers(0, 15)))
        for name, box in (("src", outer), ("dst", dst_outer))
    )
    src.reshape(-1).view("u1")[...] = random_bits((src.nbytes,), "u1")
    src = src[(*box, ...)]
    for axis in data.draw(st.sets(st.sampled_from(range(len(shape))), max_size=2)) if shape else ():
        row = src[(slice(None),) * axis + (slice(0, 1),)]
        src = np.broadcast_to(row, src.shape)
    check(src, dst, dst_box, axes, backwards=data.draw(st.booleans()))


# ---- plans alone ----


@given(
    st.lists(st.integers(1, 1 << 17), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.data(),
)
def test_tiles_cover_the_box_and_grids_keep_their_limits(shape, itemsize, data):
    axes = data.draw(st.permutations(range(len(shape))))
    src = strides(shape, itemsize)
    dst_shape = [shape[a] for a in axes]
    start = data.draw(st.integers(0, 3)) * itemsize
    launches = plan_launches(
        start, 0, dst_shape, itemsize, strides(dst_shape, itemsize), [src[a] for a in axes]
    )
    items = 0
    for launch in launches:
        if launch.entry == "memcpy":
            items += launch.i.extent // itemsize
            continue
        assert launch.entry in launch_module.ENTRIES
        assert 0 < launch.grid <= launch_module.MAX_GRID
        assert np.prod(launch.threads) <= 1024
        word = int(launch.entry.rpartition("_")[2])
        for axis, head, step, tiles in zip(
            (launch.k, launch.i), launch.head, launch.step[:2], launch.tiles, strict=True
        ):
            assert 0 <= head * word < 16
            assert (tiles - 1) * step < axis.extent + head <= tiles * step
        if "copy" in launch.entry:
            assert np.prod(launch.step) <= launch_module.COPY_WORDS
        if launch.first_tile == 0:
            steps = "copy" in launch.entry or "cells" in launch.entry  # of the first outer axis
            outer = launch.outer[1:] if steps else launch.outer
            extents = [a.extent for a in (launch.k, launch.i, launch.j, *outer)]
            extents.append(launch.cells or 1)
            items += int(np.prod(extents, dtype=object)) * word // itemsize
    assert items == int(np.prod(shape, dtype=object))


@pytest.mark.parametrize(
    ("shape", "itemsize", "axes", "entry"),
    [
        ((131072, 16384), 4, (1, 0), "permute_vector_4"),
        ((131072, 16384), 8, (1, 0), "permute_vector_8"),
        ((7, 1000, 512), 8, (0, 2, 1), "permute_vector_8"),
        ((100, 200, 300), 16, (2, 1, 0), "permute_vector_16"),
        ((1000, 1001), 4, (1, 0), "permute_tile_4"),
        ((1000, 1000, 2), 8, (1, 0, 2), "permute_vector_16"),  # pairs move as one word
        ((1000, 1000, 3), 1, (1, 0, 2), "permute_copy_1"),
        ((1000, 1000, 3), 4, (2, 0, 1), "permute_copy_4"),
        ((1000, 1000), 4, (0, 1), "memcpy"),
    ],
)
def test_choices(shape, itemsize, axes, entry):
    planned = launches(shape, itemsize, axes)
    assert (planned[0].entry if planned else "none") == entry


def test_no_launch_has_almost_idle_blocks():
    """A million transposes of 2 x 2 items still fill the blocks."""
    (launch,) = launches((1 << 20, 2, 2), 8, (0, 2, 1))
    assert launch.grid < 1 << 14


def moved(axes, word_bytes, src_offset, dst_offset):
    """Return every (source byte, destination byte) that a copy moves."""
    extents = [axis.extent for axis in axes]
    pairs = set()
    for position in np.ndindex(*extents):
        src = src_offset + sum(n * a.src_stride_bytes for n, a in zip(position, axes, strict=True))
        dst = dst_offset + sum(n * a.dst_stride_bytes for n, a in zip(position, axes, strict=True))
        pairs |= {(src + byte, dst + byte) for byte in range(word_bytes)}
    return pairs


@given(
    st.data(),
    permutations(min_side=1, max_side=4, max_ndim=4),
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]),
    st.integers(0, 32),
)
def test_the_least_form_moves_the_same_bytes(data, case, itemsize, alignment):
    shape, axes = case
    dtype = np.dtype(("V", itemsize))
    outer, box = data.draw(boxes(shape))
    src = np.empty(outer, dtype)[box].transpose(axes)
    dst_outer, dst_box = data.draw(boxes(src.shape))
    dst = np.empty(dst_outer, dtype)[dst_box]

    least = launch_module.reduce_copy(src.shape, itemsize, src.strides, dst.strides, alignment)

    lengths_and_strides = zip(src.shape, src.strides, dst.strides, strict=True)
    full_axes = [launch_module.CopyAxis(*axis) for axis in lengths_and_strides]
    assert moved(
        least.axes, least.word_bytes, least.src_offset_bytes, least.dst_offset_bytes
    ) == moved(full_axes, itemsize, 0, 0)
    assert len(least.axes) <= len(shape) + 1
    strides = [axis.dst_stride_bytes for axis in least.axes]
    assert strides == sorted(strides, reverse=True)
    assert all(stride > 0 for stride in strides)
    assert all(axis.extent > 1 for axis in least.axes)
    assert least.word_bytes in (1, 2, 4, 8, 16)
    multiples = [alignment, least.src_offset_bytes, least.dst_offset_bytes]
    for axis in least.axes:
        multiples += axis[1:]
    assert all(number % least.word_bytes == 0 for number in multiples)


THREADS = 4


class WaitForAll(dict):
    """Kernels by device; `all_asked` is set when all threads have looked for one."""

    def __init__(self):
        self.lookups, self.all_asked = 0, threading.Event()
        self.lock = threading.Lock()

    def get(self, device_id):
        value = super().get(device_id)
        with self.lock:
            self.lookups += 1
            if self.lookups >= THREADS:
                self.all_asked.set()
        return value


@pytest.fixture
def compiled():
    """Options of all compilations."""
    return []


@pytest.fixture
def module(monkeypatch, compiled):
    def raw_module(code, options):
        compiled.append(options)
        return SimpleNamespace(code=code)

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 3), Device=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=raw_module, cuda=cuda))
    return loaded_anew("dask_p2p.backends.kernels.cuda")


def test_each_device_loads_the_source_once(module, compiled):
    source = module.CudaSource("regions.cu", lambda compiled: compiled.code, "-DX=1")
    assert "copy_regions" in source.on(0)
    assert source.on(0) is source.on(0)
    assert compiled == [("--std=c++17", "-DX=1")]
    source.on(1)
    assert len(compiled) == 2


def test_threads_compile_once(module, compiled):
    kernels = WaitForAll()

    def load(compiled):
        assert kernels.all_asked.wait(BOUND_S)
        return compiled

    source = module.CudaSource("transpose.cu", load)
    source._loaded = kernels
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(THREADS):
            threads.submit(source.on, 0)
    assert len(compiled) == 1
    assert [*kernels] == [0]


def test_sources_load_at_the_same_time(module):
    barrier = threading.Barrier(2)

    def load(compiled):
        barrier.wait(BOUND_S)
        return compiled.code

    sources = [module.CudaSource(f"{name}.cu", load) for name in ("regions", "checksums")]
    module.load_all(sources)
    assert [[*source._loaded] for source in sources] == [[3], [3]]


def test_a_source_that_cannot_be_compiled_is_an_error(module):
    def load(compiled):
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        module.load_all([module.CudaSource("regions.cu", load)])
