from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import split_evenly
from dask_p2p.plans import slab_chunks


@pytest.mark.parametrize(
    ("chunks", "axes", "expected"),
    [
        (((4, 4, 4), (5, 5)), (1, 0), ((4, 3, 3), (12,))),
        (((12,), (5, 5)), (1, 0), ((5, 5), (12,))),
        (((2, 2, 2), (2,)), (1, 0), ((2,), (2, 2, 2))),  # too few rows for three slabs
        (((2,) * 6, (3,)), (1, 0), ((1, 1, 1), (6, 6))),
        (((10,) * 8, (80,), (3,)), (2, 1, 0), ((3,), (10,) * 8, (80,))),
        (((1, 1, 1), (4,), (1,)), (2, 0, 1), ((1,), (1, 1, 1), (4,))),
        (((2, 2), (0,)), (1, 0), ((0,), (4,))),
        (((3, 3), (4,), (5,)), (2, 0, 1), ((3, 2), (6,), (4,))),
        (((7, 1, 1),), (0,), ((3, 3, 3),)),
        ((), (), ()),
    ],
)
def test_slab_chunks(chunks, axes, expected):
    assert slab_chunks(chunks, axes) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=3))
def test_default_blocks_are_never_empty_and_as_many_as_can_be(sides):
    src = tuple(split_evenly(length, min(parts, length)) for length, parts in sides)
    axes = tuple(reversed(range(len(src))))
    dst = slab_chunks(src, axes)
    lengths = [length for length, _ in reversed(sides)]
    wanted = max(map(len, src))
    blocks = prod(map(len, dst))
    assert min(min(sizes) for sizes in dst) >= 1
    if lengths[0] >= wanted:
        assert [len(sizes) for sizes in dst] == [wanted] + [1] * (len(src) - 1)
    cuts = product(*(range(1, min(length, wanted) + 1) for length in lengths))
    assert blocks == max(n for n in map(prod, cuts) if n <= wanted)
