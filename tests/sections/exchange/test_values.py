"""Values of all kinds that a rank sends to itself, or to another one."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from dask_p2p.errors import InputError
from dask_p2p.plans.ranks import RankGrid
from tests.sections.gangs import run_gang

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
        return True

    assert all(run_gang(RankGrid.at_most(((1, 1),), 2), exchanged))
