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
from dask_p2p.sections.exchange.values import copied, encoded, leaves, with_leaves

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
    found = copied(array, HOST)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes("A") == array.tobytes("A")
    assert found.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    assert found.flags.writeable
    assert not np.may_share_memory(found, array)


@pytest.mark.parametrize("value", [True, 3, -(2**63), 2.5, 1j, np.int8(3), np.datetime64(1, "D")])
def test_numbers_keep_their_types(value):
    found = copied(value, HOST)
    assert (found, type(found)) == (value, type(value))


def test_tuples_and_dicts_have_their_structure():
    array = np.arange(3)
    value = {"a": (1, array, ()), 2: {"b": np.float32(0.5), "c": 2.0 * array}}
    found = copied(value, HOST)
    assert list(found) == ["a", 2]
    assert found["a"][0] == 1
    assert found["a"][2] == ()
    assert found["a"][1].tolist() == [0, 1, 2]
    assert found[2]["b"].dtype == "f4"
    assert found[2]["c"].tolist() == [0.0, 2.0, 4.0]


def test_equal_structures_of_other_types_are_not_confused():
    """Descriptions are cached, and 1 equals 1.0 and True."""
    for value in ({1: 1}, {1: 1.0}, {1: True}):
        (found,) = copied(value, HOST).values()
        assert type(found) is type(value[1])


def test_contiguous_arrays_are_not_copied():
    array = np.arange(6.0).reshape(2, 3)
    for each in (array, array.T):
        (part,) = encoded(each, HOST).parts
        assert np.may_share_memory(np.frombuffer(part), array)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (threading.Lock(), "got lock"),
        ({"a": (1, (n for n in ()))}, "got generator"),
    ],
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


def test_arrays_in_other_objects_are_not_copied_before_they_are_sent():
    array = np.arange(100.0)
    _, *parts = encoded([array, "u"], HOST).parts
    assert np.may_share_memory(np.frombuffer(parts[0]), array)
    received, name = copied([array, "u"], HOST)
    assert (received.tolist(), name) == (array.tolist(), "u")
    assert received.flags.writeable
    assert not np.may_share_memory(received, array)


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


def test_leaves_are_replaced_in_their_places():
    pair = namedtuple("pair", "x y")
    value = {"a": pair(1, (2, 3)), "b": 4}
    assert leaves(value) == [1, 2, 3, 4]
    assert with_leaves(value, [5, 6, 7, 8]) == {"a": pair(5, (6, 7)), "b": 8}
