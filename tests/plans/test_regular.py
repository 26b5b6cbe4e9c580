from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.tools.zarr_stores import is_regular, regular_size

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple)


def blocks_of(sizes):
    """The number of its block, of each element."""
    return [block for block, size in enumerate(sizes) for _ in range(size)]


def moved(sizes, size):
    """The number of elements that leave the block that most elements of their chunk come from."""
    elements = blocks_of(sizes)
    chunks = [elements[i : i + size] for i in range(0, len(elements), size)]
    return sum(len(chunk) - max(map(chunk.count, chunk)) for chunk in chunks)


@given(SIZES)
def test_regular_sizes(sizes):
    size, n = regular_size(sizes), sum(sizes)
    chunks = (*[size] * (n // size), *[n % size] * (n % size > 0))
    assert is_regular(chunks)
    assert len(chunks) <= 2 * len(sizes)
    assert size <= max(sizes)
    if is_regular(sizes):
        assert chunks == sizes


@pytest.mark.parametrize(
    ("sizes", "size", "elements"),
    [
        ((3, 3, 2, 2), 3, 1),
        ((100, 200, 100, 200), 100, 0),  # splits blocks only
        ((2, 4, 4, 4), 2, 0),
        ((10, 9, 9), 10, 1),
        ((31, 28, 31, 30), 30, 2),
        ((7,), 7, 0),
        ((0, 0), 0, 0),
    ],
)
def test_cheapest_sizes(sizes, size, elements):
    assert regular_size(sizes) == size
    if size:
        assert elements == moved(sizes, size)
