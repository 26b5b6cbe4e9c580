"""Arrays with rims around their blocks, and a stencil of which one knows what it makes."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

BOUNDARIES = ["none", "periodic", "reflect", "nearest", 7.5]


@st.composite
def cases(draw):
    """Chunks, and along each axis widths of rims and what lies beyond the ends."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))
    chunks = []
    for length in lengths:
        inner = draw(st.lists(st.integers(1, length), max_size=3))
        chunks.append(tuple(b - a for a, b in pairwise(sorted({0, length, *inner}))))
    widths = [st.integers(0, min(length, 4)) for length in lengths]
    depth = tuple((draw(width), draw(width)) for width in widths)
    boundary = tuple(draw(st.sampled_from(BOUNDARIES)) for _ in lengths)
    return tuple(chunks), depth, boundary


def windows(block, *, depth):
    """The largest value of each window that fits into the block."""
    out = np.empty_like(block)
    for at in np.ndindex(block.shape):
        window = tuple(
            slice(max(0, i - before), i + after + 1)
            for i, (before, after) in zip(at, depth, strict=True)
        )
        out[at] = block[window].max()
    block[...] = np.nan  # it is the function's own
    return out
