from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from dask_p2p.errors import InputError, UnsupportedArrayError
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
        ("text", "got str"),
        (None, "got NoneType"),
        ([np.zeros(2), np.zeros(3)], "got list"),
        (np.array([None]), "got ndarray"),
        ({1.5: 2}, "got the key 1.5"),
        ({True: 2}, "got the key True"),
        (2**64, "integer of 64 bits, got 18446744073709551616"),
    ],
)
def test_other_values_are_refused(value, error):
    with pytest.raises(InputError, match=f"value: expected.* {error}"):
        encoded(value, HOST)


def test_masks_are_not_lost():
    with pytest.raises(UnsupportedArrayError, match="value: expected a plain array"):
        encoded((1, np.ma.masked_all(2)), HOST)


def test_leaves_are_replaced_in_their_places():
    pair = namedtuple("pair", "x y")
    value = {"a": pair(1, (2, 3)), "b": 4}
    assert leaves(value) == [1, 2, 3, 4]
    assert with_leaves(value, [5, 6, 7, 8]) == {"a": pair(5, (6, 7)), "b": 8}
