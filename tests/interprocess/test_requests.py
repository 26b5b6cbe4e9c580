"""Each check of what a request holds, by itself: one thing that it refuses, and one next to it."""

from __future__ import annotations

from functools import partial

import pytest

from dask_p2p.interprocess.requests import (
    MalformedRequestError,
    checked_blocks,
    checked_bool,
    checked_box,
    checked_integer,
    checked_key,
    checked_parts,
    checked_seconds,
    checked_shape,
    checked_text,
    reject_unknown,
)


class Tuple(tuple):
    __slots__ = ()


class Text(str):
    __slots__ = ()


class Integer(int):
    __slots__ = ()


class Real(float):
    __slots__ = ()


def short_id(value):
    """Name of a check, or the start of a value: the same in every process."""
    check = getattr(value, "func", value)
    return getattr(check, "__name__", f"{value!s:.30}")


def deep(levels):
    return (deep(levels - 1),) if levels else "x"


box = partial(checked_box, shape=(6, 10))
parts = partial(checked_parts, shapes=[(6, 10), (3,)])
number = partial(checked_integer, "tag", least=0, most=7)
seconds = partial(checked_seconds, "wait_s")
text = partial(checked_text, "dtype")
yes_or_no = partial(checked_bool, "checksum")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checked_key, "x"),
        (checked_key, b"x"),
        (checked_key, ("x", 0, 1.5, ("y",))),
        (checked_key, deep(8)),
        (checked_key, (0,) * 1000),
        (checked_shape, ()),
        (checked_shape, (0, 2**63 - 1)),
        (checked_shape, (1,) * 64),
        (box, ((0, 6), (0, 10))),
        (box, ((6, 6), (10, 10))),
        (number, 0),
        (number, 7),
        (seconds, 0.0),
        (seconds, 3600.0),
        (text, "x" * 10_000),
        (yes_or_no, False),
    ],
    ids=short_id,
)
def test_what_readers_send(check, value):
    assert check(value) == value


def test_lists_become_tuples():
    assert checked_shape([6, 10]) == (6, 10)
    assert box([[0, 1], [2, 3]]) == ((0, 1), (2, 3))
    assert parts(([0, [[0, 1], [2, 3]]], (1, ((0, 1),)))) == [(0, ((0, 1), (2, 3))), (1, ((0, 1),))]
    assert len(parts([(1, ((0, 1),))] * 2**16)) == 2**16
    assert checked_blocks([["x", [6, 10]]]) == [("x", (6, 10))]


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (checked_key, ["x", 0], "got list"),
        (checked_key, Tuple(("x", 0)), "got Tuple"),
        (checked_key, Text("x"), "got Text"),
        (checked_key, True, "got bool"),
        (checked_key, None, "got NoneType"),
        (checked_key, ("x", ("y", None)), "got NoneType"),
        (checked_key, deep(9), "got tuple"),
        (checked_key, (0,) * 1001, "got tuple"),
        (checked_shape, 6, "expected a sequence, got int"),
        (checked_shape, "66", "expected a sequence, got str"),
        (checked_shape, Tuple((6, 10)), "expected a sequence, got Tuple"),
        (checked_shape, {6: 10}, "expected a sequence, got dict"),
        (checked_shape, (1,) * 65, "at most 64"),
        (checked_shape, (6, -1), "no negative lengths"),
        (checked_shape, (6.0, 10), "expected an integer, got float"),
        (checked_shape, (6, True), "expected an integer, got bool"),
        (checked_shape, (6, Integer(10)), "expected an integer, got Integer"),
        (checked_shape, (6, 2**63), "64 bits"),
        (box, ((0, 1), "01"), "expected a sequence, got str"),
        (box, ((0, 1), (0, 1, 2)), "a start and a stop"),
        (box, ((0, 1), (0,)), "a start and a stop"),
        (box, ((0, 1), (0, 1.0)), "expected an integer, got float"),
        (box, ((0, 1), (-(2**63) - 1, 1)), "64 bits"),
        (box, ((0, 1),), "does not lie in"),
        (box, ((0, 1), (0, 1), (0, 1)), "does not lie in"),
        (box, ((-1, 1), (0, 1)), "does not lie in"),
        (box, ((3, 2), (0, 1)), "does not lie in"),
        (box, ((0, 6), (0, 11)), "does not lie in"),
        (parts, {(1, ((0, 1),))}, "expected a sequence, got set"),
        (parts, Tuple([(1, ((0, 1),))]), "expected a sequence, got Tuple"),
        (parts, [(1, ((0, 1),))] * (2**16 + 1), "at most 65536"),
        (parts, [(1, ((0, 1),)), (1, ((0, 7),))], "does not lie in"),
        (parts, [(2, ((0, 1),))], "expected 0 to 1"),
        (parts, [(True, ((0, 1),))], "expected an integer, got bool"),
        (parts, [(1, ((0, 1),), 2)], "expected pairs"),
        (parts, ["xy"], "expected pairs"),
        (checked_blocks, [("x", (1,)), ("y",)], "expected pairs"),
        (checked_blocks, {"x": (1,)}, "expected a sequence, got dict"),
        (checked_blocks, [(["x"], (1,))], "key: expected"),
        (checked_blocks, [("x", (-1,))], "no negative lengths"),
        (number, 1.0, "expected an integer, got float"),
        (number, True, "expected an integer, got bool"),
        (number, Integer(1), "expected an integer, got Integer"),
        (number, -1, "expected 0 to 7"),
        (number, 8, "expected 0 to 7"),
        (seconds, "1", "0 to 3600 seconds"),
        (seconds, True, "0 to 3600 seconds"),
        (seconds, Real(1), "0 to 3600 seconds"),
        (seconds, -0.1, "0 to 3600 seconds"),
        (seconds, 3600.1, "0 to 3600 seconds"),
        (seconds, float("nan"), "0 to 3600 seconds"),
        (text, b"x", "got bytes"),
        (text, Text("x"), "got Text"),
        (text, "x" * 10_001, "got str"),
        (yes_or_no, 1, "true or false"),
        (yes_or_no, "yes", "true or false"),
        (reject_unknown, {"more": 1}, r"unknown arguments: \['more'\]"),
    ],
    ids=short_id,
)
def test_what_no_reader_sends(check, value, words):
    with pytest.raises(MalformedRequestError, match=words):
        check(value)


def test_what_is_said_of_it_is_short():
    shape = (10**6,) * 64
    for wrong in (((0, 2**62),) * 64, ((0, 1),) * 63):
        with pytest.raises(MalformedRequestError) as caught:
            checked_box(wrong, shape)
        assert len(str(caught.value)) < 900
    with pytest.raises(MalformedRequestError) as caught:
        reject_unknown({f"unknown {i}": i for i in range(1000)})
    assert len(str(caught.value)) < 300
