"""What all transports share: blocks are what they are declared to be, refusals are plain."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from dask_p2p.backends.kernels.pitch import engine_pitch
from dask_p2p.config import options
from dask_p2p.errors import (
    BlockMismatchError,
    BlockUnavailableError,
    Obstacle,
    TransferError,
    UnsuitableError,
    UnsupportedArrayError,
)
from dask_p2p.geometry import box_shape, box_size
from dask_p2p.transports.base import Reading, Region, Request, Transport
from dask_p2p.transports.footprint import Footprint
from dask_p2p.transports.replies import (
    check_dtype_text,
    check_reply,
    checked_block,
    dtype_text,
    refuse,
)

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
        got = checked_block(block.astype(real), "key", (3,), declared)
        assert got.dtype == declared
        assert got.tobytes() == block.tobytes()
        if real != declared:
            with pytest.raises(UnsuitableError, match="only comm changes the byte order"):
                check_dtype_text("block", dtype_text(declared), dtype_text(real))
    other = np.zeros(3, declared.newbyteorder("=")).view(f"V{declared.itemsize}")
    with pytest.raises(BlockMismatchError):
        checked_block(other, "key", (3,), declared)
    with pytest.raises(BlockMismatchError):
        check_dtype_text("block", dtype_text(declared), dtype_text(other.dtype))


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_text_of_dtypes_tells_them_apart(one, other):
    one, other = np.dtype(one), np.dtype(other)
    assert one.itemsize == other.itemsize
    assert one != other
    assert dtype_text(one) != dtype_text(other)
    assert dtype_text(one) == dtype_text(one.newbyteorder().newbyteorder())


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (KeyError("x"), BlockUnavailableError, "block 'x' of there is no longer there"),
        (BlockMismatchError("of (2,)"), BlockMismatchError, r"of \(2,\) \(held by there\)"),
        (UnsupportedArrayError("masked"), BlockMismatchError, "masked .*held by there"),
        (MemoryError("1 GiB"), TransferError, "there could not send .*out of memory .*1 GiB"),
        (RuntimeError("trouble"), TransferError, "there could not send .*RuntimeError: trouble"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_holder_raises_reaches_the_reader_as_text(raised, error, words):
    reply = refuse(raised)
    assert all(type(said) is str for said in reply.values())
    with pytest.raises(error, match=words) as caught:
        check_reply(reply, Request("x", "there", (2,), F8, "numpy", []))
    assert type(caught.value) is error


@pytest.mark.parametrize("reply", [None, "ok", {}, {"status": "OK"}, [("status", "ok")]], ids=str)
def test_what_is_no_reply(reply):
    with pytest.raises(TransferError, match="there could not send block 'x'"):
        check_reply(reply, Request("x", "there", (2,), F8, "numpy", []))


class FailingReading(Reading):
    """Of which nothing comes."""

    def __init__(self, error):
        self.error, self.closed = error, False

    def __iter__(self):
        yield Region(0, 0, ((0, 1),)).failed(self.error)

    def close(self):
        self.closed = True


def test_an_obstacle_goes_from_holder_to_reader():
    block = Request("x", "holder", (2,), F8, "numpy", [])
    obstacle = Obstacle("not-shareable", "it cannot be shared", "Share it")
    reply = refuse(TransferError(obstacle.full_text, obstacle=obstacle))
    with pytest.raises(TransferError, match=r"it cannot be shared\. Share it") as caught:
        check_reply(reply, block)
    assert caught.value.obstacle == obstacle
    for wrong in (None, 7, "abc", ["a", "b"], ["a", "b", 3], ["a", "b", "c", "d"]):
        with pytest.raises(TransferError) as caught:
            check_reply({**reply, "obstacle": wrong}, block)
        assert caught.value.obstacle is None


class Ferry(Transport):
    name, kinds = "ferry", ("numpy",)
    handlers = footprint = read = close = None

    def __init__(self):
        pass

    def holder_obstacle(self, holder):
        return Obstacle("far", "it is far away") if holder == "far" else None


@pytest.mark.parametrize(
    ("holder", "kind", "dtype", "text"),
    [
        ("near", "numpy", "f8", None),
        ("far", "numpy", "f8", "it is far away"),
        ("far", "cupy", "f8", "ferry moves NumPy blocks, not cupy"),
        ("near", "numpy", object, "ferry moves bytes, not Python objects"),
        ("near", "numpy", [("a", "i1"), ("b", object)], "ferry moves bytes, not Python objects"),
    ],
    ids=str,
)
def test_what_a_transport_does_not_move_is_an_obstacle(holder, kind, dtype, text):
    obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
    assert (obstacle and obstacle.text) == text
    Ferry.moves_objects = True
    try:
        obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
        assert (obstacle is None) == (holder == "near")
    finally:
        Ferry.moves_objects = False


class FailingTransport(Transport):
    name = "failing"

    def __init__(self, error):
        self.reading = FailingReading(error)

    def read(self, requests, options):
        return self.reading

    handlers = obstacle = footprint = close = None


@pytest.mark.parametrize("error", [TransferError("trouble"), TimeoutError()], ids=repr)
def test_a_probe_that_fails_says_so_and_leaves_nothing_open(error):
    transport = FailingTransport(error)
    transport.options = options()
    with pytest.raises(TransferError, match=r"trouble|the worker's event loop did not respond"):
        transport.probe("there", "numpy")
    assert transport.reading.closed


class _Nothing(Reading):
    """Regions that nobody asks for."""

    def __iter__(self):
        return iter(())

    def close(self):
        pass


@pytest.mark.parametrize(
    ("kind", "fast_axis", "shape"),
    [
        ("cupy", 0, (256, 16, 64)),  # rows of 1 KiB, along all of the axis
        ("cupy", 1, (16, 256, 64)),
        ("cupy", None, (16, 256, 64)),
        ("numpy", 0, (16, 256, 64)),  # a processor writes them item by item
    ],
)
def test_parts_for_gpus_keep_rows_of_the_output_whole(kind, fast_axis, shape):
    box = ((0, 256), (0, 256), (0, 64))
    request = Request("key", "holder", (256, 256, 64), np.dtype("f4"), kind, [box], fast_axis)
    reading = _Nothing([request], Footprint(2**20, 1), options())
    parts = [part.box for part in reading.parts()]
    assert {box_shape(part) for part in parts} == {shape}
    assert sum(map(box_size, parts)) == 256 * 256 * 64


@pytest.mark.parametrize(
    ("wanted", "block", "part"),
    [
        ((256, 256, 64), (256, 512, 64), (256, 16, 64)),
        ((256, 4, 4096), (256, 4, 8192), (256, 4, 256)),  # not along axis 1: rows have gaps
        ((256, 256, 64), (256, 256, 128), (16, 256, 64)),  # too little would be left of rows
    ],
)
def test_parts_of_a_part_of_a_block_are_what_copy_engines_copy(wanted, block, part):
    box = tuple((0, length) for length in wanted)
    request = Request("key", "holder", block, np.dtype("f4"), "cupy", [box], 0)
    parts = [each.box for each in _Nothing([request], Footprint(2**20, 1), options()).parts()]
    assert {box_shape(each) for each in parts} == {part}
    strides = [4 * prod(block[axis + 1 :]) for axis in range(3)]
    assert engine_pitch(part, tuple(strides), 4) is not None
