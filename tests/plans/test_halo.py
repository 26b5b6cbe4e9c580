from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_size
from dask_p2p.plans import block_plans, plan_halo
from dask_p2p.plans.halo import BOUNDARIES
from tests.plans.support import assembled, blocks_of, chunks_of, elements_read

KINDS = [*BOUNDARIES, 7]


@st.composite
def halos(draw):
    """Chunks, depths and boundaries; blocks may be smaller than the halos, or empty."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chunks, depth, boundary = [], [], []
    for length in lengths:
        chunks.append(chunks_of(draw, length))
        depth.append(tuple(draw(st.integers(0, min(length, 3))) for _ in range(2)))
        boundary.append(draw(st.sampled_from(KINDS)))
    return tuple(chunks), tuple(depth), tuple(boundary)


def with_halos(x, depth, boundary):
    """The whole array with halos beyond its ends, axis by axis as Dask makes them."""
    modes = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}
    for axis, (widths, beyond) in enumerate(zip(depth, boundary, strict=True)):
        if beyond == "none":
            continue
        widths = [widths if a == axis else (0, 0) for a in range(x.ndim)]
        if beyond in modes:
            x = np.pad(x, widths, mode=modes[beyond])
        else:
            x = np.pad(x, widths, constant_values=beyond)
    return x


@given(halos())
def test_without_corners_only_they_are_left_out(halo):
    chunks, depth, boundary = halo
    shape = tuple(map(sum, chunks))
    x = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    sources = blocks_of(x, chunks)
    with_corners = plan_halo(chunks, depth, boundary)
    star = plan_halo(chunks, depth, boundary, has_corners=False)
    plans = zip(block_plans(with_corners), block_plans(star), strict=True)
    for (index, all_of_it), (_, part) in plans:
        expected = assembled(all_of_it, sources, x.dtype)
        inner = [
            [part.is_halo for part in mapping.segments(i) for _ in range(*part.dst)]
            for mapping, i in zip(with_corners.mappings, index, strict=True)
        ]
        widths = sum(np.ix_(*(np.array(row, int) for row in inner)))
        expected[widths > 1] = 0
        np.testing.assert_array_equal(assembled(part, sources, x.dtype), expected)
        assert star.sources(index) == part.sources
        assert star.source_elements(index) == elements_read(part)
        assert set(part.sources) <= set(all_of_it.sources)
        assert with_corners.sources(index) == all_of_it.sources
        assert with_corners.source_elements(index) == elements_read(all_of_it)
        sizes = [box_size(piece.src) for piece in all_of_it.pieces]
        assert max(sizes, default=0) <= with_corners.largest_piece
