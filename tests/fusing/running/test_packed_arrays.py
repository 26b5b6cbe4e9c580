from __future__ import annotations

import weakref

import numpy as np
import pytest

from dask_p2p.fusing.running.messages import PackedArrays, aligned
from tests.support import tune


def packed(arrays):
    """Return the bytes of arrays as messages have them."""
    made = bytearray()
    for array in arrays:
        made += bytes(aligned(len(made)) - len(made)) + array.tobytes()
    return bytes(made)


ARRAYS = [
    *(np.arange(n, dtype="i4").reshape(-1, 1) for n in (3, 5, 17, 1)),
    np.arange(100.0),  # larger than a part
    *(np.full((2, n), n, "u1") for n in (1, 7, 30)),
]


def taken(arrays):
    return [arrays.take(each.shape, each.dtype).copy() for each in ARRAYS]


def check(found):
    for got, expected in zip(found, ARRAYS, strict=True):
        np.testing.assert_array_equal(got, expected, strict=True)


def test_arrays_in_a_message():
    check(taken(PackedArrays(memoryview(packed(ARRAYS)))))


@pytest.mark.parametrize("part_bytes", [1, 16, 100, 200, 2**20])
def test_one_part_at_a_time_is_in_memory(monkeypatch, part_bytes):
    tune(monkeypatch, packed_part_bytes=part_bytes)
    data, parts = packed(ARRAYS), []

    def read(start, size_bytes):
        assert all(part() is None for part, _ in parts)
        assert start + size_bytes <= len(data)
        memory = np.frombuffer(data, np.uint8)[start : start + size_bytes].copy()
        parts.append((weakref.ref(memory), size_bytes))
        return memoryview(memory)

    check(taken(PackedArrays(memoryview(b""), len(data), read)))
    assert max(size for _, size in parts) <= max(part_bytes, 100 * 8)
    assert (len(parts) == 1) == (part_bytes == 2**20)
