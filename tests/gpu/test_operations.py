"""Operations on CuPy blocks, also by Dask's own methods under `install`: values are NumPy's."""

from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import fft
from dask_p2p.cli.cluster import indexed_array
from dask_p2p.errors import BlockMismatchError
from tests.backends.support import cupy
from tests.gpu.support import assert_right, check_transpose, gpu_client, on_gpu, on_host
from tests.support import persisted, result_of, used

pytestmark = pytest.mark.gpu(2)


CASES = [
    ((400, 300), (100, 300), None, None),
    ((401, 299), (101, 299), None, None),
    ((400, 300), (70, 80), None, None),
    ((400, 300), (200, 300), None, (400, 7)),
    ((12, 10, 80), (3, 10, 80), (2, 0, 1), None),
    ((12, 10, 80), (3, 5, 80), (0, 2, 1), (5, 50, 5)),
    ((3, 4, 5, 6), (1, 2, 5, 3), (2, 0, 3, 1), None),
    ((3, 7), (1, 7), None, None),
    ((400,), (90,), None, None),
    ((0, 5), (1, 5), None, None),
]


@pytest.mark.parametrize(("shape", "chunks", "axes", "to"), CASES)
@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["pinned"], ["comm"]], ids=str)
def test_equals_numpy(client, shape, chunks, axes, to, order):
    x = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
    a = persisted(client, on_gpu(x, chunks))
    with dask.config.set({"p2p.transports.order": order}):
        y = persisted(client, dask_p2p.transpose(a, axes, chunks=to))
    np.testing.assert_array_equal(on_host(y), np.transpose(x, axes))
    assert used(client, y) <= set(order)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "float32", "int64", "complex64", "complex128"]
)
@pytest.mark.parametrize("transport", ["ipc", "ucx", "pinned"])
def test_every_item_size(client, dtype, transport):
    shape = (1030, 770)
    a = persisted(client, indexed_array(shape, (300, 770), dtype, kind="cupy"))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, dask_p2p.transpose(a))
    assert y.dtype == dtype
    assert_right(client, y, shape)
    assert used(client, y) == {transport}


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_ucx_in_small_messages_whatever_dasks_protocol(protocol):
    shape = (6000, 5000)
    with (
        dask.config.set({"p2p.transports.order": ["ucx"], "p2p.transports.part-bytes": "1 MiB"}),
        gpu_client(protocol=protocol) as client,
    ):
        a = persisted(client, indexed_array(shape, (700, 5000), "f4", kind="cupy"))
        for _ in range(5):
            check_transpose(client, a, "ucx")


def test_comm_over_ucx():
    shape = (3000, 2000)
    with gpu_client(protocol="ucx") as client, dask.config.set({"p2p.transports.order": ["comm"]}):
        a = persisted(client, indexed_array(shape, (700, 2000), "f4", kind="cupy"))
        check_transpose(client, a, "comm")


def test_blocks_of_any_memory_layout(client):
    x = np.arange(400 * 300.0).reshape(400, 300)
    a = on_gpu(x, (100, 300)).map_blocks(lambda b: b.copy(order="F"))
    b = on_gpu(x, (100, 300)).map_blocks(lambda b: b[::-1][::-1])
    for array in (a, b):
        y = dask_p2p.transpose(persisted(client, array))
        np.testing.assert_array_equal(y.compute().get(), x.T)


def test_wrong_blocks_are_named(client):
    x, meta = on_gpu(np.ones((8, 8)), (2, 8)), cupy.empty((0, 0))
    with pytest.raises(BlockMismatchError, match="declared as float64"):
        dask_p2p.transpose(x.map_blocks(lambda b: b.astype("f4"), meta=meta)).compute()
    with pytest.raises(BlockMismatchError, match=r"declared as .*\(2, 8\)"):
        dask_p2p.transpose(x.map_blocks(lambda b: b[:1], meta=meta)).compute()


def test_object_dtype_is_refused(client):
    x = on_gpu(np.ones((4, 4)), (2, 4))
    x = x.map_blocks(lambda b: b, dtype=object, meta=np.empty((0, 0), object))
    with pytest.raises(BlockMismatchError, match="declared as object"):
        dask_p2p.transpose(x).compute()


X = np.random.default_rng(0).random((120, 90))


@pytest.mark.parametrize("transport", ["ipc", "ucx", "pinned", "comm"])
@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        ((30, 90), (120, 23), None),
        ((30, 45), (30, 90), None),
        ((7, 90), ((8, *(7,) * 16), 90), None),
        ((30, 45), (17, 31), (1, 0)),
    ],
)
def test_rechunk(client, transport, before, after, axes):
    x = persisted(client, on_gpu(X, before))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, dask_p2p.rechunk(x, after, axes=axes))
    np.testing.assert_array_equal(on_host(y), X.transpose(axes or (0, 1)))


def star(block):
    out = block.copy()
    out[1:-1] += block[2:] - 2 * block[:-2]
    out[:, 1:-1] += 3 * block[:, 2:] - 4 * block[:, :-2]
    return out


@pytest.mark.parametrize("boundary", ["none", "periodic", "reflect", "nearest", 7.5], ids=str)
@pytest.mark.parametrize("corners", [True, False])
def test_map_overlap(client, boundary, corners):
    x = persisted(client, on_gpu(X, (30, 45)))
    y = persisted(client, dask_p2p.map_overlap(star, x, 2, boundary, corners=corners))
    expected = da.map_overlap(star, da.from_array(X, chunks=(30, 45)), depth=2, boundary=boundary)
    np.testing.assert_array_equal(on_host(y), expected.compute(scheduler="sync"))


def test_map_overlap_of_several_arrays_and_with_the_keywords_of_dask(client):
    def weighed(block, row, weight, block_info=None):
        block *= row  # which overwrites neither array
        row[...] = 0
        return block * weight + (block_info[0]["chunk-location"][1] if block_info else 0)

    x, row = (persisted(client, on_gpu(a, (30, 45))) for a in (X, X[:1]))
    options = {"depth": [{0: 2}, 0], "boundary": "periodic", "dtype": float}
    y = dask_p2p.map_overlap(weighed, x, row, weight=da.ones(3).sum(), **options)
    expected = X * X[:1] * 3 + np.repeat([0, 1], 45)
    np.testing.assert_array_equal(on_host(persisted(client, y)), expected)
    np.testing.assert_array_equal(on_host(persisted(client, y * 1)), expected)
    for retained, values in ((x, X), (row, X[:1])):
        np.testing.assert_array_equal(on_host(retained), values)


def test_a_block_that_stays_is_handed_on(client):
    x = persisted(client, on_gpu(X, (30, 90)))
    y = persisted(client, dask_p2p.rechunk(x, ((30, 60, 30), (90,))))

    def same(a, b, dask_worker):
        blocks = [dask_worker.data.get(key) for key in (a, b)]
        return None if blocks[0] is None or blocks[1] is None else blocks[0] is blocks[1]

    results = set(client.run(same, (x.name, 0, 0), (y.name, 0, 0)).values())
    assert results == {True, None}


RNG = np.random.default_rng(0)
COMPLEX = RNG.standard_normal((24, 30, 35)) + 1j * RNG.standard_normal((24, 30, 35))
CUTS = [(6, -1, -1), (-1, 8, -1), (-1, -1, 9), (12, 15, -1), (12, 15, 18)]
PRECISION = {"f": 1e-6, "F": 1e-6, "d": 1e-13, "D": 1e-13}


def assert_close(actual, expected, char):
    assert actual.shape == expected.shape
    bound = PRECISION[char] * np.abs(expected).max(initial=0)
    assert np.abs(actual - expected).max(initial=0) <= bound


def declared(y):
    """Whether all blocks are CuPy's and of the declared dtype."""
    dtype = y.dtype

    def check_declared(block):
        kind = type(block).__module__.partition(".")[0]
        return np.full((1,) * block.ndim, kind == "cupy" and block.dtype == dtype)

    chunks, meta = tuple((1,) * n for n in y.numblocks), np.empty((0,) * y.ndim, bool)
    return bool(y.map_blocks(check_declared, chunks=chunks, meta=meta).compute().all())


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
@pytest.mark.parametrize("chunks", CUTS, ids=str)
@pytest.mark.parametrize(
    ("char", "real"), [*((char, False) for char in "fFdD"), ("f", True), ("d", True)]
)
def test_there_and_back(client, transport, chunks, char, real):
    a = COMPLEX.real.astype(char) if char in "fd" else COMPLEX.astype(char)
    wide = a.astype("d" if real else "D")
    x = persisted(client, on_gpu(a, chunks))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, (fft.rfftn if real else fft.fftn)(x))
        inverse = partial(fft.irfftn, s=a.shape) if real else fft.ifftn
        z = persisted(client, inverse(y, chunks=x.chunks))
    assert used(client, y) <= {transport}
    assert y.dtype == np.dtype("F" if char in "fF" else "D")
    assert z.dtype == (a.dtype if real else y.dtype)
    assert declared(y)
    assert declared(z)
    assert_close(on_host(y), (np.fft.rfftn if real else np.fft.fftn)(wide), char)
    assert z.chunks == x.chunks
    assert_close(on_host(z), wide, char)
    np.testing.assert_array_equal(on_host(x), a)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1), (0, 2), (1,), (0,)])
def test_blocks_that_lie_otherwise(client, axes, real):
    """Views, and blocks as Fortran has them, are read as they lie, and stay what they are."""
    a = COMPLEX.real.copy() if real else COMPLEX
    transformed, restored, numpy_transform = (
        (fft.rfftn, fft.irfftn, np.fft.rfftn) if real else (fft.fftn, fft.ifftn, np.fft.fftn)
    )
    expected, s = numpy_transform(a, axes=axes), [a.shape[axis] for axis in axes]
    for lies in (lambda block: block.copy(order="F"), lambda block: block.repeat(2, 2)[..., ::2]):
        x = persisted(client, on_gpu(a, (12, -1, -1)).map_blocks(lies))
        y = persisted(client, transformed(x, axes=axes))
        assert_close(on_host(y), expected, "D")
        assert_close(on_host(persisted(client, restored(y, s=s, axes=axes))), a, "D")
        np.testing.assert_array_equal(on_host(x), a)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("n", [None, 17, 64])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_along_one_axis(client, name, n, norm):
    a = COMPLEX if name not in ("rfft", "ihfft") else COMPLEX.real
    for axis in range(3):
        y = persisted(client, getattr(fft, name)(on_gpu(a, (12, 15, 18)), n, axis, norm))
        assert declared(y)
        assert_close(on_host(y), getattr(np.fft, name)(a, n, axis, norm), "d")


@pytest.mark.parametrize("char", "?bHle")
def test_dtypes_that_are_converted(client, char):
    a = (COMPLEX.real > 0).astype(char)
    y = persisted(client, fft.fftn(on_gpu(a, (6, -1, -1))))
    assert y.dtype == np.dtype("F" if char == "e" else "D")
    assert declared(y)
    assert_close(on_host(y), np.fft.fftn(a.astype("d")), "F" if char == "e" else "D")


def test_empty_blocks_shifts_and_frequencies(client):
    assert on_host(fft.fftn(on_gpu(COMPLEX[:0], (1, 15, -1)), axes=(1, 2))).shape == (0, 30, 35)
    x = on_gpu(COMPLEX, (7, 15, -1))
    np.testing.assert_array_equal(on_host(fft.fftshift(x)), np.fft.fftshift(COMPLEX))
    k = fft.fftfreq(30, 0.5, chunks=7, like=x)
    assert declared(k)
    np.testing.assert_allclose(on_host(k), np.fft.fftfreq(30, 0.5))


ROWS = np.random.default_rng(0).random((128, 96))


@pytest.mark.parametrize("count", [1, 2])
def test_small_and_empty_blocks(client, count):
    def slope(*blocks):
        assert all(block.size for block in blocks)
        return (sum(blocks)[1:] - sum(blocks)[:-1]).sum() * 0 + blocks[0]

    x = persisted(client, on_gpu(ROWS, (16, -1)))
    for chunks in (((0, 100, 1, 27), (96,)), ((128,), (0, 90, 6)), ((0, 128), (96, 0))):
        small = dask_p2p.rechunk(x, chunks)
        stock = da.from_array(ROWS, chunks=chunks).map_overlap(np.copy, {0: 2}, dtype=ROWS.dtype)
        with dask_p2p.install() as used:
            y = da.map_overlap(slope, *[small] * count, depth={0: 2}, dtype=ROWS.dtype)
        assert used.count == 1
        assert y.chunks == stock.chunks
        np.testing.assert_array_equal(on_host(y), ROWS)
        result = dask_p2p.map_overlap(slope, *[small] * count, depth={0: 2}, dtype=ROWS.dtype)
        assert result.chunks == chunks
        np.testing.assert_array_equal(on_host(result), ROWS)


def test_unknown_sizes(client):
    x = persisted(client, on_gpu(ROWS, (16, -1)))
    rows = x[x[:, 0] > 0.5]
    with dask_p2p.install():
        y = rows.rechunk({1: 12}, method="p2p")
    np.testing.assert_array_equal(on_host(y), ROWS[ROWS[:, 0] > 0.5])


def test_what_the_same_code_does_without(client):
    """Once Dask's own way takes CuPy blocks, all this is of less use."""
    x = persisted(client, on_gpu(ROWS, (16, -1)))
    y = x.rechunk({0: -1, 1: 12}).map_blocks(lambda block: block.get(), meta=np.empty((0, 0)))
    with dask.config.set({"distributed.p2p.storage.disk": False}):
        future = client.compute(y)
    with pytest.raises(Exception, match=r"(?i)p2p|shuffl|cupy|buffer"):
        result_of(client, future)
