"""The CUDA kernels on a GPU equal the NumPy kernel bit for bit, and write nothing else."""

import itertools

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from dask_p2p.backends import backend_for, backend_named  # noqa: E402
from dask_p2p.backends.kernels import cuda as kernels  # noqa: E402
from dask_p2p.backends.kernels.launch import VECTOR_TILE, WORD_SIZES_BYTES  # noqa: E402

from .support import POISON, bits, random_bits  # noqa: E402

pytestmark = pytest.mark.gpu

WORD_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@pytest.fixture(scope="module", autouse=True)
def device():
    backend_named("cupy").warm_up()
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def check(block, src_box, axes, dst_outer, dst_box, *, shift_items=0):
    """Permute a box into a box on both kinds of memory; compare all of the target."""
    src = block[(*src_box, ...)]
    dst = np.empty(dst_outer, block.dtype)
    dst.reshape(-1).view("u1")[...] = POISON
    device_block, device_dst = to_device(block, shift_items), to_device(dst, shift_items)
    device_src = device_block[(*src_box, ...)]
    backend_named("numpy").permute_into(dst[(*dst_box, ...)], src, axes)
    backend_named("cupy").permute_into(device_dst[(*dst_box, ...)], device_src, axes)

    assert bits(cupy.asnumpy(device_dst).view(block.dtype)) == bits(dst)
    assert bits(cupy.asnumpy(device_block)) == bits(block)


def to_device(array, shift_items):
    """Copy an array, in its order of memory, to an address that is shifted by some items."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = cupy.empty(array.size + shift_items, array.dtype)[shift_items:]
    out = flat.reshape(array.shape, order=order)
    out.set(array)
    return out


def whole_copy(shape, axes, dtype, **options):
    block = random_bits(shape, dtype)
    check(block, (), axes, tuple(shape[a] for a in axes), (), **options)


def sizes(word):
    """Sides around those of tiles, aligned and not, and very long or thin arrays."""
    side = VECTOR_TILE[word]
    yield from [(side, side), (2 * side, 3 * side), (4 * side + 16, side + 32), (1, 1), (33, 31)]
    yield from [(side - 1, side + 1), (3 * side + 5, 2 * side + 7), (5, 100_001), (100_001, 5)]
    yield from [(1, 4097), (4097, 1), (17, 20_000), (20_000, 17), (1000, 1001), (1024, 1024)]


@pytest.mark.parametrize("word", WORD_SIZES_BYTES)
def test_two_axes(word):
    for shape in sizes(word):
        whole_copy(shape, (1, 0), WORD_DTYPES[word])


@pytest.mark.parametrize("word", WORD_SIZES_BYTES)
def test_unaligned_addresses(word):
    for shift in range(1, 17):
        whole_copy((150, 160), (1, 0), WORD_DTYPES[word], shift_items=shift)


@pytest.mark.parametrize("word", WORD_SIZES_BYTES)
@pytest.mark.parametrize("place", [(0, 0), (1, 0), (0, 3), (5, 16), (31, 17)])
@pytest.mark.parametrize("margin", [32, 35])
def test_boxes_of_larger_blocks(word, place, margin):
    rows, columns = 200, 300
    top, column = place
    block = random_bits((rows + 32, columns + margin - columns % 16), WORD_DTYPES[word])
    columns = min(columns, block.shape[1] - column)
    src_box = np.s_[top : top + rows, column : column + columns]
    dst_box = np.s_[column : column + columns, 2 * top : 2 * top + rows]
    check(block, src_box, (1, 0), (columns + 40, 208 + margin + 64), dst_box)


@pytest.mark.parametrize("word", WORD_SIZES_BYTES)
@pytest.mark.parametrize("ndim", [3, 4])
def test_all_permutations(word, ndim):
    for shape in [(7, 48, 64, 3)[:ndim], (5, 33, 4, 70)[-ndim:], (2, 3, 4, 5)[:ndim]]:
        for axes in itertools.permutations(range(ndim)):
            whole_copy(shape, axes, WORD_DTYPES[word])


def test_many_axes():
    whole_copy((2, 3) * 5, (9, 7, 5, 3, 1, 8, 6, 4, 2, 0), "f4")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 0, 2), (5,), (1, 7, 1)])
def test_least_shapes(shape):
    whole_copy(shape, tuple(reversed(range(len(shape)))), "f8")


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_f_ordered_and_stepped_sources(axes):
    block = np.asfortranarray(random_bits((40, 50, 60), "f4"))
    check(block, (), axes, tuple(block.shape[a] for a in axes), ())
    box = np.s_[::-1, 3:48:2, ::-3]
    shape = block[box].shape
    check(np.ascontiguousarray(block), box, axes, tuple(shape[a] for a in axes), ())


def test_a_broadcast_source():
    src = cupy.broadcast_to(cupy.arange(50.0)[:, None], (50, 40))
    dst = cupy.empty((40, 50))
    backend_for(dst).permute_into(dst, src, (1, 0))
    assert (dst == cupy.arange(50.0)).all()


def test_more_than_2_to_the_31_items():
    rows, columns = 1 << 16, (1 << 15) + 32
    if cupy.cuda.runtime.memGetInfo()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free GPU memory")
    assert rows * columns > 1 << 31
    check_on_device((rows, columns), "u1")


@pytest.mark.parametrize("columns", [(1 << 14) + 16, (1 << 14) + 17])
def test_more_than_2_to_the_32_bytes(columns):
    if cupy.cuda.runtime.memGetInfo()[0] < 10 << 30:
        pytest.skip("needs 10 GiB of free GPU memory")
    check_on_device(((1 << 16) + 3, columns), "u4")


def check_on_device(shape, dtype):
    """Compare by place: each item of the source is a hash of its row and column."""
    rows = cupy.arange(shape[0], dtype="u4")[:, None] * cupy.uint32(2654435761)
    columns = cupy.arange(shape[1], dtype="u4")[None, :] * cupy.uint32(2246822519)
    shift = 32 - 8 * np.dtype(dtype).itemsize
    src, dst = cupy.empty(shape, dtype), cupy.empty(shape[::-1], dtype)
    dst.view("u1").fill(POISON)
    step = 4096
    for start in range(0, shape[0], step):
        part = slice(start, start + step)
        src[part] = ((rows[part] ^ columns) >> shift).astype(dtype)
    backend_for(src).permute_into(dst, src, (1, 0))
    for start in range(0, shape[1], step):
        part = slice(start, start + step)
        expected = ((rows.T ^ columns.T[part]) >> shift).astype(dtype)
        assert bool((dst[part] == expected).all())
    del src, dst
    cupy.get_default_memory_pool().free_all_blocks()


def test_work_goes_to_the_stream_that_was_named():
    src, dst = cupy.arange(1 << 20).reshape(1024, 1024), cupy.zeros((1024, 1024), int)
    cupy.cuda.Device().synchronize()
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), None):
        dst.fill(0)
        cupy.cuda.Device().synchronize()
        kernels.permute_into(dst, src, (1, 0), stream=stream)
        (stream or cupy.cuda.get_current_stream()).synchronize()
        assert (dst == src.T).all()


def test_a_launch_can_be_captured_in_a_graph():
    """Nothing synchronises: a capturing stream would refuse that."""
    src, dst = cupy.arange(300 * 200).reshape(300, 200), cupy.zeros((200, 300), int)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        kernels.permute_into(dst, src, (1, 0), stream=stream)
        graph = stream.end_capture()
        graph.launch(stream=stream)
    stream.synchronize()
    assert (dst == src.T).all()


@pytest.mark.gpu(2)
def test_a_second_gpu():
    with cupy.cuda.Device(1):
        src = cupy.arange(300 * 200).reshape(300, 200)
        dst = cupy.zeros((200, 300), int)
        cupy.cuda.Device().synchronize()
    backend_for(src).permute_into(dst, src, (1, 0))  # while device 0 is the current one
    cupy.cuda.Device(1).synchronize()
    with cupy.cuda.Device(1):
        assert (dst == src.T).all()


@pytest.mark.parametrize("dtype", ["i1", "f2", "f4", "f8", "c16"])
def test_low_occupancy_gives_the_same(dtype):
    src = cupy.asarray(random_bits((300, 260), dtype))
    for axes in ((1, 0), (0, 1)):
        shape = tuple(src.shape[axis] for axis in axes)
        dst = cupy.zeros((shape[0], shape[1] + 3), dtype)[:, :-3]
        kernels.permute_into(dst, src, axes, low_occupancy=True)
        assert dst.get().tobytes() == np.ascontiguousarray(src.get().transpose(axes)).tobytes()
