from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from dask_p2p.errors import InputError
from dask_p2p.sections.exchange.device import HOST
from dask_p2p.sections.exchange.values import LastOut, copied, decoded_small, encoded, small_frame
from dask_p2p.sections.wire.frames import small_value, value_message
from dask_p2p.sections.wire.mailbox import MOST_BYTES

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
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype} {array.shape}")
def test_arrays_keep_dtype_shape_and_order(array):
    array_copy = copied(array, HOST)
    assert (array_copy.dtype, array_copy.shape) == (array.dtype, array.shape)
    assert array_copy.tobytes("A") == array.tobytes("A")
    assert array_copy.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    assert array_copy.flags.writeable
    assert not np.may_share_memory(array_copy, array)


def test_tuples_and_dicts_have_their_structure():
    array = np.arange(3)
    value = {"a": (1, array, ()), 2: {"b": np.float32(0.5), "c": 2.0 * array}}
    value_copy = copied(value, HOST)
    assert list(value_copy) == ["a", 2]
    assert value_copy["a"][0] == 1
    assert value_copy["a"][2] == ()
    assert value_copy["a"][1].tolist() == [0, 1, 2]
    assert value_copy[2]["b"].dtype == "f4"
    assert value_copy[2]["c"].tolist() == [0.0, 2.0, 4.0]


def test_equal_structures_of_other_types_are_not_confused():
    """Descriptions are cached, and 1 equals 1.0 and True."""
    for value in ({1: 1}, {1: 1.0}, {1: True}):
        (value_copy,) = copied(value, HOST).values()
        assert type(value_copy) is type(value[1])


@pytest.mark.parametrize(
    ("value", "error"),
    [(threading.Lock(), "got lock"), ({"a": (1, (n for n in ()))}, "got generator")],
)
def test_values_without_a_pickle_are_refused(value, error):
    with pytest.raises(InputError, match=f"value: expected.* {error}.* Send the numbers, arrays"):
        encoded(value, HOST)


State = namedtuple("State", "u v")


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        bytearray(b"bytes"),
        None,
        [],
        [1, "two", None, [3.0]],
        {"name": "run-1", "tags": ["a", "b"], "debug": None},
        {1.5: 2, True: {3}},
        2**64,
        Fraction(1, 3),
        State(1, (2, "x")),
        ("a", 1, {"b": ["c"]}),
    ],
    ids=repr,
)
def test_any_other_object_arrives_as_it_is(value):
    received = copied(value, HOST)
    assert (received, type(received)) == (value, type(value))


def test_masks_and_classes_of_arrays_are_kept():
    _, masked = copied((1, np.ma.masked_array([1.0, 2.0], [False, True])), HOST)
    assert masked.mask.tolist() == [False, True]
    assert copied(np.array([None, "a"]), HOST).tolist() == [None, "a"]
    series = pd.Series([1.0, 2.0], index=["a", "b"], name="t")
    pd.testing.assert_series_equal(copied(series, HOST), series)


def test_classes_of_the_program_are_pickled_by_value():
    @dataclass
    class Settings:
        name: str
        table: np.ndarray

    received = copied([Settings("run", np.arange(3))], HOST)[0]
    assert type(received) is Settings
    assert (received.name, received.table.tolist()) == ("run", [0, 1, 2])


NUMBERS = [True, False, 0, -(2**63), 2**63 - 1, 2.5, float("inf"), 1j, np.float32(0.5)]


def small(value):
    """Return the description and the bytes of a small value, from its message; else None."""
    frame = small_frame(value, 3, 5)
    if frame is None:
        return None
    tag, communicator, description, data = small_value(frame)
    assert (tag, communicator) == (3, 5)
    return description, data


@pytest.mark.parametrize("value", [*ARRAYS, *NUMBERS], ids=repr)
def test_values_have_the_same_bytes_as_large_ones(value):
    description, parts = encoded(value, HOST)
    if (frame := small(value)) is not None:
        message = value_message(3, 5, description, parts, has_address=False)
        assert small_frame(value, 3, 5) == b"".join(message.buffers)
        value_copy = decoded_small(*frame, None, HOST)
        assert type(value_copy) is type(value)
        assert (np.asarray(value_copy) == np.asarray(value)).all()
        assert getattr(value_copy, "dtype", None) == getattr(value, "dtype", None)
        assert not isinstance(value_copy, np.ndarray) or value_copy.flags.writeable


def test_which_values_are_small():
    assert None not in map(small, (1, True, 0.5, np.zeros(3), np.zeros((2, 2), "i2")))
    large = np.zeros(MOST_BYTES // 8 + 1)
    large_values = (2**63, "text", None, (1, 2), large, np.arange(9)[::2], np.ma.masked_array([1]))
    assert {*map(small, large_values)} == {None}


@pytest.mark.parametrize("dtype", ["f8", ">f8", "f2", "c16", "?", "i1", ">u4", "g"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (300,)])
def test_the_last_memory_is_filled_again(dtype, shape):
    values = [np.full(shape, number, dtype) for number in (1, 0, 1)]
    out, second_array, last = np.zeros(shape, dtype), np.zeros(shape, dtype), LastOut()
    frame, (_, data) = small_frame(values[0], 3, 5), small(values[0])
    assert not last.fill(out, 3, frame)
    last.set(out, 3, frame, len(frame) - len(data))
    for value in values:
        frame = small_frame(value, 3, 5)
        assert last.fill(out, 3, frame)
        assert (out == value).all()
        assert not last.fill(second_array, 3, frame)
        assert not last.fill(out, 4, frame), "another tag is received"
        for changed in ((4, 5), (3, 6)):
            assert not last.fill(out, 3, small_frame(value, *changed))
        assert not last.fill(out, 3, small_frame(np.zeros((*shape, 2), dtype), 3, 5))
    assert not second_array.any()
