import os

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import LocalBlock, PerRank, Same, Whole, spmd
from dask_p2p.errors import BlockMismatchError, InputError, SectionError, UnsupportedArrayError
from tests.sections.gangs import connections_of
from tests.sections.support import nothing_is_left

X = np.arange(240.0).reshape(24, 10)
CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def array():
    return da.from_array(X, chunks=((5, 7, 4, 8), (4, 6)))


def normalized(ctx, x, power=1):
    """Uses every call of the context."""
    ctx.barrier()
    total = ctx.allreduce(np.sum(x**power))
    most = ctx.allreduce(x.max(axis=0), "max")
    return x / total + most


def expected(power=1):
    return X / np.sum(X**power) + X.max(axis=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_exchange_and_leave_nothing(client, ranks):
    y = spmd(normalized, array(), ranks=ranks, power=2)
    assert y.chunks == array().chunks
    np.testing.assert_allclose(y.compute(), expected(2), rtol=1e-12)
    nothing_is_left(client)


@pytest.mark.parametrize(("rows", "ranks"), [(1023, 2), (1024, 4)])
def test_by_default_each_thread_has_a_rank_of_a_large_array(client, rows, ranks):
    """Ranks of one worker are slower for local blocks below 1 MiB."""
    x = da.ones((rows, 512), chunks=(256, 512))
    processes = spmd(lambda ctx, x: os.getpid(), x, outputs=PerRank(0)).compute()
    assert np.unique(processes, return_counts=True)[1].tolist() == [ranks // 2] * 2


@pytest.mark.parametrize("order", ["auto", ["comm"]])
def test_ranks_redistribute_large_arrays(client, order):
    """By reading each other's memory, or by messages if an option forbids reads."""

    def columns_doubled(ctx, x):
        connections, sent = connections_of(ctx), []
        begin = connections.begin

        def noted(call, sends, *args, **kwargs):
            sent.extend(map(len, sends.values()))
            return begin(call, sends, *args, **kwargs)

        connections.begin = noted
        columns = ctx.redistribute(x, (1,))
        connections.begin = begin
        assert (max(sent) < columns.nbytes // ctx.size // 2) == (order == "auto")
        columns *= 2
        return ctx.redistribute(columns, from_partition=(1,), out=x)

    x = np.arange(2.0**20).reshape(1024, 1024)  # whose rows are long enough to be read
    with dask.config.set({"p2p.transports.order": order}):
        y = spmd(columns_doubled, da.from_array(x, chunks=(200, 1024)), ranks=3)
        assert np.array_equal(y.compute(), 2 * x)


def test_each_rank_returns_values_of_its_own(client):
    def described(ctx, x):
        return x + 1, ctx.rank, [x.sum(), x.size]

    y, ranks, sums = spmd(described, array(), ranks=4, per_rank=(0, np.zeros(2)))
    assert (ranks.chunks, ranks.dtype) == (((1,) * 4,), np.int64)
    assert (sums.chunks, sums.dtype) == (((1,) * 4, (2,)), np.float64)
    values, ranks, sums = dask.compute(y, ranks, sums)
    assert np.array_equal(values, X + 1)
    assert ranks.tolist() == [0, 1, 2, 3]
    assert sums.sum(axis=0).tolist() == [X.sum(), X.size]
    for function, count in ((described, 3), (normalized, 1)):
        y, _ = spmd(function, array(), ranks=2, per_rank=(0,))
        with pytest.raises(BlockMismatchError, match=rf"output 0, per_rank\[0\] .* got {count} in"):
            y.compute()


@pytest.mark.parametrize(
    ("value", "op", "expected"),
    [
        (True, "sum", 4),
        (np.uint8(100), "sum", 400),
        (np.array([100, -100], np.int8), "prod", [100**4] * 2),
        (np.float32(0.5), "sum", np.float32(2)),
        (True, "min", np.True_),
    ],
)
def test_values_are_combined_as_numpy_reduces_them(client, value, op, expected):
    """Sums of ranks or of `uint8` elements do not overflow."""
    options = {"ranks": 4, "outputs": 0, "per_rank": [expected]}
    reductions = spmd(lambda ctx, x: ctx.allreduce(value, op), array(), **options).compute()
    assert reductions.tolist() == [np.asarray(expected).tolist()] * 4


def with_other_shapes(ctx, x, *arrays):
    """Return the whole of each array, as the ranks' boxes place their local blocks."""
    gathered = {}
    for number, local_block in enumerate(arrays):
        grid = ctx.grid_of(SHAPES[number])
        assert local_block.shape == tuple(stop - start for start, stop in grid.box)
        local_block += 1  # the function may write to it
        gathered[str(number)] = grid.gather(local_block)
    return {"x": x + sum(local_block.sum() for local_block in arrays), **gathered}


SHAPES = [(6, 12), (8, 3), (2, 25), (1, 12), (3, 1), (0, 5)]


@pytest.mark.parametrize("chunks", [(2, 3), (8, 4), (3, 12)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_inputs_of_other_shapes(client, ranks, chunks):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 9, shape) for shape in SHAPES]
    inputs = [da.from_array(array_, chunks=(4, 5)) for array_ in arrays]
    outputs = {"x": LocalBlock(), **{str(n): Same(array_) for n, array_ in enumerate(arrays)}}
    x = da.from_array(np.zeros((8, 12)), chunks=chunks)
    (results,) = dask.compute(spmd(with_other_shapes, x, *inputs, outputs=outputs, ranks=ranks))
    for number, array_ in enumerate(arrays):
        assert np.array_equal(results[str(number)], array_ + 1)
    total = sum(array_.sum() + array_.size for array_ in arrays)
    assert total in results["x"] if ranks == 1 else results["x"].max() < total


def test_an_exception_of_one_is_raised_by_all(client):
    def failing(ctx, x):
        if ctx.rank == 1:
            raise ZeroDivisionError("of rank 1")
        ctx.barrier()
        return x

    y = spmd(failing, array(), ranks=4).persist()
    for number in range(4):
        with pytest.raises(ZeroDivisionError, match="of rank 1"):
            y.blocks[number].compute()
    del y
    nothing_is_left(client)


def test_with_retries_all_ranks_come_again(client, tmp_path):
    def failing_once(ctx, x, path):
        if ctx.rank == 1 and not path.exists():
            path.touch()
            raise OSError("once")
        ctx.barrier()
        return x

    y = spmd(failing_once, array(), ranks=4, path=tmp_path / "failed")
    assert (y.compute(retries=1) == X).all()


def test_an_input_that_fails_ends_all(client):
    def fails(block, block_info=None):
        if block_info[0]["chunk-location"] == (2, 0):
            raise ZeroDivisionError("an input")
        return block

    y = spmd(normalized, array().map_blocks(fails, dtype="f8"), ranks=4)
    with pytest.raises((ZeroDivisionError, SectionError), match="an input"):
        y.compute()
    nothing_is_left(client)


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_without_a_cluster_there_is_one_rank(scheduler):
    with dask.config.set(scheduler=scheduler):
        np.testing.assert_allclose(spmd(normalized, array(), ranks=1).compute(), expected())
        with pytest.raises(InputError, match="expected a cluster for 4 ranks"):
            spmd(normalized, array(), ranks=4).compute()


def test_wrong_arguments_are_refused():
    def func(ctx, x):
        return x

    x, example = array(), "expected a number or a NumPy array as an example"
    for arguments, options, message in (
        ((x, func), {}, "expected a function of a context and arrays"),
        ((func,), {}, "at least one Dask array"),
        ((func, x), {"ranks": 0}, r"ranks, at least 1, got ranks=0.* Leave ranks= out"),
        ((func, x), {"outputs": "1"}, "number of outputs"),
        ((func, x, x.rechunk(3)), {}, "expected arrays of the first one's chunks"),
        ((func, x[x[:, 0] > 3]), {}, "known chunk sizes"),
        ((func, x, x[0]), {}, r"arrays of 2 axes, .* got one of shape \(10,\)\. Give"),
        ((func, x), {"per_rank": ({},)}, example),
        ((func, x), {"per_rank": 0.0}, r"per_rank: expected a list .* got 0.0. Give one as"),
    ):
        with pytest.raises(InputError, match=message):
            spmd(*arguments, **options)
    for arrays in ([X], [Whole(x)], [x, Whole(X)]):  # the first one; one that is not lazy
        with pytest.raises(UnsupportedArrayError, match="Dask array"):
            spmd(func, *arrays)


@pytest.mark.parametrize("other", ["i1", "?", "f4", "c8", "i8", "M8[s]"])
def test_each_output_keeps_its_dtype(other):
    """Sums of small integers and of booleans do not become floats."""
    x = da.from_array(X, chunks=6)
    more = da.from_array((X % 3).astype("i8").astype(other), chunks=6)

    def returned(ctx, a, b):
        assert b.dtype == other
        return a, b[::-1], a + 1

    y, flip, last = spmd(returned, x, more, outputs=3, ranks=1)
    assert (y.dtype, flip.dtype, last.dtype) == (X.dtype, np.dtype(other), X.dtype)
    y, flip, last = dask.compute(y, flip, last, scheduler="sync")
    assert (y.dtype, flip.dtype, last.dtype) == (X.dtype, np.dtype(other), X.dtype)
    assert np.array_equal(flip, more.compute()[::-1])


@pytest.mark.parametrize(
    ("dtype", "result"), [("f8", "?"), ("f8", "i8"), ("u8", "i8"), ("i4", "f8")]
)
def test_an_output_of_another_kind_is_refused_unless_its_dtype_is_named(dtype, result):
    x = da.from_array((X % 100).astype(dtype), chunks=6)

    def converted(ctx, a):
        return (a > 5).astype(result)

    with pytest.raises(BlockMismatchError, match=f"becomes {x.dtype} .*dtype='{np.dtype(result)}'"):
        spmd(converted, x, ranks=1).compute(scheduler="sync")
    y = spmd(converted, x, ranks=1, dtype=result)
    assert y.dtype == result
    array_ = y.compute(scheduler="sync")
    assert array_.dtype == result
    assert np.array_equal(array_, X % 100 > 5)


def test_outputs_may_have_dtypes_of_their_own():
    def described(ctx, a):
        return a / 2, a > 5, a.astype("i4")

    x = da.from_array(X, chunks=6)
    lazy = spmd(described, x, outputs=3, ranks=1, dtype=("f8", bool, np.int32))
    assert [item.dtype for item in lazy] == ["f8", "?", "i4"]
    assert [item.dtype for item in dask.compute(*lazy, scheduler="sync")] == ["f8", "?", "i4"]
    fields = spmd(
        lambda ctx, a: np.zeros(a.shape, "f8,i4"), x, ranks=1, dtype=[("f0", "f8"), ("f1", "i4")]
    )
    assert fields.compute(scheduler="sync").dtype == fields.dtype
    with pytest.raises(InputError, match=r"dtype: expected one for all .* each of 3, got 2"):
        spmd(described, x, outputs=3, ranks=1, dtype=("f8", bool))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_gets_the_whole_of_an_array(client, ranks):
    table = np.arange(35.0).reshape(5, 7)

    def scaled(ctx, x, table, y):
        assert table.shape == (5, 7)
        assert y.shape == x.shape
        table *= 2  # a copy of this rank
        return x * table.sum() + y

    x = array()
    y = spmd(scaled, x, Whole(da.from_array(table, chunks=(2, 3))), x + 1, ranks=ranks)
    values = x.compute()
    np.testing.assert_allclose(y.compute(), values * 2 * table.sum() + values + 1)
    lazy = spmd(scaled, x, Whole(da.from_array(table)), x + 1, outputs=LocalBlock(), ranks=ranks)
    np.testing.assert_allclose(lazy.compute(), y.compute())
