"""`map_on_gpu` on workers without a GPU: what it is called with, and what parts make together."""

from functools import partial

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import BlockMismatchError, ConfigError, InputError, UnsupportedArrayError
from tests.ops.stencils import cases, windows
from tests.transports.loopback import wait_until

X = np.random.default_rng(0).random((12, 10))
on_gpu = partial(dask_p2p.map_on_gpu, fallback="numpy")


def computed(y):
    return y.compute(scheduler="sync")


@given(case=cases(), axis=st.integers(0, 1), part_bytes=st.integers(1, 400))
def test_values_are_those_of_map_overlap(case, axis, part_bytes):
    chunks, depth, boundary = case
    axis = min(axis, len(chunks) - 1)
    x = da.from_array(np.random.default_rng(1).random(tuple(map(sum, chunks))), chunks=chunks)
    function = partial(windows, depth=depth)
    halo = {"depth": depth, "boundary": boundary}
    y = on_gpu(function, x, **halo, axis=axis, part_bytes=part_bytes, dtype="f8")
    expected = dask_p2p.map_overlap(function, x, **halo, dtype="f8")
    assert y.chunks == x.chunks
    np.testing.assert_array_equal(computed(y), computed(expected))


def test_parts_are_as_large_as_asked():
    lengths = []

    def noted(part, *, offset):
        lengths.append(part.shape)
        return part + offset

    x = da.from_array(X, chunks=(12, 5))
    y = on_gpu(noted, x, part_bytes=5 * 40, dtype="f8", offset=da.ones((), chunks=()))
    np.testing.assert_array_equal(computed(y), X + 1)
    assert lengths == 2 * [(4, 5), (4, 5), (4, 5)]
    lengths.clear()
    y = on_gpu(noted, x, axis=-1, depth={1: 1}, part_bytes=4 * 96, dtype="f8", offset=0)
    np.testing.assert_array_equal(computed(y), X)
    assert sorted(lengths) == [(12, 2), (12, 3), (12, 3), (12, 4), (12, 4), (12, 4)]


def test_several_arrays_are_broadcast():
    row, column = X[:1], X[:, :1]
    rows, columns = da.from_array(row, chunks=(1, 3)), da.from_array(column, chunks=(4, 1))
    arrays = da.from_array(X, chunks=(5, 4)), rows, da.from_array(X[0], chunks=10)
    for axis in (0, 1):
        y = on_gpu(lambda p, q, r: p * q + r, *arrays, axis=axis, part_bytes=100)
        np.testing.assert_array_equal(computed(y), X * row + X[0])
    outer = on_gpu(lambda p, q: p - q, columns, rows, part_bytes=64)
    np.testing.assert_array_equal(computed(outer), column - row)


def test_rims_of_several_arrays():
    def add_windows(p, q):
        return p + np.roll(q, 1, 0) + np.roll(q, -1, 0)

    x = da.from_array(X, chunks=(5, 4))
    for depth in ({0: 1}, [{0: 1}, {0: 1}]):
        y = on_gpu(add_windows, x, 2 * x, depth=depth, boundary="periodic", part_bytes=300)
        np.testing.assert_allclose(computed(y), add_windows(X, 2 * X))
    line = da.from_array(X[0], chunks=10)  # whose axis is the second one of the output
    y = on_gpu(lambda p, q: np.roll(p, 1, 0) * q, x, line, depth={0: 1}, boundary="periodic")
    np.testing.assert_array_equal(computed(y), np.roll(X, 1, 0) * X[0])
    row = da.from_array(X[:1], chunks=(1, 10))
    y = on_gpu(lambda p, q: np.roll(p, 1, 0) * q, x, row, depth={0: 1}, boundary="periodic")
    np.testing.assert_array_equal(computed(y), np.roll(X, 1, 0) * X[:1])


def test_another_dtype_and_another_length():
    x = da.from_array(X, chunks=(5, 5))
    y = on_gpu(lambda p: p[:, ::2] > 0.5, x, chunks=(x.chunks[0], (3, 3)), part_bytes=80)
    assert (y.dtype, y.shape) == (bool, (12, 6))
    expected = np.concatenate([X[:, 0:5:2], X[:, 5::2]], axis=1) > 0.5
    np.testing.assert_array_equal(computed(y), expected)
    y = on_gpu(lambda p: p.astype("f4"), x, meta=np.empty((0, 0), "f4"))
    assert computed(y).dtype == y.dtype == "f4"
    y = on_gpu(np.fft.rfft, x, chunks=(x.chunks[0], 3), part_bytes=80)
    assert y.dtype == "c16"
    np.testing.assert_array_equal(computed(y[:, :3]), np.fft.rfft(X[:, :5]))


def test_results_of_parts_are_combined():
    def histogram(part):
        return np.histogram(part, 4, (0, 1))[0][None]

    x = da.from_array(X, chunks=(6, 5))
    sums = on_gpu(lambda p: p.sum(0, keepdims=True), x, reduce=np.add, part_bytes=80)
    assert sums.chunks == ((1, 1), (5, 5))
    np.testing.assert_allclose(computed(sums.sum(0)), X.sum(0))
    counts = on_gpu(histogram, x, chunks=(1, 4), reduce=np.add, part_bytes=80)
    assert counts.shape == (2, 8)
    expected = np.histogram(X[:6, 5:], 4, (0, 1))[0]
    np.testing.assert_array_equal(computed(counts)[0, 4:], expected)

    def last(a, b):
        b += 0
        return b

    y = on_gpu(lambda p: p[:1], x, chunks=(1, 5), reduce=last, part_bytes=40)
    np.testing.assert_array_equal(computed(y), X[[5, 11]])
    # Rims are the function's to cut off where it reduces.
    options = {"depth": {0: (0, 1)}, "boundary": "nearest", "dtype": "f8", "part_bytes": 80}
    steps = on_gpu(
        lambda p: np.abs(np.diff(p, axis=0)).max(0, keepdims=True), x, reduce=np.maximum, **options
    )
    np.testing.assert_array_equal(computed(steps).max(0), np.abs(np.diff(X, axis=0)).max(0))


def test_a_function_is_told_which_block_it_is():
    def numbered(p, block_id):
        return p * 0 + 10 * block_id[0] + block_id[1]

    y = on_gpu(numbered, da.from_array(X, chunks=(6, 5)), part_bytes=40)
    np.testing.assert_array_equal(computed(y)[::6, ::5], [[0, 1], [10, 11]])


def test_empty_blocks_and_vectors():
    assert computed(on_gpu(np.negative, da.zeros((0, 3), chunks=(1, 3)))).shape == (0, 3)
    x = da.from_array(X[0], chunks=((4, 0, 6),))
    np.testing.assert_array_equal(computed(on_gpu(np.negative, x, part_bytes=16)), -X[0])


def only_small(part):
    if part.max() > 1:
        raise KeyError("too large")
    return part


def test_on_a_cluster(client):
    x = da.from_array(X, chunks=(5, 5))
    y = on_gpu(partial(windows, depth=((1, 1), (0, 0))), x, depth={0: 1}, dtype="f8")
    np.testing.assert_array_equal(y.compute(), windows(X.copy(), depth=((1, 1), (0, 0))))
    large = da.from_array(np.where(X[6, 0] == X, 2, X), chunks=(5, 5))
    with pytest.raises(KeyError, match="too large") as caught:
        on_gpu(only_small, large, dtype="f8", part_bytes=80).compute()
    assert "block (1, 0), part 1 of 3, which is 0 to 2 " in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match=r"on worker tcp://.*fallback='numpy'"):
        dask_p2p.map_on_gpu(np.sqrt, x).compute()


def names_of_tasks(dask_scheduler):
    return [str(key) for key in dask_scheduler.tasks if "p2p-on-gpu" in str(key)]


def test_runs_are_recorded(client):
    x = da.from_array(X, chunks=(1, 5))  # more blocks than threads: they are sent by and by
    y = on_gpu(np.sqrt, x, part_bytes=80)
    for _ in range(2):
        y.compute()
        wait_until(lambda: not client.run_on_scheduler(names_of_tasks))
    with pytest.raises(KeyError):
        on_gpu(only_small, x + 1, part_bytes=80, dtype="f8").compute()
    fused = on_gpu(np.sqrt, x) + 1
    fused.compute()
    last, failed, second, first = dask_p2p.last_runs(client, n=4)
    for run in (first, second):
        assert (run.name, run.shape, run.blocks, len(run.made)) == (y.name, (12, 10), (12, 2), 24)
        assert [record.parts for record in run.made] == [1] * 24
        assert all(record.function_s > 0 == record.up_s for record in run.made)
    assert failed.failures == ("KeyError: 'too large'",)
    assert last.name.partition("-add") == ("p2p-on-gpu-" + fused.name.rpartition("-")[2], "", "")


def test_without_a_gpu_it_says_so():
    y = dask_p2p.map_on_gpu(np.sqrt, da.from_array(X, chunks=(5, 5)))
    with pytest.raises(ConfigError, match=r"map_on_gpu\(sqrt.* none: on this process CuPy"):
        computed(y)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p: p[1:], r"float64 \(2, 5\) from lambda, got numpy.ndarray of float64 \(1, 5\)"),
        (lambda p: p > 0, "got numpy.ndarray of bool"),
        (lambda p: p.sum(), r"of float64 \(\)"),
        (lambda p: list(p), r"got builtins.list\. Give dtype="),
        (lambda p: None, "got builtins.NoneType"),
    ],
)
def test_results_that_do_not_fit_are_refused(function, words):
    y = on_gpu(function, da.from_array(X, chunks=(6, 5)), dtype="f8", part_bytes=80)
    with pytest.raises(BlockMismatchError, match=words) as caught:
        computed(y)
    assert "part 1 of 3" in caught.value.__notes__[0]


def test_a_reduction_that_does_not_fit_is_refused():
    x = da.from_array(X, chunks=(6, 5))
    y = on_gpu(lambda p: p[:1], x, dtype="f8", part_bytes=80, reduce=np.less)
    with pytest.raises(BlockMismatchError, match=r"lambda and reduce, got numpy.ndarray of bool"):
        computed(y)


def test_blocks_that_are_not_what_they_declare_are_refused():
    x = da.from_array(X, chunks=(6, 5)).map_blocks(lambda b: b[1:], dtype="f8")
    with pytest.raises(BlockMismatchError, match=r"\(6, 5\).*\(5, 5\)"):
        computed(on_gpu(np.sqrt, x))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: on_gpu(x, np.sqrt), InputError, "function first"),
        (lambda x: on_gpu("sqrt", x), InputError, "got 'sqrt'"),
        (lambda x: on_gpu(np.sqrt), InputError, "array after the function"),
        (lambda x: on_gpu(np.sqrt, X), UnsupportedArrayError, "from_array"),
        (lambda x: on_gpu(np.sqrt, x.astype(object)), UnsupportedArrayError, "that GPUs compute"),
        (lambda x: on_gpu(np.sqrt, x.astype(">f8")), UnsupportedArrayError, "astype"),
        (lambda x: on_gpu(np.sqrt, x[x[:, 0] > 0]), InputError, "compute_chunk_sizes"),
        (lambda x: on_gpu(np.add, x, x[:5]), InputError, "broadcast"),
        (lambda x: on_gpu(np.sqrt, x.max()), InputError, "without axes"),
        (lambda x: on_gpu(np.sqrt, x, axis=2), InputError, "2 axes of the output, got axis=2"),
        (lambda x: on_gpu(np.sqrt, x, axis="x"), InputError, "got axis='x'"),
        (lambda x: on_gpu(np.sqrt, x, part_bytes="much"), InputError, "got part_bytes='much'"),
        (lambda x: on_gpu(np.sqrt, x, part_bytes=0), InputError, "at least one byte"),
        (lambda x: on_gpu(np.sqrt, x, fallback="cpu"), InputError, "got 'cpu'"),
        (lambda x: on_gpu(np.sqrt, x, reduce=1), InputError, "reduce=1"),
        (lambda x: on_gpu(np.sqrt, x, depth=13), InputError, "no wider"),
        (lambda x: on_gpu(np.sqrt, x, depth=1, boundary="mirror"), InputError, "mirror"),
        (lambda x: on_gpu(np.sqrt, x, chunks=(5,)), InputError, "each of 2 axes"),
        (lambda x: on_gpu(np.sqrt, x, chunks=((5, 5), 4)), InputError, r"for \(3, 2\) blocks"),
        (lambda x: on_gpu(np.sqrt, x, chunks=(4, 5)), InputError, "axis 0, which is split"),
        (lambda x: on_gpu(np.sqrt, x, chunks="wide"), InputError, "got chunks='wide'"),
        (lambda x: on_gpu(lambda p: 1 / 0, x), InputError, "expected dtype=.*ZeroDivisionError"),
        (lambda x: on_gpu(np.sqrt, x, meta="f8"), InputError, "got meta='f8'"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_call(call, error, words):
    with pytest.raises(error, match=words):
        call(da.from_array(X, chunks=(5, 5)))


def test_what_it_takes_of_a_gpu_is_known_before():
    x = da.ones((1000, 100), chunks=(250, 100))
    y = dask_p2p.map_on_gpu(np.sqrt, x, depth={0: 2}, part_bytes=100 * 800, dtype="f4")
    estimate = dask_p2p.estimate(y)
    assert estimate.input_bytes == 3 * 70656  # 84 + 4 rows, in units of 512
    assert estimate.output_bytes == 4 * 35328, "one of them without its halos"
    assert estimate.total_bytes == estimate.input_bytes + estimate.output_bytes
    computed = on_gpu(np.sqrt, da.from_array(X, chunks=5)).persist(scheduler="sync")
    assert dask_p2p.estimate(computed, workers=2).input_bytes > 0, "of a transpose"
    short = dask_p2p.map_on_gpu(np.sqrt, da.ones((50, 8), chunks=((9, 10, 31), 8)), part_bytes=640)
    assert dask_p2p.estimate(short).total_bytes == 3 * 2 * 512


class ufunc:  # noqa: N801  # as CuPy's, which cannot be pickled
    __module__ = "cupy._core._kernel"

    def __init__(self, name):
        self.name = name

    def __call__(self, *args):
        raise AssertionError("NumPy's is called, which calls it")


def test_of_cupys_ufuncs_numpys_are_taken():
    x = da.arange(6, chunks=3)
    y = on_gpu(ufunc("cupy_negative"), x)
    np.testing.assert_array_equal(computed(y), -np.arange(6))
    assert on_gpu(np.copy, x, reduce=ufunc("cupy_add"), part_bytes=8).shape == (2,)
    with pytest.raises(InputError, match="got CuPy's ufunc cupyx_scipy_special_erf"):
        dask_p2p.map_on_gpu(ufunc("cupyx_scipy_special_erf"), x)
