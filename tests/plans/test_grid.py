import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_shape, box_size
from dask_p2p.plans import BlockPlan, Piece, block_plans, redistribution, slab_chunks, stage_order
from dask_p2p.plans.base import Input, plan_parts
from dask_p2p.plans.halo import BOUNDARIES, halo_widths_of, plan_halo
from dask_p2p.tools.zarr_stores import is_regular, regular_size
from tests.plans.support import assembled, blocks_of, chunks_of, elements_read


@st.composite
def plans(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    axes = draw(st.permutations(range(len(shape))))
    src = tuple(chunks_of(draw, n) for n in shape)
    if draw(st.booleans()):
        dst = tuple(chunks_of(draw, shape[a]) for a in axes)
    else:
        dst = slab_chunks(src, axes)
    return redistribution(src, axes, dst)


@given(plans())
def test_block_plans_name_each_source_once_and_use_all(plan):
    for index, block_plan in [*block_plans(plan)] * 2:  # the plan keeps what it has counted
        assert plan.source_elements(index) == elements_read(block_plan)
        assert len(set(block_plan.sources)) == len(block_plan.sources)
        assert plan.sources(index) == block_plan.sources
        assert {p.source for p in block_plan.pieces} == set(range(len(block_plan.sources)))
        assert block_plan.shape == block_shape(plan.chunks, index)


@given(plans())
def test_plans_are_values(plan):
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    for index, block_plan in block_plans(plan):
        assert pickle.loads(pickle.dumps(block_plan)) == again.block(index)


@pytest.mark.parametrize(
    ("chunks", "axes", "after", "copies"),
    [
        (((2, 2), (4,)), (0, 1), ((2, 1, 1), (4,)), [True, False, False]),
        (((2, 2), (4,)), (0, 1), ((4,), (4,)), [False]),
        (((2, 2), (2,)), (1, 0), ((2,), (2, 2)), [False, False]),  # the axes change
        (((0, 2), (4,)), (0, 1), ((2, 0), (4,)), [True, False]),
    ],
)
def test_blocks_that_stay_as_they_are_are_known(chunks, axes, after, copies):
    blocks = block_plans(redistribution(chunks, axes, after))
    assert [block.is_copy for _, block in blocks] == copies


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


def test_plans_of_equal_constants_with_other_bits_differ():
    plans = [plan_halo(((4,),), ((1, 1),), (end,)) for end in (0.0, -0.0)]
    assert [str(plan.block((0,)).fills[0].value) for plan in plans] == ["0.0", "-0.0"]


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple)


def moved(sizes, size):
    """The number of elements that leave the block that most elements of their chunk come from."""
    elements = [block for block, block_size in enumerate(sizes) for _ in range(block_size)]
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
    assert (ranges[0][0], ranges[-1][1]) == (0, length)
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


@given(st.integers(1, 4), st.integers(1, 4))
def test_at_each_stage_every_holder_of_several_hosts_serves_one_reader(hosts, workers):
    addresses = [f"host{host}:{number}" for host in range(hosts) for number in range(workers)]
    orders = [stage_order(addresses, reader, host_of) for reader in addresses]
    for reader, order in zip(addresses, orders, strict=True):
        assert order[0] == reader
        assert sorted(order) == addresses
        assert {host_of(holder) for holder in order[:workers]} == {host_of(reader)}
        # Once it has left its host, it goes to another one at each stage.
        for first in range(workers, len(order), max(1, hosts - 1)):
            stage_hosts = [host_of(holder) for holder in order[first : first + hosts - 1]]
            assert len(set(stage_hosts)) == len(stage_hosts)
    for stage in zip(*orders, strict=True):
        assert len(set(stage)) == len(addresses)


def host_of(address):
    return address.split(":")[0]


def test_a_reader_without_blocks_starts_behind_its_index():
    assert stage_order(["a", "c", "e"], "d") == ["e", "a", "c"]
    assert stage_order(["a", "c", "e"], "z") == ["a", "c", "e"]


def test_a_part_of_a_piece_fills_a_part_of_its_destination():
    piece = Piece(0, ((2, 6), (10, 13)), ((0, 3), (4, 8)))
    plan = BlockPlan((3, 8), (1, 0), ((0, 0),), ((6, 13),), (piece,))
    assert plan.destination(piece, piece.src) == piece.dst
    assert plan.destination(piece, ((3, 5), (11, 12))) == ((1, 2), (5, 7))
