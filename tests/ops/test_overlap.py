from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import assert_eq
from hypothesis import given

import dask_p2p
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.ops.stencils import BOUNDARIES, cases, windows
from tests.plans.test_grid import with_halos
from tests.support import layers_of, pairwise, persisted

X = np.random.default_rng(0).random((12, 10))


def star(block):
    """Five points, periodic within the block: what lies at its rims is wrong."""
    return (
        block
        + np.roll(block, 1, 0)
        + 2 * np.roll(block, -1, 0)
        + 3 * np.roll(block, 1, 1)
        + 4 * np.roll(block, -1, 1)
    )


@given(cases())
def test_any_widths_and_blocks(case):
    """Also of several blocks, and other before than after: more than Dask allows."""
    chunks, depth, boundary = case
    shape = tuple(map(sum, chunks))
    x = np.random.default_rng(1).random(shape)
    below_all = [-1 if beyond == "none" else beyond for beyond in boundary]
    around = with_halos(x, depth, below_all)
    inner = tuple(
        slice(before, before + length) for (before, _), length in zip(depth, shape, strict=True)
    )
    largest = partial(windows, depth=depth)
    result = dask_p2p.map_overlap(largest, da.from_array(x, chunks=chunks), depth, boundary)
    np.testing.assert_array_equal(result.compute(scheduler="sync"), largest(around)[inner])


def check_as_dask(function, *arrays, **options):
    """Return an array that has the chunks and the values of Dask's."""
    result = dask_p2p.map_overlap(function, *arrays, **options)
    expected = da.map_overlap(function, *arrays, **options)
    assert result.chunks == expected.chunks
    np.testing.assert_array_equal(*dask.compute(result, expected, scheduler="sync"))
    return result


@pytest.mark.parametrize("keep", ["the rims", "half of them", "nothing"])
def test_without_trim_whatever_a_function_returns_is_taken(keep):
    def record_block(block):
        return {"the rims": block, "half of them": block[1:], "nothing": block[:0]}[keep]

    x = da.from_array(X, chunks=(6, 5))
    check_as_dask(record_block, x, depth={0: 1}, boundary="reflect", trim=False)


def test_corners_that_are_left_out_show_in_results():
    x = da.from_array(X, chunks=(4, 3))
    y = dask_p2p.map_overlap(lambda b: np.roll(b, (1, 1), (0, 1)), x, 1, "nearest", corners=False)
    values = y.compute(scheduler="sync")
    rows, columns = np.nonzero(np.isnan(values))
    assert len(rows) == y.numblocks[0] * y.numblocks[1]
    assert set(rows) == {0, 4, 8} & set(range(len(X)))
    assert set(columns) == set(range(0, X.shape[1], 3))
    counts = dask_p2p.map_overlap(lambda b: b, x.astype("i4"), 1, 0, trim=False, corners=False)
    assert counts.compute(scheduler="sync")[0, 0] == 0


def test_dtype_and_arguments():
    x = da.from_array(X, chunks=(4, 5))
    by_call = dask_p2p.map_overlap(lambda block, above: block > above, x, 1, above=0.5)
    assert by_call.dtype == bool
    assert_eq(by_call, X > 0.5, scheduler="sync")
    assert dask_p2p.map_overlap(np.round, x, 1, dtype="f4").dtype == "f4"
    assert dask_p2p.map_overlap(np.round, x, 1, meta=np.empty((0, 0), "f4")).dtype == "f4"
    calls = []
    dask_p2p.map_overlap(calls.append, x, 1, dtype="f4")
    assert calls == [], "what is known is not found out"
    empty = da.ones((0, 3), chunks=(1, 3))
    assert dask_p2p.map_overlap(np.negative, empty, 0).compute(scheduler="sync").shape == (0, 3)


@pytest.mark.parametrize(
    ("depth", "boundary"),
    [
        *((depth, "none") for depth in (-1, 1.5, "wide", 11, (1, 2, 3), ((1, 2, 3), 0), [1, 1])),
        *((depth, "none") for depth in ({2: 1}, {"rows": 1})),
        *((1, boundary) for boundary in ("mirror", ["none", "none"], ("none",), {5: "none"})),
        (1, [["none"], "none"]),
    ],
    ids=str,
)
def test_wrong_input(depth, boundary):
    with pytest.raises(InputError, match=r"expected .* got "):
        dask_p2p.map_overlap(star, da.from_array(X, chunks=5), depth, boundary)


#: Arguments by what is said of them; those of a tuple are positional.
WRONG_ARGUMENTS = {
    "expected a function": lambda x: ("star", x, 1),
    "known chunk sizes": lambda x: (star, x[x[:, 0] > 0.5], 1),
    "the function first and the arrays after it": lambda x: (x, star, 1),
    "expected an array after the function": lambda x: (star,),
    r"got \[True\] after these": lambda x: (star, x, 1, "none", True),
    r"expected a Dask array, got numpy\.ndarray": lambda x: (star, X, 1),
    "expected a Dask array, got builtins.list": lambda x: (star, [X], 1),
    r"a Dask array, got numpy\.ndarray": lambda x: (np.add, x, X, 1),
}


@pytest.mark.parametrize("words", WRONG_ARGUMENTS)
def test_arguments_that_are_in_the_wrong_place(words):
    x = da.from_array(X, chunks=5)
    error = UnsupportedArrayError if "a Dask array" in words else InputError
    with pytest.raises(error, match=words):
        dask_p2p.map_overlap(*WRONG_ARGUMENTS[words](x))
    with pytest.raises(InputError, match="expected depth once, got 1 after the arrays and depth=2"):
        dask_p2p.map_overlap(star, x, 1, depth=2)


def test_a_function_that_changes_the_shape():
    y = dask_p2p.map_overlap(lambda b: b[1:], da.from_array(X, chunks=5), 1, dtype=X.dtype)
    with pytest.raises(
        BlockMismatchError, match=r"shape \(\d, 6\) from the function .* got \(\d, 6\)"
    ):
        y.compute(scheduler="sync")


# --- a function may overwrite what it gets ---


def difference(block):
    """Forward differences along the first axis, in place."""
    block[:-1] -= block[1:].copy()
    return block


def bump(block):
    block += 1000
    return block


def zeroed_twin(first, second):
    first += second
    second[...] = 0
    return first


@pytest.mark.parametrize(
    ("boundary", "depth", "chunks", "function"),
    pairwise(
        [*BOUNDARIES, {0: "periodic", 1: "none"}, (3, "reflect")],
        [0, 1, (1, 2), {0: 2}, {1: 1}, {0: (0, 1)}, {0: (1, 0)}],
        [(12, 10), (6, 5)],
        [difference, bump],
    ),
)
def test_a_function_that_overwrites_its_block(boundary, depth, chunks, function):
    x = da.from_array(X, chunks=chunks) + 0
    x = x.persist(scheduler="sync")
    call = (function, x, depth, boundary)
    y, again = (dask_p2p.map_overlap(*call, dtype=X.dtype) for _ in range(2))
    first, second, x_too = dask.compute(y, again, x, scheduler="sync")
    widths = dask_p2p.map_overlap(np.array, x, depth, boundary)  # which overwrites nothing
    copied = dask_p2p.map_overlap(lambda b: function(b.copy()), x, depth, boundary, dtype=X.dtype)
    expected = copied.compute(scheduler="sync")
    np.testing.assert_array_equal(x_too, X)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), expected, "computed once more")
    np.testing.assert_array_equal(widths.compute(scheduler="sync"), X)
    if not isinstance(depth, dict) or boundary == "none":  # what Dask takes
        x = da.from_array(X.copy(), chunks=chunks)
        of_dask = da.map_overlap(lambda b: function(b.copy()), x, depth=depth, boundary=boundary)
        np.testing.assert_array_equal(of_dask.compute(scheduler="sync"), expected)


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
@pytest.mark.parametrize("depth", [0, 1, [0, 1], {0: 2}], ids=str)
def test_a_function_that_overwrites_blocks_of_several_arrays(depth, scheduler):
    x = (da.from_array(X, chunks=(4, 10)) + 0).persist(scheduler="sync")
    row = (da.from_array(X[:1], chunks=(1, 10)) + 0).persist(scheduler="sync")
    for second, expected in ((x, 2 * X), (row, X + X[:1])):
        depths = 0 if second is row else depth
        y = dask_p2p.map_overlap(zeroed_twin, x, second, depth=depths, dtype=X.dtype)
        if depth != [0, 1] or second is row:  # blocks of one shape
            np.testing.assert_array_equal(y.compute(scheduler=scheduler), expected)
            np.testing.assert_array_equal(y.compute(scheduler=scheduler), expected)
        np.testing.assert_array_equal(x.compute(scheduler=scheduler), X)
        np.testing.assert_array_equal(row.compute(scheduler=scheduler), X[:1])


def test_functions_overwrite_blocks_that_others_read_meanwhile(client):
    """By cma, which reads the memory of a block that lies on the worker where a function runs."""
    a = np.arange(400 * 300.0).reshape(400, 300)
    for _ in range(3):
        x = persisted(client, da.from_array(a, chunks=(100, 300)) + 0)
        one_sided = dask_p2p.map_overlap(bump, x, {0: (0, 1)}, dtype=a.dtype)
        alone = dask_p2p.map_overlap(bump, x, {1: 1}, "none", dtype=a.dtype)
        turned = [dask_p2p.transpose(x), dask_p2p.rechunk(x, (400, 75))]
        results = client.gather(client.compute([one_sided, alone, *turned, x]))
        for result, expected in zip(results, [a + 1000, a + 1000, a.T, a, a], strict=True):
            np.testing.assert_array_equal(result, expected)


def test_a_function_overwrites_blocks_that_groups_handed_out(client):
    a = np.arange(64 * 60.0).reshape(64, 60)
    with dask.config.set({"p2p.groups": 4}):
        x = persisted(client, dask_p2p.rechunk(da.from_array(a, chunks=(4, 60)), (2, 60)))
    y = persisted(client, dask_p2p.map_overlap(bump, x, {1: 2}, "none", dtype=a.dtype))
    np.testing.assert_array_equal(y.compute(), a + 1000)
    np.testing.assert_array_equal(x.compute(), a)


# --- what `dask.array.map_overlap` takes as well ---


EMPTY = [((0, 7, 5), (10,)), ((12,), (3, 0, 7)), ((6, 6, 0), (0, 10)), ((0, 12), (0, 0, 10, 0))]


@pytest.mark.parametrize("way", ["one", "several", "by Dask", "block_id", "block_info"])
@pytest.mark.parametrize("chunks", EMPTY, ids=str)
def test_functions_are_not_called_for_blocks_without_elements(chunks, way):
    calls, places = [], []

    def twice(*blocks, above=0):
        calls.append(min(block.shape for block in blocks))
        return (2 * blocks[0]).astype(int) + above

    def with_id(*blocks, block_id=None):
        places.append(block_id)
        return twice(*blocks)

    def with_info(*blocks, block_info=None):
        places.append(block_info[None]["chunk-location"])
        return twice(*blocks)

    x = da.from_array(10 * X, chunks=chunks)
    function = {"block_id": with_id, "block_info": with_info}.get(way, twice)
    arrays = [x, x + 1] if way == "several" else [x]
    keywords = {"above": da.zeros((), dtype=int)} if way == "by Dask" else {}
    keywords |= {"depth": {0: 1}, "boundary": "reflect", "dtype": int}
    y = dask_p2p.map_overlap(function, *arrays, **keywords)
    calls.clear()
    places.clear()
    assert y.chunks == chunks
    result = y.compute(scheduler="sync")
    np.testing.assert_array_equal(result, (20 * X).astype(int))
    assert result.dtype == int
    filled = [[i for i, n in enumerate(along) if n] for along in chunks]
    assert len(calls) == len(filled[0]) * len(filled[1])
    if places:
        assert sorted(places) == [(i, j) for i in filled[0] for j in filled[1]]


@pytest.mark.parametrize("chunks", EMPTY, ids=str)
@pytest.mark.parametrize("keeps_rims", [True, False])
def test_functions_that_trim_are_called_for_all_blocks(chunks, keeps_rims):
    """Their results may have any shape."""
    x = da.from_array(X, chunks=chunks)

    def function(block):
        return -block if keeps_rims else -block[1:-1]

    y = dask_p2p.map_overlap(function, x, {0: 1}, "reflect", trim=False, dtype=float)
    expected = da.map_overlap(
        function, x.rechunk(), depth={0: 1}, boundary="reflect", trim=False, dtype=float
    )
    assert y.chunks == chunks
    if not keeps_rims or len(chunks[0]) == 1:
        np.testing.assert_array_equal(y.compute(scheduler="sync"), expected.compute())


def test_block_id_and_block_info_tell_where_a_block_is():
    x = da.from_array(np.arange(48.0).reshape(6, 8), chunks=(2, 4))

    def by_id(block, block_id=None):
        return block + (10 * block_id[0] + block_id[1] if block_id else 0)

    def by_info(block, block_info=None):
        where = block_info and (block_info[0]["chunk-location"], block_info[None]["shape"])
        return block + (sum(map(sum, where)) if where else 0)

    for function in (by_id, by_info):
        for overrides in ({}, {"trim": False, "depth": 0}):
            options = {"depth": 1, "boundary": "reflect", "dtype": float} | overrides
            result = check_as_dask(function, x, **options)
            assert not np.array_equal(result.compute(scheduler="sync"), x.compute(scheduler="sync"))
    z = dask_p2p.map_overlap(by_id, x, 1, block_id=(5, 5), dtype=float)
    np.testing.assert_array_equal(z.compute(scheduler="sync"), np.arange(48).reshape(6, 8) + 55)


def test_one_layer_of_one_task_a_block():
    x = da.from_array(X, chunks=(4, 5))
    y = dask_p2p.map_overlap(lambda block, block_id=None: block, x, 1)
    assert set(layers_of(y)) - set(layers_of(x)) == {y.name}
    assert len(layers_of(y)[y.name]) == 6


def test_arguments_that_dask_has_still_to_compute(client):
    x = da.from_array(X, chunks=(4, 5))

    def scaled(block, by, offset=0):
        assert isinstance(by, np.ndarray)
        return block * by.sum() + offset

    weights, offset = da.ones(5, chunks=2), dask.delayed(len)([1, 2, 3])
    y = dask_p2p.map_overlap(scaled, x, 1, by=weights, offset=offset, dtype=float)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X * 5 + 3)
    np.testing.assert_array_equal(y.compute(), X * 5 + 3)
    nested = dask_p2p.map_overlap(
        lambda b, k: b + k["of"][0], x, 1, k={"of": [offset]}, dtype=float
    )
    np.testing.assert_array_equal(nested.compute(scheduler="sync"), X + 3)


@pytest.mark.parametrize("depth", [0, 1])
def test_lazy_arguments_of_dask_array_are_refused(depth, dask_array):
    """Its fused tasks would pass them to the function as they are."""
    x = dask_array.from_array(X, chunks=(4, 5))
    for lazy in (dask_array.ones(5, chunks=2), dask.delayed(len)([1, 2, 3])):
        with pytest.raises(InputError, match=r"expected computed keywords, .*Compute it first"):
            dask_p2p.map_overlap(np.multiply, x, depth, by=lazy, dtype=float)
    y = dask_p2p.map_overlap(lambda block, by: block * by, x, depth, by=3)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X * 3)


def test_names_and_numbers_of_axes():
    x = da.from_array(X, chunks=(4, 5))
    assert dask_p2p.map_overlap(np.negative, x, depth=0, name="mine").name == "mine"
    assert dask_p2p.map_overlap(np.negative, x, depth=0, token="mine").name.startswith("mine-")
    assert dask_p2p.map_overlap(np.negative, x, depth=0, name="n").chunks == x.chunks
    options = {"depth": {0: 1}, "boundary": "periodic", "drop_axis": 1, "dtype": float}
    check_as_dask(lambda b: b.sum(1), x, **options)
    stacked = dask_p2p.map_overlap(
        lambda b: np.stack([b, -b]), x, depth=2, new_axis=0, chunks=(2, 8, 9), boundary=0
    )
    assert stacked.shape == (2, 12, 10)
    np.testing.assert_array_equal(stacked.compute(scheduler="sync"), np.stack([X, -X]))
    result = dask_p2p.map_overlap(
        lambda b: b.sum(), x, depth=1, enforce_ndim=True, dtype=float, chunks=x.chunks
    )
    with pytest.raises(ValueError, match="Dimension mismatch"):
        result.compute(scheduler="sync")


def test_several_arrays_are_aligned_and_cut_as_dask_does():
    x, y = da.from_array(X, chunks=(12, 3)), da.from_array(X[0], chunks=5)

    def weighed(*blocks):
        b, a = sorted(blocks, key=np.ndim)
        return a * b + a[::-1]

    depth, boundary = [{0: 2}, 0], ["periodic", "none"]
    for arrays, options in (
        ((x, y), {"depth": depth, "boundary": boundary}),
        ((y, x), {"depth": depth[::-1], "boundary": boundary[::-1]}),
        ((x, y), {"depth": 0}),
        ((x, y), {}),
    ):
        assert check_as_dask(weighed, *arrays, **options).chunks == ((12,), (3, 2, 1, 3, 1))
    with pytest.raises(InputError, match="expected arrays that broadcast, got the shapes"):
        dask_p2p.map_overlap(weighed, x, x[:5], depth=1)
    with pytest.raises(ValueError, match="Shapes do not align"):
        dask_p2p.map_overlap(weighed, x, y, depth=0, align_arrays=False).compute(scheduler="sync")


def test_depth_and_boundary_are_those_of_dask_by_default():
    x = da.from_array(X, chunks=(4, 5))
    np.testing.assert_array_equal(
        dask_p2p.map_overlap(np.negative, x).compute(scheduler="sync"), -X
    )
    ends = dask_p2p.map_overlap(lambda b: b.cumsum(0), x, depth=1, trim=False, dtype=float)
    expected = da.map_overlap(
        lambda b: b.cumsum(0), x, depth=1, boundary="none", trim=False, dtype=float
    )
    np.testing.assert_array_equal(*dask.compute(ends, expected, scheduler="sync"))


@pytest.mark.parametrize(
    ("of_numpy", "name"), [("wrap", "periodic"), ("symmetric", "reflect"), ("edge", "nearest")]
)
def test_boundaries_may_have_the_names_that_numpy_gives_them(of_numpy, name):
    x = da.from_array(X, chunks=(4, 5))
    by_name, expected = (dask_p2p.map_overlap(star, x, 2, kind) for kind in (of_numpy, name))
    assert by_name.name == expected.name
    padded = np.pad(X, 2, mode=of_numpy)
    one_block = da.from_array(padded, chunks=padded.shape)
    np.testing.assert_array_equal(
        expected.compute(scheduler="sync"), star(one_block.compute(scheduler="sync"))[2:-2, 2:-2]
    )
