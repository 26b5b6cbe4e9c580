"""Loops of steps: which state a rank goes on with."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from tests.sections.context.resuming import first_step_again
from tests.sections.gangs import run_gang

STEPS = 12


def a_local_name(ctx, x):
    s = ctx.state(x=x)
    u = s.x
    for _ in ctx.steps(STEPS, s):
        u = u + 1


def swapped(ctx, x):
    s = ctx.state(u=x, v=x)
    u, v = s.u, s.v
    for _ in ctx.steps(STEPS, s):
        v += u
        u, v = v, u


def in_a_dict(ctx, x):
    s = ctx.state(fields={"u": x})
    fields = {"u": s.fields["u"]}
    for _ in ctx.steps(STEPS, s):
        fields["u"] = fields["u"] + 1


def halo_array_anew(ctx, x):
    p = ctx.with_halo(x)
    for _ in ctx.steps(STEPS, ctx.state(p=p)):
        p = ctx.with_halo(p.inner + 1)


@pytest.mark.parametrize(
    ("function", "name", "of"),
    [
        (a_local_name, "u", "x"),
        (swapped, "u", "u"),
        (in_a_dict, r"fields\['u'\]", r"fields\['u'\]"),
        (halo_array_anew, r"p\.inner", "p"),
    ],
)
def test_names_of_the_state_that_are_bound_again_are_refused(alone, function, name, of):
    """Names are found wherever `test_saved_arrays` finds them."""
    alone.is_due = lambda period, step: period._every == 5 and step % 5 == 0
    message = rf"state: expected {name} to stay .* the state itself, s\.{of} = "
    with pytest.raises(InputError, match=message):
        function(alone, np.arange(3.0))


def bound_again(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
    return s.x


def in_place(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x += 1
    return s.x


def in_place_by_another_name(ctx, x):
    s = ctx.state(x=x)
    u = s.x
    for _ in ctx.steps(STEPS, s, every=1):
        u += 1
    return u


def names_reused(ctx, x):
    """The argument's name, and one that is new in the loop."""
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        x = s.x * 1
        u = x + 1
        s.x = u
    return s.x


def swapped_in_the_state(ctx, x):
    s = ctx.state(u=x, v=x)
    for _ in ctx.steps(STEPS, s, every=1):
        s.u, s.v = s.v + 1, s.u + 1
    return s.u


def levels(ctx, x):
    s = ctx.state(levels=[x, x])
    for _ in ctx.steps(STEPS, s, every=1):
        s.levels = [s.levels[0] + 1, s.levels[0]]
    return s.levels[0]


def constants(ctx, x):
    s = ctx.state(x=x, zeros=np.zeros(3), of={"n": 3}, empty=np.zeros((0, 3)))
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
    return s.x


def numbers(ctx, x):
    s = ctx.state(x=x, t=0.5, n=0, z=np.float32(0), flags=(False, 1j))
    for step in ctx.steps(STEPS, s, every=1):
        assert (s.t, s.n, s.z, s.flags) == (0.5 + step, step, step, (step % 2 == 1, 1j + step))
        assert [type(each) for each in (s.t, s.n, s.z)] == [float, int, np.float32]
        s.x, s.t, s.n, s.z = s.x + 1, s.t + 1, s.n + 1, s.z + np.float32(1)
        s.flags = (not s.flags[0], s.flags[1] + 1)
    return s.x


def other_shapes(ctx, x):
    """Particles that come and go."""
    s = ctx.state(x=x, some=np.zeros((1, 2), "f4"))
    for step in ctx.steps(STEPS, s, every=1):
        assert s.some.tolist() == [[step, step]] * (1 + step % 3)
        assert s.some.dtype == "f4"
        s.x = s.x + 1
        s.some = np.full((1 + (step + 1) % 3, 2), step + 1, "f4")
    return s.x


def dicts(ctx, x):
    s = ctx.state(fields={"u": x, 2: (x - 1, 0.0)})
    for _ in ctx.steps(STEPS, s, every=1):
        first, second = s.fields[2]
        s.fields["u"] = first + 2
        s.fields = {**s.fields, 2: (s.fields["u"] - 1, second + 1)}
    assert s.fields[2][1] == STEPS
    return s.fields["u"]


def random_numbers(ctx, x):
    s, wanted = ctx.state(x=x, draw=np.random.default_rng(3)), np.random.default_rng(3)
    wanted.normal(size=STEPS)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + s.draw.normal()
    assert s.draw.normal() == wanted.normal()
    return x + STEPS


def halo_arrays(ctx, x):
    p, q = ctx.with_halo(x), ctx.with_halo(x)
    s = ctx.state(p=p)
    for _ in ctx.steps(STEPS, s, every=1):
        q.inner[:] = s.p.inner + 1
        p.inner[:] = q.inner
    return p.inner.copy()


def read_only(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = np.broadcast_to(s.x + 1, 3)
    return s.x


def without_end(ctx, x):
    s = ctx.state(x=x)
    for step in ctx.steps(None, s, every=1):
        s.x = s.x + 1
        if step == STEPS - 1:
            break
    return s.x


def not_saved(ctx, x):
    for _ in ctx.steps(STEPS):
        x = x + 1
    return x


def never_saved(ctx, x):
    s = ctx.state(x=x)
    u = s.x
    for _ in ctx.steps(STEPS, s, every=None):
        u = u + 1
    return u


def by_checkpoints(ctx, x):
    for step in range(ctx.restore(x), STEPS):
        x = x + 1
        ctx.checkpoint(step + 1, x)
    return x


RIGHT = [
    bound_again,
    in_place,
    in_place_by_another_name,
    names_reused,
    swapped_in_the_state,
    levels,
    constants,
    numbers,
    other_shapes,
    dicts,
    random_numbers,
    halo_arrays,
    read_only,
    without_end,
    not_saved,
    never_saved,
    by_checkpoints,
]


@pytest.mark.parametrize("function", RIGHT)
def test_right_states_are_not_refused(alone, function):
    assert function(alone, np.arange(3.0)).tolist() == [12, 13, 14]


def copy_worked_on(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        x += 1
    return x


def argument_worked_on(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        x = x + 1
    return x


def number_not_used(ctx, x):
    s = ctx.state(x=x, n=0)
    n = s.n
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
        n += 1
    assert n == STEPS
    return s.x


AT_THE_START = [constants, copy_worked_on, argument_worked_on, number_not_used]


@pytest.mark.parametrize("function", [*RIGHT, *AT_THE_START[1:]])
def test_ranks_that_begin_again_make_the_same(function):
    """An unchanged state is no reason to leave out steps, whichever state was kept."""
    first = first_step_again(function)
    assert first in (None, 0 if function in AT_THE_START else 7)


def attempts(size):
    """Return a function that runs an attempt of ranks from a step; they keep their states."""
    ranks, kept = RankGrid(((3,) * size,), (size,)), [SavedStates() for _ in range(size)]

    def attempt(resume, function):
        def checkpoints(rank, connections, device):
            own = States(kept[rank], "x", resume, range(size), lambda: None)
            return Checkpoints(rank, [*"ab"[:size]], connections, own, device)

        return run_gang(ranks, function, checkpoints=checkpoints)

    return attempt


def test_a_state_that_changes_at_one_rank_is_brought_back():
    """A wave that has not come to the others yet."""
    attempt = attempts(2)

    def saves(ctx):
        ctx.checkpoint(3, np.full(3, float(ctx.rank)), np.ones(ctx.rank))

    def restores(ctx):
        x, few = np.zeros(3), np.zeros(ctx.rank)
        return ctx.restore(x, few), x.tolist(), few.tolist()

    attempt(None, saves)
    assert attempt(3, restores) == [(3, [0] * 3, []), (3, [1] * 3, [1])]


def test_arrays_of_another_shape_than_those_that_were_saved():
    attempt = attempts(1)
    dtype = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    attempt(None, lambda ctx: ctx.checkpoint(5, np.ones(3), np.ones(2, dtype)))

    def refuses(ctx):
        with pytest.raises(InputError, match=r"'<f8', \(3,\).*got .*the same arrays"):
            ctx.restore(np.zeros(2), np.zeros(3))

    def restores(ctx):
        x, y = np.zeros(3), np.zeros(2, dtype)
        return ctx.restore(x, y), x.tolist(), y.tolist()

    attempt(5, refuses)
    assert attempt(5, restores) == [(5, [1.0] * 3, [(1, 1.0)] * 2)]


def test_restore_and_checkpoint_take_the_same_arrays(alone):
    """Not as many bytes of others."""
    u, n = np.zeros(2), np.zeros(2, int)
    alone.restore(u, n)
    with pytest.raises(InputError, match=r"shapes and dtypes that ctx\.restore filled"):
        alone.checkpoint(1, n, u)
    alone.checkpoint(1, u + 1, n + 1)
