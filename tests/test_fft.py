import sys
from functools import partial
from itertools import pairwise, product

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.fft
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p import fft
from dask_p2p.backends.numpy import NumpyBackend
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.ops.fft import local as local_fft
from tests import support
from tests.support import layers_of, noted, persisted, run_of, spread

ALONG_ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
ALONG_MANY = ["fftn", "ifftn", "rfftn", "irfftn"]
ALONG_TWO = ["fft2", "ifft2", "rfft2", "irfft2"]
OF_REAL = {"rfft", "ihfft", "rfftn", "rfft2"}
PRECISION = {"f": 1e-6, "F": 1e-6, "d": 1e-14, "D": 1e-14}


def numbers(shape, dtype="D"):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def assert_close(result, expected, char="d"):
    """The largest error is small beside the largest value."""
    result = result.compute(scheduler="sync") if isinstance(result, da.Array) else result
    assert result.shape == expected.shape
    largest = np.abs(expected).max(initial=0)
    assert np.abs(result - expected).max(initial=0) <= PRECISION[char] * largest


def in_double(x):
    return x.astype("D" if x.dtype.kind == "c" else "d")


@st.composite
def cut_shapes(draw, least=1, max_ndim=3, shortest=1):
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=least, max_size=max_ndim))
    chunks = []
    for length in lengths:
        inner = draw(st.lists(st.integers(0, length), max_size=2))
        chunks.append(tuple(b - a for a, b in pairwise(sorted({0, length, *inner}))) or (0,))
    return tuple(lengths), tuple(chunks)


NORMS = st.sampled_from([None, "backward", "ortho", "forward"])


@given(
    cut_shapes(),
    st.sampled_from(ALONG_ONE),
    st.integers(-3, 2),
    st.one_of(st.none(), st.integers(1, 14)),
    NORMS,
    st.sampled_from("fdFD"),
)
def test_along_one_axis(case, name, axis, n, norm, char):
    shape, chunks = case
    char = char.lower() if name in OF_REAL else char
    axis = axis % len(shape)
    if n is None and name in ("irfft", "hfft") and shape[axis] == 1:
        n = 1
    x = numbers(shape, char)
    result = getattr(fft, name)(da.from_array(x, chunks=chunks), n, axis, norm)
    expected = getattr(np.fft, name)(in_double(x), n, axis, norm)
    check(result, expected, char)


def check(result, expected, char):
    """Dtype and chunks are as declared, values as expected."""
    is_complex = expected.dtype.kind == "c"
    assert result.dtype == {"f": "fF", "d": "dD"}[char.lower()][is_complex]
    assert result.compute(scheduler="sync").dtype == result.dtype
    layers_of(result)
    for index in np.ndindex(result.numblocks):
        shape = tuple(sizes[i] for sizes, i in zip(result.chunks, index, strict=True))
        assert result.blocks[index].compute(scheduler="sync").shape == shape
    assert_close(result, expected, char)


@given(st.data())
def test_along_several_axes(data):
    shape, chunks = data.draw(cut_shapes(2))
    name = data.draw(st.sampled_from(ALONG_MANY + ALONG_TWO))
    char = data.draw(st.sampled_from("fd" if name in OF_REAL else "fdFD"))
    axes = (-2, -1)
    if name in ALONG_MANY:
        axes = data.draw(st.permutations(range(len(shape))))
        axes = tuple(axes[: data.draw(st.integers(1, len(axes)))])
    lengths = st.integers(1, 11) | st.just(-1)  # -1: the input's
    s = data.draw(st.one_of(st.none(), st.tuples(*(lengths for _ in axes))))
    if s is None and shape[axes[-1]] == 1:
        s = tuple(shape[axis] for axis in axes)
    norm = data.draw(NORMS)
    x = numbers(shape, char)
    expected = getattr(np.fft, name)(in_double(x), s, axes, norm)
    after = data.draw(st.none() | st.tuples(*(st.integers(1, n) for n in expected.shape)))
    result = getattr(fft, name)(da.from_array(x, chunks=chunks), s, axes, norm, chunks=after)
    if after is not None:
        assert result.chunks == da.core.normalize_chunks(after, expected.shape)
    check(result, expected, char)


@pytest.fixture
def lose_scipy():
    """Have it not be there, to the end of the test."""
    choose = local_fft._import_fft_module
    with pytest.MonkeyPatch.context() as patch:

        def lose():
            patch.setitem(sys.modules, "scipy.fft", None)
            choose.cache_clear()

        choose.cache_clear()
        yield lose
    choose.cache_clear()


@pytest.mark.parametrize(
    ("char", "has_scipy", "name"),
    [
        *support.pairwise("?bBhHiIlLefdg", [True, False], ["fftn", "irfftn", "rfftn"]),
        *support.pairwise("FDG", [True, False], ["fftn", "irfftn"]),
    ],
)
def test_dtypes_are_what_the_docs_say(char, name, has_scipy, lose_scipy):
    if not has_scipy:
        lose_scipy()
    x = np.ones((4, 6), char)
    result = getattr(fft, name)(da.from_array(x, chunks=(2, 3)))
    single = char in "efF"
    expected = np.dtype("F" if single else "G" if char in "gG" else "D")
    expected = np.empty(0, expected).real.dtype if name == "irfftn" else expected
    values = result.compute(scheduler="sync")
    assert result.dtype == values.dtype == expected
    wide = getattr(np.fft, name)(in_double(x))
    np.testing.assert_allclose(values, wide, atol=1e-5 if single else 1e-13)


def test_scipy_is_used_where_it_is_and_numpy_where_not(lose_scipy, monkeypatch):
    used = set()
    for library, name in product((scipy.fft, np.fft), ("fft", "fftn")):
        note = partial(lambda module, *_, **__: used.add(module), library.__name__)
        noted(monkeypatch, library, name, note)
    y = fft.fftn(da.from_array(numbers((6, 8), "D"), chunks=(2, 8)))
    for module in ("scipy.fft", "numpy.fft"):
        used.clear()
        y.compute(scheduler="sync")
        assert used == {module}
        lose_scipy()


def layers(y):
    return sum(name.startswith("p2p-fft") for name in layers_of(y))


def test_what_is_whole_moves_nothing_and_pencils_move_twice():
    x = da.from_array(numbers((8, 8, 8)), chunks=(4, 4, -1))
    assert layers(fft.fft(x)) == 0
    assert layers(fft.fftn(x)) == 2
    assert layers(fft.fft2(x, axes=(0, 2))) == 1
    slabs = ((8,), (8,), (2,) * 4)
    assert layers(fft.fftn(x, chunks=slabs)) == 1
    assert layers(fft.ifftn(fft.fftn(x, chunks=slabs), chunks=x.chunks)) == 2


@pytest.mark.parametrize("shape", [(12, 10, 9), (9, 12, 7), (7, 8, 23)])
@pytest.mark.parametrize(
    ("cut", "real"),
    [
        *(((axis,), False) for axis in range(3)),
        *((cut, False) for cut in ((0, 1), (0, 2), (1, 2))),
        *((cut, True) for cut in ((0,), (1,), (0, 1))),  # the last axis is transformed first
    ],
)
def test_round_trips_of_uneven_chunks(shape, cut, real):
    a = numbers(shape, "d" if real else "D")
    chunks = tuple((n - 3, 1, 2) if i in cut else (n,) for i, n in enumerate(shape))
    x = da.from_array(a, chunks=chunks)
    y = fft.rfftn(x) if real else fft.fftn(x)
    factors = (y.shape[0] - np.arange(y.shape[0]))[:, None, None]
    z = fft.irfftn(y * factors, s=shape) if real else fft.ifftn(y * factors)
    assert z.chunks == x.chunks
    assert layers(y) == len(cut)
    assert layers(z) == 2 * len(cut)
    assert_close(fft.irfftn(y, s=shape) if real else fft.ifftn(y), a)


def test_chunks_of_before_are_left_where_they_do_not_fit_or_cost_more():
    x = da.from_array(numbers((12, 10)), chunks=((9, 1, 2), -1))
    y = fft.fft2(x)
    assert fft.ifft2(y, (8, 10)).shape == (8, 10)
    assert fft.ifft(y, axis=1).chunks == fft.ifft(y.rechunk(y.chunks), axis=1).chunks
    assert fft.ifft2(y.rechunk((3, -1))).numblocks == (1, 4)
    assert fft.ifft2(y).chunks == x.chunks


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (0, 8), (8, 0, 4)])
@pytest.mark.parametrize("name", ["fft", "rfft", "irfft"])
def test_short_and_empty_arrays(shape, name):
    x = numbers(shape, "d")
    result = getattr(fft, name)(da.from_array(x, chunks=(4,) * x.ndim), 6)
    assert_close(result, getattr(np.fft, name)(x, 6))


@pytest.mark.parametrize("chunks", [((4, 0, 4), (0, 6)), ((0, 8), (3, 0, 3)), ((1,) * 8, (1,) * 6)])
@pytest.mark.parametrize("name", ["fft2", "rfft2", "irfft2"])
def test_empty_blocks_and_more_blocks_than_elements(chunks, name):
    a = numbers((8, 6), "d")
    result = getattr(fft, name)(da.from_array(a).rechunk(chunks))
    assert_close(result, getattr(np.fft, name)(a))
    short = fft.fft2(da.from_array(a[:, :2], chunks=(1, 2)))  # eight blocks along an axis of two
    assert short.numblocks == (1, 2)
    assert_close(short, np.fft.fft2(a[:, :2]))


def test_the_input_keeps_its_values():
    a = numbers((8, 8))
    x = da.from_array(a.copy(), chunks=(4, 8)).persist(scheduler="sync")
    assert_close(fft.fftn(fft.fftn(x)), np.fft.fftn(np.fft.fftn(a)))
    assert_close(fft.ifftn(x), np.fft.ifftn(a))
    np.testing.assert_array_equal(x.compute(scheduler="sync"), a)


def test_very_many_blocks():
    a = numbers((12, 12, 3))
    x = da.from_array(a, chunks=(2, -1, -1))
    with dask.config.set({"p2p.groups": 2}):
        y = fft.fftn(x)
    assert y.numblocks == (1, 6, 1)
    assert_close(y, np.fft.fftn(a))


@pytest.mark.parametrize(
    ("on_device", "length", "axis"), [(True, 6, 0), (True, 4, 2), (False, 6, 2)]
)
def test_blocks_lie_as_gpus_transform_them(on_device, length, axis, monkeypatch):
    x = da.from_array(numbers((length, 6, 8)), chunks=(length // 2, -1, -1))
    with monkeypatch.context() as patch:
        patch.setattr(NumpyBackend, "on_device", on_device)
        y = fft.fftn(x)
    block = dask.get(dict(y.dask), (y.name, 0, 0, 0))
    assert block.strides[axis] == block.itemsize
    assert_close(block, np.fft.fftn(numbers((length, 6, 8)))[:, :3])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 1001])
@pytest.mark.parametrize("d", [1.0, 0.3])
@pytest.mark.parametrize("name", ["fftfreq", "rfftfreq"])
def test_frequencies(n, d, name):
    result = getattr(fft, name)(n, d, chunks=3, like=np.ones(2))
    assert set(result.chunks[0][:-1]) <= {3}
    np.testing.assert_array_equal(result.compute(scheduler="sync"), getattr(np.fft, name)(n, d))


@pytest.mark.parametrize("chunks", [(1, 4), [2, 3], (1, 0, 4), ((2, 3),), (5,), {0: (1, 4)}])
def test_chunks_of_frequencies_are_those_of_arange(chunks):
    expected = da.arange(5, chunks=chunks).chunks if not isinstance(chunks, dict) else ((1, 4),)
    for frequencies in (fft.fftfreq(5, chunks=chunks), fft.rfftfreq(8, chunks=chunks)):
        assert frequencies.chunks == expected


@given(cut_shapes(1, 3, 0), st.data())
def test_shifts(case, data):
    shape, chunks = case
    axes = data.draw(st.one_of(st.none(), st.sampled_from(range(len(shape)))))
    after = data.draw(st.one_of(st.none(), st.just(tuple((n // 2, n - n // 2) for n in shape))))
    x = np.arange(int(np.prod(shape))).reshape(shape)
    for name in ("fftshift", "ifftshift"):
        result = getattr(fft, name)(da.from_array(x, chunks=chunks), axes, chunks=after)
        assert result.chunks == (after or chunks)
        expected = getattr(np.fft, name)(x, axes)
        np.testing.assert_array_equal(result.compute(scheduler="sync"), expected)


X = da.ones((8, 8), chunks=(4, 4))
WHOLE = da.ones((8, 8))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fft.fft(np.ones(3)), UnsupportedArrayError, "expected a Dask array"),
        (lambda: fft.fft(X.astype(object)), UnsupportedArrayError, "dtype object"),
        (lambda: fft.fft(X.astype("M8[s]")), UnsupportedArrayError, "got dtype dateti.*astype"),
        (lambda: fft.fft(da.ma.masked_equal(X, 1)), UnsupportedArrayError, "asked"),
        (lambda: fft.fft(X[X[:, 0] > 0]), InputError, "compute_chunk_sizes"),
        (lambda: fft.fftn(X, axes=(0, -2)), InputError, "each once"),
        (lambda: fft.fftn(X, axes=(0, 2)), InputError, "2 dimensions"),
        (lambda: fft.rfftn(X, axes=()), InputError, "axes="),
        (lambda: fft.fft(X, axis=2), InputError, "axes="),
        (lambda: fft.fft(X, axis="x"), InputError, "axes="),
        (lambda: fft.fft(X.sum()), InputError, "0 dimensions"),
        (lambda: fft.fft(X, 0), InputError, "at least 1, got n=0"),
        (lambda: fft.fft(X, 2.5), InputError, "n=2.5"),
        (lambda: fft.fftn(X, (4, 0)), InputError, "axis 1, at least 1"),
        (lambda: fft.fftn(X, (4,), (0, 1)), InputError, "a length for each"),
        (lambda: fft.fftn(X, 4), InputError, "sequence of lengths"),
        (lambda: fft.irfft(X[:, :1]), InputError, "at least 1, got n=0"),
        (lambda: fft.fft(X, norm="unit"), InputError, "got norm='unit'"),
        (lambda: fft.rfft(X.astype("F")), InputError, "x.real"),
        (lambda: fft.fft(X, chunks=(3, "x")), InputError, "chunks="),
        (lambda: fft.fft(X, chunks=((4, 4), (9,))), InputError, "shape .8, 8."),
        (lambda: fft.fftn(X, (4, "8")), InputError, "axis 1"),
        (lambda: fft.fftshift(X, (0, 0)), InputError, "each once"),
        (lambda: fft.fftshift(X, chunks=((4, 3), 8)), InputError, "chunks"),
        (lambda: fft.fftfreq(0), InputError, "at least 1"),
        (lambda: fft.rfftfreq(4, 0), InputError, "got d=0"),
        (lambda: fft.fftfreq(4, "1"), InputError, "got d='1'"),
        (lambda: fft.fftfreq(4, float("nan")), InputError, "got d=nan"),
        (lambda: fft.fftfreq(4, chunks="foo"), InputError, "got chunks='foo'"),
        (lambda: fft.rfftfreq(4, chunks=((3, 3),)), InputError, r"of shape \(3,\)"),
        (lambda: fft.fft(WHOLE[WHOLE[:, 0] > 0], chunks=4), InputError, "compute_chunk_sizes"),
        (lambda: fft.fft(X[X[:, 0] > 0][:, :4], axis=0), InputError, "compute_chunk_sizes"),
    ],
)
def test_wrong_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_lengths_of_minus_one_of_an_axis_of_one_element():
    a = numbers((5, 1))
    result = fft.irfftn(da.from_array(a, chunks=(2, 1)), (9, -1), (0, 1))
    np.testing.assert_allclose(result.compute(), np.fft.irfftn(a, (9, -1), (0, 1)), atol=1e-12)


@pytest.mark.parametrize("name", ["fftn", "ifftn", "fft2", "ifft2"])
@pytest.mark.parametrize("char", "ifF")
def test_no_axes_leave_an_array_as_it_is(name, char):
    a = numbers((5, 11), char)
    x = da.from_array(a, chunks=(2, 4))
    of_none, function = getattr(np.fft, name)(a, axes=()), getattr(fft, name)
    for result in (function(x, axes=()), function(x, (), ()), function(x, axes=[], chunks=(5, 2))):
        assert result.dtype == of_none.dtype
        np.testing.assert_array_equal(result.compute(scheduler="sync"), of_none)
    assert result.chunks == ((5,), (2, 2, 2, 2, 2, 1))
    point = x[0, 0]
    assert fft.fftn(point).compute(scheduler="sync") == np.fft.fftn(a[0, 0])


def test_unknown_sizes_stay_where_nothing_moves():
    a = numbers((8, 6))
    x = da.from_array(a, chunks=(3, -1))
    result = fft.fft(x[x[:, 0].real > 0], 5, norm="ortho")
    assert np.isnan(result.shape[0])
    selected = a[a[:, 0].real > 0]
    np.testing.assert_allclose(result.compute(), np.fft.fft(selected, 5, norm="ortho"), atol=1e-14)
    inverse = np.fft.ifft(result.compute())
    np.testing.assert_allclose(fft.ifft(result).compute(), inverse, atol=1e-14)


@pytest.mark.parametrize("chunks", [(1, -1, -1), (5, 3, 4)], ids=str)
def test_on_workers(client, chunks):
    a = numbers((12, 10, 8), "d")
    x = spread(client, da.from_array(a, chunks=chunks))
    y = persisted(client, fft.rfftn(x))
    assert_close(y.compute(), np.fft.rfftn(a))
    z = persisted(client, fft.irfftn(y, s=a.shape))
    assert_close(z.compute(), a)
    assert run_of(client, y).moved_bytes > 0
    for array in (y, z):
        run = run_of(client, array)
        assert (run.operation, run.shape, run.blocks) == ("p2p-fft", array.shape, array.numblocks)
    np.testing.assert_array_equal(x.compute(), a)
