"""Strategies and reference computations for tests of plans."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from dask_p2p.geometry import block_bounds, block_indices, box_shape, box_size, box_slices


def chunks_of(draw, length, max_blocks=4):
    """Divide an axis into blocks, empty ones included."""
    inner = draw(st.lists(st.integers(0, length), max_size=max_blocks - 1))
    return tuple(b - a for a, b in pairwise([0, *sorted(inner), length]))


def blocks_of(array, chunks):
    bounds = [block_bounds(sizes) for sizes in chunks]
    return {
        index: array[tuple(slice(b[i], b[i + 1]) for b, i in zip(bounds, index, strict=True))]
        for index in block_indices(chunks)
    }


def assembled(block_plan, sources, dtype):
    """Return the block that a plan makes of these sources; check its pieces first."""
    out = np.zeros(block_plan.shape, dtype)
    written = np.zeros(block_plan.shape, int)
    for piece in block_plan.pieces:
        source = sources[block_plan.sources[piece.source]]
        assert source.shape == block_plan.source_shapes[piece.source]
        region = source[box_slices(piece.src)]
        assert region.shape == box_shape(piece.src)  # nothing was clipped
        assert region.size > 0
        out[box_slices(piece.dst)] = region.transpose(block_plan.axes)
        written[box_slices(piece.dst)] += 1
    for fill in block_plan.fills:
        out[box_slices(fill.dst)] = fill.value
        written[box_slices(fill.dst)] += 1
    assert (written == 1).all(), "each element is written once"
    return out


def elements_read(block_plan):
    """Return the number of elements that a block reads of each of its sources."""
    read = [0] * len(block_plan.sources)
    for piece in block_plan.pieces:
        read[piece.source] += box_size(piece.src)
    return tuple(read)
