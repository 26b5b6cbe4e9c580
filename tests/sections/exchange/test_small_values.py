from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.sections.exchange.device import HOST
from dask_p2p.sections.exchange.values import LastOut, decoded_small, encoded, small_frame
from dask_p2p.sections.wire.frames import HEADER, MOST_INLINE_BYTES, sent_message, small_value
from dask_p2p.sections.wire.mailbox import MOST_BYTES
from tests.sections.exchange.test_values import ARRAYS

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
    if (own := small(value)) is not None:
        message = sent_message(3, 5, description, parts, has_address=False)
        assert small_frame(value, 3, 5) == b"".join(message.buffers)
        found = decoded_small(*own, None, HOST)
        assert type(found) is type(value)
        assert (np.asarray(found) == np.asarray(value)).all()
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
        assert not isinstance(found, np.ndarray) or found.flags.writeable


def test_which_values_are_small():
    assert None not in map(small, (1, True, 0.5, np.zeros(3), np.zeros((2, 2), "i2")))
    large = np.zeros(MOST_BYTES // 8 + 1)
    others = (2**63, "text", None, (1, 2), large, np.arange(9)[::2], np.ma.masked_array([1]))
    assert {*map(small, others)} == {None}


def test_arrays_that_just_fit():
    for count in (*range(300), MOST_BYTES):
        values = np.zeros(count, "i1")
        frame, (description, data) = small_frame(values, 3, 5), small(values)
        is_inline = len(description) + count <= MOST_INLINE_BYTES
        assert len(frame) == HEADER.size + (0 if is_inline else count)
        assert data[:count] == bytes(count)
    assert small(np.zeros(MOST_BYTES + 1, "i1")) is None


def test_memory_for_an_array():
    value, out = np.arange(3.0), np.zeros(3)
    description, data = small(value)
    assert decoded_small(description, data, out, HOST) is out
    assert out.tolist() == [0, 1, 2]
    other = np.zeros(3, "f4")
    found = decoded_small(description, data, other, HOST)
    assert found.tolist() == [0, 1, 2]
    assert not other.any(), "it has another dtype"


@pytest.mark.parametrize("dtype", ["f8", ">f8", "f2", "c16", "?", "i1", ">u4", "g"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (300,)])
def test_the_last_memory_is_filled_again(dtype, shape):
    values = [np.full(shape, number, dtype) for number in (1, 0, 1)]
    out, other, last = np.zeros(shape, dtype), np.zeros(shape, dtype), LastOut()
    frame, (_, data) = small_frame(values[0], 3, 5), small(values[0])
    assert not last.fill(out, 3, frame)
    last.set(out, 3, frame, len(frame) - len(data))
    for value in values:
        frame = small_frame(value, 3, 5)
        assert last.fill(out, 3, frame)
        assert (out == value).all()
        assert not last.fill(other, 3, frame)
        assert not last.fill(out, 4, frame), "another tag is received"
        for changed in ((4, 5), (3, 6)):
            assert not last.fill(out, 3, small_frame(value, *changed))
        assert not last.fill(out, 3, small_frame(np.zeros((*shape, 2), dtype), 3, 5))
    assert not other.any()


def test_views_and_other_orders_are_not_kept():
    last = LastOut()
    for out in (np.zeros(9)[:3], np.zeros((2, 2), order="F"), np.zeros(0)):
        frame = small_frame(np.zeros(out.shape), 3, 5)
        last.set(out, 3, frame, HEADER.size)
        assert not last.fill(out, 3, frame)


def test_arrays_in_another_order_of_memory_are_not_small():
    assert small(np.arange(4.0).reshape(2, 2).T) is None
    assert small(np.arange(4.0).reshape(2, 2, order="F")) is None
    assert small(np.arange(8.0)[::-1]) is None
