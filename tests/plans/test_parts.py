from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.plans import block_plans
from dask_p2p.plans.base import Input, plan_parts
from dask_p2p.plans.halo import halo_widths_of, plan_halo
from tests.plans.support import assembled, blocks_of

boundaries = st.sampled_from(["none", "periodic", "reflect", "nearest", -7])
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def with_halo(x, chunks, depth, boundary):
    """Return each block with its halos, as `map_overlap` assembles them; and the halos."""
    plan, sources = plan_halo((chunks,), (depth,), (boundary,)), blocks_of(x, (chunks,))
    blocks = [assembled(block, sources, int) for _, block in block_plans(plan)]
    return blocks, halo_widths_of(plan)[0]


@given(chunks=lengths, boundary=boundaries, data=st.data())
def test_parts_have_the_halos_that_blocks_of_their_size_would_have(chunks, boundary, data):
    x = np.arange(1, 1 + sum(chunks))
    width = st.integers(0, min(4, len(x)))
    depth = data.draw(st.tuples(width, width))
    part_bytes = data.draw(st.integers(1, 100))
    blocks, halo = with_halo(x, chunks, depth, boundary)
    parts, sizes = [], []
    for block, block_halo, length in zip(blocks, halo, chunks, strict=True):
        given_block = Input(block.shape, 8, 0, block_halo, depth)
        for part in plan_parts([given_block], length, part_bytes, 8).parts:
            (read,), ((before, after),) = part.reads, part.halo
            parts.append(block[slice(*read)])
            sizes.append(part.output_range[1] - part.output_range[0])
            assert len(parts[-1]) == before + sizes[-1] + after
    expected, _ = with_halo(x, tuple(sizes), depth, boundary)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert sum(sizes) == len(x)


inputs = st.builds(
    lambda shape, item, axis, depth: Input(
        tuple(shape), item, None if axis is None else axis % len(shape), depth, depth
    ),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.sampled_from([1, 8, 16]),
    st.none() | st.integers(0, 2),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)


@given(
    given_inputs=st.lists(inputs, min_size=1, max_size=3),
    length=st.integers(0, 40),
    part_bytes=st.integers(1, 3000),
    row_bytes=st.integers(0, 64),
    is_reduced=st.booleans(),
    slots=st.integers(2, 4),
)
def test_parts_cover_the_block_once_and_keep_their_bounds(
    given_inputs, length, part_bytes, row_bytes, is_reduced, slots
):
    blocks = []
    for block in given_inputs:
        shape = list(block.shape)
        if block.axis is not None:
            shape[block.axis] = length + sum(block.halo)
        blocks.append(Input(tuple(shape), *block[1:]))
    plan = plan_parts(blocks, length, part_bytes, row_bytes, is_reduced)
    ranges = [part.output_range for part in plan.parts]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0 or length == 0
    divided_bytes = sum(block.row_bytes for block in blocks if block.axis is not None)
    first_divided = next((i for i, block in enumerate(blocks) if block.axis is not None), None)
    for part in plan.parts:
        ends, offset = plan.input_indices(part), 0
        for n, (array, read) in enumerate(zip(blocks, part.reads, strict=True)):
            assert (read is None) == (array.axis is None)
            if read is not None:
                assert 0 <= read[0] <= read[1] <= array.shape[array.axis]
            size = array.row_bytes * (1 if read is None else read[1] - read[0])
            offset += size
            assert ends[n] + size <= ends[n + 1], "inputs do not overlap in the slot"
            assert ends[n] % 512 == 0
        assert ends[-1] <= plan.slot_bytes
        assert offset <= part_bytes or max(sizes) <= 1 or divided_bytes == 0
        if is_reduced:
            assert plan.result_bytes == row_bytes
        elif first_divided is not None:
            start, stop = part.reads[first_divided]
            assert (stop - start) * row_bytes <= plan.result_bytes
    offset, result_bytes = plan.device_bytes(slots)
    assert offset == min(slots, len(sizes)) * plan.slot_bytes
    assert 0 <= result_bytes - min(slots, len(sizes)) * plan.result_bytes <= slots * 511
