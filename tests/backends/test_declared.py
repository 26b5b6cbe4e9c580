"""Blocks are what they are declared to be."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.backends import check_dtype_text, checked_block, dtype_text
from dask_p2p.errors import BlockMismatchError, TransferError, UnsupportedArrayError

F8 = np.dtype("f8")


@pytest.mark.parametrize(
    ("block", "error", "words"),
    [
        (np.ones((2, 4)), BlockMismatchError, r"float64 \(2, 3\).*it is float64 \(2, 4\)"),
        (np.ones((3, 2)), BlockMismatchError, r"it is float64 \(3, 2\)"),
        (np.ones((2, 3), "f4"), BlockMismatchError, r"it is float32 \(2, 3\)"),
        (np.ones((2, 3), ">i8"), BlockMismatchError, r"it is >i8 \(2, 3\)"),
        (np.ma.masked_array(np.ones((2, 3))), UnsupportedArrayError, "(?i)masked"),
        ([[1.0] * 3] * 2, UnsupportedArrayError, "list"),
    ],
    ids=["length", "order", "dtype", "other dtype", "masked", "list"],
)
def test_a_block_that_is_not_as_declared(block, error, words):
    good = np.ones((2, 3))
    assert checked_block(good, "key", (2, 3), F8) is good
    with pytest.raises(error, match=words):
        checked_block(block, "key", (2, 3), F8)


ONE, MIXED = ">i4", [("a", ">i2"), ("b", "<f8"), ("c", [("d", ">u4", (2,))])]


@pytest.mark.parametrize("declared", [ONE, ">f8", ">c8", ">M8[s]", ">U3", MIXED], ids=str)
def test_a_block_in_another_byte_order_is_converted(declared):
    declared = np.dtype(declared)
    raw = np.arange(3 * declared.itemsize, dtype="u1") if declared.kind != "U" else None
    block = np.array(["ab", "c", "\u20ac"], declared) if raw is None else raw.view(declared)
    for real in (declared.newbyteorder("="), declared.newbyteorder("S"), declared):
        result = checked_block(block.astype(real), "key", (3,), declared)
        assert result.dtype == declared
        assert result.tobytes() == block.tobytes()
        if real != declared:
            with pytest.raises(TransferError, match="only comm changes the byte order"):
                check_dtype_text("block", dtype_text(declared), dtype_text(real))
    opaque = np.zeros(3, declared.newbyteorder("=")).view(f"V{declared.itemsize}")
    with pytest.raises(BlockMismatchError):
        checked_block(opaque, "key", (3,), declared)
    with pytest.raises(BlockMismatchError):
        check_dtype_text("block", dtype_text(declared), dtype_text(opaque.dtype))


@pytest.mark.parametrize(
    ("one", "second"),
    [
        ("f8", ">f8"),
        ("i8", "M8[ns]"),
        ("M8[s]", "M8[ns]"),
        ("S4", "V4"),
        ("u1", "?"),
        ([("a", "i1"), ("b", "f8")], [("a", "i1"), ("b", "i8")]),
        ([("a", "i4"), ("b", "f4")], [("b", "i4"), ("a", "f4")]),
        ([("a", "i4", (2,))], [("a", "i4", (2, 1))]),
        ([("a", [("b", "i4")])], [("a", [("b", "f4")])]),
        (
            {"names": "ab", "formats": ["i1", "i1"], "offsets": [0, 1], "itemsize": 4},
            {"names": "ab", "formats": ["i1", "i1"], "offsets": [0, 2], "itemsize": 4},
        ),
    ],
    ids=str,
)
def test_text_of_dtypes_tells_them_apart(one, second):
    one, second = np.dtype(one), np.dtype(second)
    assert one.itemsize == second.itemsize
    assert one != second
    assert dtype_text(one) != dtype_text(second)
    assert dtype_text(one) == dtype_text(one.newbyteorder().newbyteorder())
