import threading
import time
from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.errors import InputError, SectionError, UnsupportedArrayError
from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import ORDERS, RankGrid
from dask_p2p.sections import Context
from dask_p2p.sections.exchange import regions
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import Connections
from tests.sections.gangs import connections_of, run_gang
from tests.support import bits, indexed, tune

DTYPES = [
    "?", "i1", ">i4", "f2", "f8", "c8", "longdouble", "M8[s]", "m8[ms]", "S3", "U2", "V5", "S0",
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
]  # fmt: skip


def raw(array):
    array = np.ascontiguousarray(array)
    return array.tolist() if array.dtype.names else array.tobytes()  # but for padding


@st.composite
def cases(draw):
    sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
    chunks = draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    ranks = RankGrid.at_most(chunks, draw(st.integers(1, 4)))
    axes = st.lists(st.integers(-len(chunks), len(chunks) - 1), min_size=1, max_size=3)
    partitions = [draw(axes | st.none()) for _ in range(2)]
    axes = draw(st.permutations(range(len(chunks))))
    return ranks, partitions, axes, draw(st.sampled_from(DTYPES))


@pytest.mark.parametrize("least_bytes", [(2**16, 256), (0, 256), (0, 1)])
@settings(max_examples=40, deadline=None)
@given(
    case=cases(), strided=st.booleans(), permuted=st.booleans(), exchange=st.sampled_from(ORDERS)
)
def test_ranks_get_their_blocks_of_another_partition(
    least_bytes, case, strided, permuted, exchange
):
    """And redistribute them back, into `out`; by messages, and by reading."""
    ranks, (partition, new_partition), axes, dtype = case
    shape = tuple(map(sum, ranks.chunks))
    x = bits(indexed(shape), dtype) if np.dtype(dtype).itemsize else np.zeros(shape, dtype)
    y = x.transpose(axes) if permuted else x
    order = {"axes": axes} if permuted else {}

    def there_and_back(ctx):
        a = x[box_slices(ctx.box_of(partition))]
        a = np.repeat(a, 2, axis=-1)[..., ::2][::-1][::-1] if strided else a.copy()
        before = a.copy()
        b = ctx.redistribute(a, new_partition or [0], partition, **order)
        assert raw(b) == raw(y[box_slices(ctx.box_of(new_partition or [0], y.shape))])
        assert raw(a) == raw(before), "the argument stays unchanged"
        out = np.empty_like(b)
        options = {**order, "out": out, "exchange": exchange}
        assert ctx.redistribute(a, new_partition or [0], partition, **options) is out
        assert raw(out) == raw(b)
        inverse_options = {"axes": np.argsort(axes)} if permuted else {}
        c = ctx.redistribute(b, partition, new_partition or [0], **inverse_options, shape=y.shape)
        assert raw(c) == raw(x[box_slices(ctx.box_of(partition))])
        d = ctx.redistribute(a, new_partition or [0], partition)
        assert raw(d) == raw(x[box_slices(ctx.box_of(new_partition or [0]))])

    with pytest.MonkeyPatch.context() as patched:
        tune(patched, read_bytes=least_bytes[0], read_run_bytes=least_bytes[1])
        run_gang(ranks, there_and_back)


X = np.arange(2.0**18).reshape(512, 512)
SLABS = RankGrid(((256, 256), (512,)), (2, 1))


def to_columns(ctx, x=X):
    columns = ctx.redistribute(x[box_slices(ctx.box)], (1,))
    assert np.array_equal(columns, x[box_slices(ctx.box_of((1,)))])


def test_contiguous_memory_is_read_by_threads():
    """Half a row, which has more than two pieces of a thread and a short last one."""
    x = np.arange(2 * 2 * 9_000_003, dtype="u4").reshape(2, -1)
    run_gang(RankGrid(((1, 1), (x.shape[1],)), (2, 1)), partial(to_columns, x=x))


def test_only_ranks_that_cannot_read_get_messages(monkeypatch):
    """The process of that number is another one, an option forbids reads, or hosts differ."""

    begin, sent = Connections.begin, []  # sizes of messages in bytes

    def counting(connections, call, sends, receives, in_background=False):
        if call.endswith("float64"):
            sent.extend(map(len, sends.values()))
        return begin(connections, call, sends, receives, in_background)

    def counted(ctx):
        to_columns(ctx)
        (_, count, _), *_ = connections_of(ctx).received
        assert count > 256 * 256 * 8

    monkeypatch.setattr(Connections, "begin", counting)
    run_gang(SLABS, counted)
    assert sent == [0, 0]
    obstacle, memory = regions.process_memory.obstacle, regions.process_memory

    def obstacle_of_another(pid, address, token):
        return obstacle(pid, address, bytes([*token[:-1], token[-1] ^ 1]))

    for owner, name, function, options, count in (
        (memory, "obstacle", obstacle_of_another, {}, 2),
        (memory, "obstacle", obstacle, {"reads_memory": False}, 2),
        (Connections, "is_on_other_host", lambda connections, rank: True, {}, 2),
        # Rank 1 reads memory of rank 0.
        (Connections, "is_on_other_host", lambda connections, rank: rank == 1, {}, 1),
    ):
        sent.clear()
        monkeypatch.setattr(owner, name, function)
        run_gang(SLABS, to_columns, **options)
        assert sent == [256 * 256 * 8] * count


def test_memory_that_has_gone_ends_the_attempt(monkeypatch):
    def gone(*args):
        raise OSError("no such process")

    monkeypatch.setattr(regions.process_memory, "read_into", gone)
    with pytest.raises(AttemptEndedError, match=r"memory of rank \d cannot be read"):
        run_gang(SLABS, to_columns)


def test_memory_stays_until_it_is_read(monkeypatch):
    """A rank does not return before the others have read its memory."""
    read, slept = regions.Reads.read, []

    def slowly(instance, holder, *args):
        if holder == 1:
            slept.append(time.sleep(0.1))
        return read(instance, holder, *args)

    monkeypatch.setattr(regions.Reads, "read", slowly)

    def overwriting(ctx):
        rows = X[box_slices(ctx.box)].copy()
        columns = ctx.redistribute(rows, (1,))
        rows[:] = -1
        assert np.array_equal(columns, X[box_slices(ctx.box_of((1,)))])

    run_gang(SLABS, overwriting)
    assert slept


def test_by_default_arrays_come_from_and_go_to_the_local_blocks():
    """Also after a permutation of axes, and with the chunks of the blocks."""
    x = np.arange(42.0).reshape(7, 3, 2)

    def cycled(ctx):
        a = x[box_slices(ctx.box)]
        b = ctx.redistribute(a, (0,), axes=(1, 2, 0))
        assert np.array_equal(b, x.transpose(1, 2, 0)[ctx.rank : ctx.rank + 1])
        assert np.array_equal(ctx.redistribute(a, axes=(1, 2, 0)), b)
        assert np.array_equal(ctx.redistribute(b, from_partition=(0,), axes=(2, 0, 1)), a)

    run_gang(RankGrid(((1, 4, 2), (3,), (2,)), (3, 1, 1)), cycled)


def test_what_is_wrong_is_named():
    ctx = Context(RankGrid(((4,), (3,)), (1, 1)))
    x = np.ones((4, 3))
    for argument, match in (
        ({"partition": (2,)}, r"partition: .* axes of an array of 2 dimensions, got \(2,"),
        ({"from_partition": (0.5,)}, "from_partition: expected a sequence of axes"),
        ({"axes": (0, 0)}, "axes: expected a permutation of 2 axes"),
        ({"shape": (4, -3)}, "shape: expected lengths of axes"),
        ({"exchange": "ring"}, "exchange: expected one of auto, diagonal, left-right, pairwise"),
        ({"shape": (3, 4)}, r"a: expected an array of shape \(3, 4\), .*got one of shape \(4, 3\)"),
        ({"out": np.empty((3, 4))}, r"out: expected an array of shape \(4, 3\) and dtype float64"),
        ({"out": np.empty((4, 3), "f4")}, "out: .*got \\(4, 3\\) and float32"),
        ({"out": [1]}, "out: .*got list and no dtype"),
        ({"out": x}, "out: expected a writable array that shares no memory"),
        ({"out": np.broadcast_to(1.0, (4, 3))}, "out: expected a writable array"),
    ):
        with pytest.raises(InputError, match=match):
            ctx.redistribute(x, **argument)
    with pytest.raises(InputError, match=r"a: .*cannot exchange Python objects"):
        ctx.redistribute(x.astype(object))
    with pytest.raises(UnsupportedArrayError, match=r"a: expected a plain numpy\.ndarray"):
        ctx.redistribute(np.ma.masked_equal(x, 1))


@pytest.mark.parametrize(
    ("calls", "match"),
    [
        (
            [{"partition": (0,)}, {"partition": (1,)}],
            r"redistribute\(\) of \(4, 4\), \(2, 1\) to \(1, 2\)",
        ),
        (
            [{"partition": (1,)}, {"partition": (1,), "exchange": "pairwise"}],
            "float64, pairwise on rank 1",
        ),
        ([{"partition": (1,)}, {"partition": (1,), "axes": (1, 0)}], r"axes \(0, 1\)"),
    ],
)
def test_calls_that_differ_are_an_error(calls, match):
    def differing(ctx):
        ctx.redistribute(np.ones((2, 4)), **calls[ctx.rank])

    with pytest.raises(SectionError, match=match):
        run_gang(RankGrid(((2, 2), (4,)), (2, 1)), differing)


def test_several_ranks_need_an_axis_that_is_divided():
    def undivided(ctx):
        ctx.redistribute(np.ones((2, 4)), ())

    with pytest.raises(InputError, match="partition: expected at least one axis that is divided"):
        run_gang(RankGrid(((2, 2), (4,)), (2, 1)), undivided)


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(10)[::-3],
    np.zeros((3, 0, 2), "i2"),
    np.array(2.5),
    np.array(["2020-01-01"], "M8[s]"),
    np.array([1, -1], "m8[ms]"),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8", (1,))]),
    np.array([b"ab", b"c"]),
    np.array(["ab", "c"]),
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
    np.arange(3, dtype="c8"),
    np.arange(3, dtype="f2"),
    np.ones(3, "V5"),
    np.arange(2000.0),  # too large for a slot
]
State = namedtuple("State", "u v")
OTHERS = [
    *(True, False, 0, -(2**63), 2**63 - 1, 2**64, 2.5, float("inf"), 1j, np.float32(0.5)),
    *("text", b"bytes", bytearray(b"bytes"), None, [], Fraction(1, 3), State(1, (2, "x"))),
    *([1, "two", None, [3.0]], ("a", 1, {"b": ["c"]}, ()), {1.5: 2, True: {3}}),
    {"name": "run-1", "tags": ["a", "b"], 2: {"b": np.float32(0.5)}},
]


@pytest.fixture(params=[1, 2], ids=["to itself", "to another rank"])
def received(request):
    """Return a function that sends a value, and returns what arrives."""

    def arrived(value):
        def exchanged(ctx):
            other = ctx.size - 1 - ctx.rank
            return ctx.sendrecv(value, other, other)

        return run_gang(RankGrid.at_most(((1, 1),), request.param), exchanged)[0]

    return arrived


def test_arrays_keep_dtype_shape_and_order(received):
    for array in ARRAYS:
        (alone,), in_tuple = received([array]), received((1, array))[1]
        for arrived in (received(array), in_tuple, alone):
            assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
            assert arrived.tobytes("A") == array.tobytes("A")
            assert arrived.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
            assert arrived.flags.writeable
            assert not np.may_share_memory(arrived, array)


def test_other_values_keep_their_types(received):
    for value in OTHERS:
        arrived = received(value)
        assert (arrived, type(arrived)) == (value, type(value))
    for value in ({1: 1}, {1: 1.0}, {1: True}):  # which are equal
        (number,) = received(value).values()
        assert type(number) is type(value[1])


def test_masks_and_classes_are_kept(received):
    @dataclass
    class Settings:
        name: str
        table: np.ndarray

    _, masked = received((1, np.ma.masked_array([1.0, 2.0], [False, True])))
    assert masked.mask.tolist() == [False, True]
    assert received(np.array([None, "a"])).tolist() == [None, "a"]
    series = pd.Series([1.0, 2.0], index=["a", "b"], name="t")
    pd.testing.assert_series_equal(received(series), series)
    settings = received([Settings("run", np.arange(3))])[0]
    assert type(settings) is Settings
    assert (settings.name, settings.table.tolist()) == ("run", [0, 1, 2])


@pytest.mark.parametrize(
    ("value", "error"),
    [(threading.Lock(), "got lock"), ({"a": (1, (n for n in ()))}, "got generator")],
)
def test_values_without_a_pickle_are_refused(received, value, error):
    with pytest.raises(InputError, match=f"value: expected.* {error}.* Send the numbers, arrays"):
        received(value)


@pytest.mark.parametrize("dtype", ["f8", ">f8", "f2", "c16", "?", "i1", ">u4", "g"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (300,)])
def test_the_last_memory_is_filled_again(dtype, shape):
    def exchanged(ctx):
        far, out = 1 - ctx.rank, np.zeros(shape, dtype)
        for number in (0, 1, 0, 1):
            value = np.full(shape, number, dtype)
            assert ctx.sendrecv(value, far, far, out=out) is out
            assert (out == value).all()
        with pytest.raises(InputError, match="out: expected"):
            ctx.sendrecv(np.zeros((*shape, 2), dtype), far, far, out=out)

    run_gang(RankGrid.at_most(((1, 1),), 2), exchanged)
