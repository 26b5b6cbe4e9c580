import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p import spmd
from dask_p2p.errors import InputError, SectionError
from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import ORDERS, RankGrid
from dask_p2p.sections import Context
from tests.sections.gangs import connections_of, has_come, run_gang
from tests.transports.loopback import wait_until

MODES = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}


def star(u, out, depth):
    """Weigh each neighbour along each axis otherwise."""
    inner = [slice(before, n - after) for n, (before, after) in zip(u.shape, depth, strict=True)]
    out[...] = u[tuple(inner)]
    for axis, (before, after) in enumerate(depth):
        for by in range(-before, after + 1):
            at = list(inner)
            at[axis] = slice(inner[axis].start + by, inner[axis].stop + by)
            out += (7 * axis + by) / 3 * u[tuple(at)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_interior_and_boundary_parts_make_the_same_values_as_the_whole(data):
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    ranks = RankGrid.at_most(chunks, data.draw(st.integers(1, 4)))
    depth = tuple(data.draw(st.tuples(*[st.integers(0, min(2, n))] * 2)) for n in shape)
    boundary = data.draw(st.sampled_from([*MODES, 2.5]))
    corners, exchange = data.draw(st.booleans()), data.draw(st.sampled_from(ORDERS))
    x = np.random.default_rng(0).normal(size=shape)
    mode = MODES.get(boundary, "constant")
    value = {"constant_values": boundary} if mode == "constant" else {}
    expected = np.empty_like(x)
    star(np.pad(x, depth, mode, **value), expected, depth)

    def function(ctx):
        p = ctx.with_halo(x[box_slices(ctx.box)], depth, boundary, corners, exchange=exchange)
        p.data[p.data == 0] = np.nan  # halos that have not arrived
        out = np.empty_like(p.inner)
        for _ in range(2):
            pending = ctx.update_halo_begin(p, copy=False)
            star(p.interior.data, out[p.interior.where], depth)
            assert ctx.allreduce(1) == ctx.size, "which comes after the halos"
            assert pending.wait() is p.data
            assert pending.wait() is p.data
            for part in p.boundary_parts:
                star(part.data, out[part.where], depth)
                assert np.array_equal(part.data[part.inner], p.inner[part.where])
        assert np.array_equal(out, expected[box_slices(ctx.box)])

    run_gang(ranks, function)


def test_halos_that_are_on_their_way_are_not_exchanged_again():
    ctx = Context(RankGrid(((4,),), (1,)))
    p = ctx.with_halo(np.ones(4), boundary="periodic")
    pending = ctx.update_halo_begin(p)
    with pytest.raises(InputError, match=r"expected wait\(\) of the exchange"):
        ctx.update_halo(p)
    pending.wait()
    assert ctx.update_halo(p).tolist() == [1] * 6


@pytest.mark.parametrize("call", [Context.update_halo, Context.update_halo_begin])
def test_a_local_block_that_has_no_halos_is_refused(call):
    ctx = Context(RankGrid(((4,),), (1,)))
    with pytest.raises(InputError, match=r"memory from ctx.with_halo\(\), got ndarray. Make it"):
        call(ctx, np.ones(4))


def test_large_halos_arrive_in_the_order_of_calls():
    ranks = RankGrid(((4, 4), (500_000,)), (2, 1))  # halos of 4 MB: more than sockets buffer

    def function(ctx):
        fields = [
            ctx.with_halo(np.full((4, 500_000), 10.0 * i + ctx.rank), {0: 1}) for i in range(3)
        ]
        pending = [ctx.update_halo_begin(p) for p in fields]
        # While the function does something else.
        wait_until(lambda: has_come(connections_of(ctx), 1 - ctx.rank))
        for number in (2, 0, 1):
            halo = pending[number].wait()[-1 if ctx.rank == 0 else 0]
            assert (halo == 10 * number + 1 - ctx.rank).all()

    run_gang(ranks, function)


@pytest.mark.parametrize("dtype", ["f2", "f8", "c8"])
def test_corners_that_are_left_out_show(dtype):
    def function(ctx):
        p = ctx.with_halo(np.ones((4, 2), dtype), 1, 0.0, corners=False)
        for _ in range(2):
            halo = ctx.update_halo(p)
            assert np.isnan(halo[::5, ::3]).all()
            assert np.isnan(halo).sum() == 4

    run_gang(RankGrid(((4,), (2, 2)), (1, 2)), function)


def test_halos_of_one_field_stay_when_another_has_its_memory():
    x = np.arange(8.0)

    def function(ctx):
        local_slices = box_slices(ctx.box)
        p = ctx.with_halo(x[local_slices], boundary="periodic")
        first = ctx.update_halo(p)
        p.inner[...] = -x[local_slices]
        second = ctx.update_halo(p)
        expected = np.pad(x, 1, "wrap")[local_slices[0].start : local_slices[0].stop + 2]
        assert np.array_equal(first, expected)
        assert np.array_equal(second, -expected)
        first *= 0
        assert np.array_equal(p.inner, -x[local_slices]), "the caller owns the returned array"
        pending = ctx.update_halo_begin(p)
        begun = pending.wait()
        assert pending.wait() is begun
        p.inner[...] = x[local_slices]
        ctx.update_halo_begin(p).wait()
        assert np.array_equal(begun, -expected)
        assert ctx.update_halo(p, copy=False) is p.data

    run_gang(RankGrid(((4, 4),), (2,)), function)


def test_like_fields_that_are_exchanged_in_another_order_are_found():
    """Each would get the halos of the other."""

    def function(ctx):
        fields = [ctx.with_halo(np.full(4, float(i)), boundary="periodic") for i in range(2)]
        for p in fields if ctx.rank else reversed(fields):
            ctx.update_halo(p)

    with pytest.raises(SectionError, match=r"halo\(\) of halo array 1, .* of halo array 0, "):
        run_gang(RankGrid(((4, 4),), (2,)), function)


def test_parts_are_read_only():
    """Written in place, the first part would change the halos of the others."""
    ctx = Context(RankGrid(((8,),), (1,)))
    p = ctx.with_halo(np.ones(8), boundary="periodic")
    with pytest.raises(ValueError, match="read-only"):
        p.interior.data[p.interior.inner] *= 2
    p.inner[...] *= 2
    assert p.interior.data.max() == 2


@pytest.mark.parametrize("steps", [1, 3])
def test_results_in_the_copy_of_a_local_block_are_refused(steps):
    """Computed in the array that `update_halo` returns, as if it were the local block."""

    def in_place(ctx, x):
        p = ctx.with_halo(x, {0: 1}, "periodic")
        for _ in range(steps):
            u = ctx.update_halo(p)
            u[1:-1] = 0.5 * (u[:-2] + u[2:])
        return p.inner

    x = da.from_array(np.arange(24.0).reshape(6, 4), chunks=(3, 4))
    with pytest.raises(InputError, match=r"writes its results to the local block, p\.inner"):
        spmd(in_place, x, ranks=1).compute(scheduler="sync")


def bounded(x, padded):
    for _ in range(3):
        u = padded()
        u[0] = 0
        x[...] = u[:-2] + u[2:]
    return x


def test_copies_of_a_local_block_may_be_written_to():
    """Also if the local block stays unchanged."""

    def by_ranks(ctx, x):
        p = ctx.with_halo(x, {0: 1}, "periodic")
        return bounded(p.inner, lambda: ctx.update_halo(p))

    def scratch(ctx, x):
        u = ctx.update_halo(ctx.with_halo(x, {0: 1}, "periodic"))
        u *= 2
        return u[:-2] + u[2:]

    x = np.arange(24.0).reshape(6, 4)
    blocks, y = da.from_array(x, chunks=(3, 4)), x.copy()
    expected = bounded(y, lambda: np.pad(y, ((1, 1), (0, 0)), "wrap"))
    assert np.array_equal(spmd(by_ranks, blocks, ranks=1).compute(scheduler="sync"), expected)
    expected = 2 * (np.roll(x, 1, 0) + np.roll(x, -1, 0))
    assert np.array_equal(spmd(scratch, blocks, ranks=1).compute(scheduler="sync"), expected)
