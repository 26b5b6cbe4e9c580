from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.errors import InputError
from dask_p2p.geometry import box_slices
from dask_p2p.plans.members import Members
from dask_p2p.plans.orders import ORDERS
from dask_p2p.sections import Context
from tests.sections.gangs import has_come, links_of, run_gang
from tests.transports.loopback import wait_until

MODES = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}


def star(u, out, depth):
    """Weigh each neighbour along each axis otherwise."""
    own = [slice(before, n - after) for n, (before, after) in zip(u.shape, depth, strict=True)]
    out[...] = u[tuple(own)]
    for axis, (before, after) in enumerate(depth):
        for by in range(-before, after + 1):
            at = list(own)
            at[axis] = slice(own[axis].start + by, own[axis].stop + by)
            out += (7 * axis + by) / 3 * u[tuple(at)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_interior_and_frames_make_what_the_whole_makes(data):
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    members = Members.at_most(chunks, data.draw(st.integers(1, 4)))
    depth = tuple(data.draw(st.tuples(*[st.integers(0, min(2, n))] * 2)) for n in shape)
    boundary = data.draw(st.sampled_from([*MODES, 2.5]))
    corners, exchange = data.draw(st.booleans()), data.draw(st.sampled_from(ORDERS))
    x = np.random.default_rng(0).normal(size=shape)
    mode = MODES.get(boundary, "constant")
    value = {"constant_values": boundary} if mode == "constant" else {}
    wanted = np.empty_like(x)
    star(np.pad(x, depth, mode, **value), wanted, depth)

    def function(ctx):
        p = ctx.padded(x[box_slices(ctx.box)], depth, boundary, corners, exchange=exchange)
        p.data[p.data == 0] = np.nan  # rims that have not come
        out = np.empty_like(p.inner)
        for _ in range(2):
            pending = ctx.halo_begin(p)
            star(p.interior.data, out[p.interior.where], depth)
            assert ctx.allreduce(1) == ctx.size, "which comes after the rims"
            assert pending.wait() is p.data
            assert pending.wait() is p.data
            for part in p.frames:
                star(part.data, out[part.where], depth)
                assert np.array_equal(part.data[part.inner], p.inner[part.where])
        assert np.array_equal(out, wanted[box_slices(ctx.box)])

    run_gang(members, function)


def test_rims_that_are_on_their_way_are_not_exchanged_again():
    ctx = Context(Members(((4,),), (1,)))
    p = ctx.padded(np.ones(4), boundary="periodic")
    pending = ctx.halo_begin(p)
    with pytest.raises(InputError, match=r"expected wait\(\) of the exchange"):
        ctx.halo(p)
    pending.wait()
    assert ctx.halo(p).tolist() == [1] * 6


def test_elements_that_are_nothing_but_bytes():
    ctx = Context(Members(((2,), (2,)), (1, 1)))
    share = np.full((2, 2), b"seven").view("V5")
    filled = [[b"", b"seven", b"seven", b""], [b"seven"] * 4]
    p = ctx.padded(share, 1, "nearest", corners=False)
    assert ctx.halo(p).view("S5").tolist() == [*filled, *filled[::-1]], "corners are zero"
    p = ctx.padded(share, 1, "nearest")
    assert ctx.halo(p).view("S5").tolist() == [[b"seven"] * 4] * 4


@pytest.mark.parametrize("call", [Context.halo, Context.halo_begin])
def test_a_share_that_has_no_rims_is_refused(call):
    ctx = Context(Members(((4,),), (1,)))
    with pytest.raises(InputError, match=r"what ctx.padded\(\) returned, got ndarray. Make it"):
        call(ctx, np.ones(4))


def test_large_rims_arrive_in_the_order_of_calls():
    members = Members(((4, 4), (500_000,)), (2, 1))  # rims of 4 MB: more than sockets buffer

    def function(ctx):
        fields = [ctx.padded(np.full((4, 500_000), 10.0 * i + ctx.rank), {0: 1}) for i in range(3)]
        pending = [ctx.halo_begin(p) for p in fields]
        # While the function does something else.
        wait_until(lambda: has_come(links_of(ctx), 1 - ctx.rank))
        for number in (2, 0, 1):
            rim = pending[number].wait()[-1 if ctx.rank == 0 else 0]
            assert (rim == 10 * number + 1 - ctx.rank).all()

    run_gang(members, function)
