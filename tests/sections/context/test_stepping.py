"""Loops of steps: which state a rank goes on with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from tests.sections.gangs import run_gang

STEPS = 12

# --- loops whose state is no longer what they save: by `ctx.state`, and by `save=`


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
    ("function", "name", "value"),
    [
        (a_local_name, "u", "x"),
        (swapped, "u", "u"),
        (in_a_dict, r"fields\['u'\]", r"fields\['u'\]"),
        (halo_array_anew, r"p\.inner", "p"),
    ],
)
def test_names_of_the_state_that_are_bound_again_are_refused(alone, function, name, value):
    alone.is_due = lambda period, step: period._every == 5 and step % 5 == 0
    message = rf"state: expected {name} to stay .* the state itself, s\.{value} = "
    with pytest.raises(InputError, match=message):
        function(alone, np.arange(3.0))


def arrays_bound_again(ctx, x):
    for _ in ctx.steps(STEPS, save=[x]):
        x = x + 1


def levels_bound_again(ctx, u):
    before = u
    for _ in ctx.steps(STEPS, save=[u, before]):
        u, before = 2 * u - before + 1, u


def a_number(ctx, x):
    n = np.zeros(())
    for _ in ctx.steps(STEPS, save=[n]):
        n = n + 1


def empty(ctx, x):
    e = np.zeros((0, 3))
    for _ in ctx.steps(STEPS, save=[e]):
        e = e + 1


def in_a_view(ctx, x):
    inner = x[1:-1]
    for _ in ctx.steps(STEPS, save=[inner]):
        inner = inner * 2


def a_list_turned(ctx, x):
    state = [x + 0, x + 1]
    for _ in ctx.steps(STEPS, save=state):
        state[1] += state[0]
        state.reverse()


def in_attributes(ctx, x):
    model = SimpleNamespace(u=x + 0, v=x + 1)
    for _ in ctx.steps(STEPS, save=[model.u, model.v]):
        model.u, model.v = model.v, model.u


def halo_arrays_in_turn(ctx, x):
    p, q = ctx.with_halo(x), ctx.with_halo(x)
    for _ in ctx.steps(STEPS, save=[p.inner]):
        q.inner[:] = p.inner + 1
        p, q = q, p


def a_free_variable(ctx, x):
    def step():
        nonlocal x
        x = x + 1

    for _ in ctx.steps(STEPS, save=[x]):
        step()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (arrays_bound_again, "x"),
        (levels_bound_again, "before|u"),
        (a_number, "n"),
        (empty, "e"),
        (in_a_view, "inner"),
        (a_list_turned, r"state\[0\]"),
        (in_attributes, r"model\.u"),
        (halo_arrays_in_turn, r"p\.inner"),
        (a_free_variable, "x"),
    ],
)
def test_saved_arrays_that_are_bound_again_are_refused(alone, function, name):
    alone.is_due = lambda period, step: period._every == 5 and step % 5 == 0
    now = r"is no longer the saved array\."
    message = rf"save: .* but ({name}) {now} .* place, ({name})\[\.\.\.\] = "
    with pytest.raises(InputError, match=message):
        function(alone, np.arange(3.0))


# --- right loops, whose values are 12, 13 and 14


def bound_again(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
    return s.x


def in_place_by_another_name(ctx, x):
    s = ctx.state(x=x)
    u = s.x
    for _ in ctx.steps(STEPS, s, every=1):
        u += 1
    return u


def levels(ctx, x):
    s = ctx.state(levels=[x, x])
    for _ in ctx.steps(STEPS, s, every=1):
        s.levels = [s.levels[0] + 1, s.levels[0]]
    return s.levels[0]


def constants(ctx, x):
    s = ctx.state(x=x, zeros=np.zeros(3), model={"n": 3}, empty=np.zeros((0, 3)))
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
    return s.x


def numbers(ctx, x):
    s = ctx.state(x=x, t=0.5, n=0, z=np.float32(0), flags=(False, 1j))
    for step in ctx.steps(STEPS, s, every=1):
        assert (s.t, s.n, s.z, s.flags) == (0.5 + step, step, step, (step % 2 == 1, 1j + step))
        assert [type(number) for number in (s.t, s.n, s.z)] == [float, int, np.float32]
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
    s, expected = ctx.state(x=x, draw=np.random.default_rng(3)), np.random.default_rng(3)
    expected.normal(size=STEPS)
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + s.draw.normal()
    assert s.draw.normal() == expected.normal()
    return x + STEPS


def halo_arrays(ctx, x):
    p, q = ctx.with_halo(x), ctx.with_halo(x)
    s = ctx.state(p=p)
    for _ in ctx.steps(STEPS, s, every=1):
        q.inner[:] = s.p.inner + 1
        p.inner[:] = q.inner
    return p.inner.copy()


def without_end(ctx, x):
    s = ctx.state(x=np.broadcast_to(x, 3))
    for step in ctx.steps(None, s, every=1):
        s.x = np.broadcast_to(s.x + 1, 3)  # read-only
        if step == STEPS - 1:
            break
    return s.x


def not_saved(ctx, x):
    for _ in ctx.steps(STEPS):
        x = x + 1
    return x


def by_checkpoints(ctx, x):
    for step in range(ctx.restore(x), STEPS):
        x = x + 1
        ctx.checkpoint(step + 1, x)
    return x


RIGHT = [
    *(bound_again, in_place_by_another_name, levels, constants, numbers),
    *(other_shapes, dicts, random_numbers, halo_arrays, without_end, not_saved, by_checkpoints),
]


def in_place(ctx, x):
    for _ in ctx.steps(STEPS, save=[x], every=1):
        new = x + 1
        x[:] = new
    return x


def changes_rarely(ctx, x):
    rare = np.zeros(())
    for step in ctx.steps(STEPS, save=[x, rare], every=1):
        x += 1
        if step == 7:
            rare[...] = 1
    return x


def swapped_back(ctx, x):
    v = np.empty_like(x)
    for _ in ctx.steps(STEPS, save=[x, v], every=1):
        x, v = v, x
        x[:] = v + 1
        x, v = v, x
        x[:] = v
    return x


def never_saved(ctx, x):
    for _ in ctx.steps(STEPS, save=[x], every=None):
        x = x + 1
    return x


SAVED = [in_place, changes_rarely, swapped_back, never_saved]


@pytest.mark.parametrize("function", [*RIGHT, *SAVED])
def test_right_states_are_not_refused(alone, function):
    assert function(alone, np.arange(3.0)).tolist() == [12, 13, 14]


# --- loops that begin at the start, since values that they need are not in the state


def copy_worked_on(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        x += 1
    return x


def number_not_used(ctx, x):
    s = ctx.state(x=x, n=0)
    n = s.n
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
        n += 1
    assert n == STEPS
    return s.x


def copy_of_saved_worked_on(ctx, x):
    y = x.copy()
    for _ in ctx.steps(STEPS, save=[x], every=1):
        y += 1
    return y


def rows(ctx, x):
    for _ in ctx.steps(STEPS, save=[x[:2], x[2:]], every=1):
        x = x + 1
    return x


AT_THE_START = [constants, copy_worked_on, number_not_used]


def attempts(size):
    """Return a function that runs an attempt of ranks from a step; they keep their states."""
    ranks, saved = RankGrid(((3,) * size,), (size,)), [SavedStates() for _ in range(size)]

    def attempt(resume, function, wrap=lambda checkpoints: checkpoints):
        def checkpoints(rank, connections, device):
            states = States(saved[rank], "x", resume, range(size), lambda: None)
            return wrap(Checkpoints(rank, [*"ab"[:size]], connections, states, device))

        return run_gang(ranks, function, checkpoints=checkpoints)

    return attempt, saved


class StoppedError(Exception):
    pass


def first_step_again(function):
    """Check the values of a function that begins again; return its first step, or None."""
    attempt, saved = attempts(2)
    first_steps = []

    def call(ctx):
        values = function(ctx, np.arange(3.0))
        first_steps.append(ctx.progress.first)
        assert values.tolist() == [12, 13, 14]

    def stop_at_step_7(checkpoints):
        save = checkpoints.save

        def save_and_stop(step, arrays):
            save(step, arrays)
            if step == 7:
                checkpoints._connections.gather("both have their states", b"")
                raise StoppedError

        checkpoints.save = save_and_stop
        return checkpoints

    attempt(None, call)
    if not saved[0].gangs:
        return None
    for states in saved:
        states.drop("x")
    with pytest.raises(StoppedError):
        attempt(None, call, stop_at_step_7)
    attempt(7, call)
    return first_steps[-1]


@pytest.mark.parametrize("function", [*RIGHT, *AT_THE_START[1:]])
def test_ranks_that_begin_again_make_the_same(function):
    """An unchanged state is no reason to leave out steps, whichever state was kept."""
    first = first_step_again(function)
    assert first in (None, 0 if function in AT_THE_START else 7)


@pytest.mark.parametrize("function", [*SAVED, copy_of_saved_worked_on, rows])
def test_ranks_with_saved_arrays_that_begin_again_make_the_same(function):
    first_step_again(function)


def test_a_state_that_changes_at_one_rank_is_brought_back():
    """A wave that has not come to the others yet."""
    attempt, _ = attempts(2)

    def saves(ctx):
        ctx.checkpoint(3, np.full(3, float(ctx.rank)), np.ones(ctx.rank))

    def restores(ctx):
        x, few = np.zeros(3), np.zeros(ctx.rank)
        return ctx.restore(x, few), x.tolist(), few.tolist()

    attempt(None, saves)
    assert attempt(3, restores) == [(3, [0] * 3, []), (3, [1] * 3, [1])]


def test_arrays_of_another_shape_than_those_that_were_saved():
    attempt, _ = attempts(1)
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


# --- variables that a loop carries from step to step, next to its state


def time(ctx, s):
    t = 0.0
    for _ in ctx.steps(3, s):
        s.u = s.u + t
        t += 0.5


def previous(ctx, s):
    before, scale = s.u.copy(), np.float64(1)
    for _ in ctx.steps(3, s):
        s.u, before = 2 * scale * s.u - before, s.u
        scale = scale / 2


def closing(ctx, s):
    t = 0

    def scaled():
        return s.u * t

    for _ in ctx.steps(3, s):
        t += 1
        s.u = scaled()


def residual(ctx, s):
    error, small = np.inf, 1e-3
    for step in ctx.steps(3, s):
        new = s.u / 2
        error = abs(new - s.u).max()
        s.u = new
        if error < small or step > 100:
            break
    return error


def views_of_the_state(ctx, s):
    u = s.u
    w = s.u[1:]
    for _ in ctx.steps(3, s):
        u += 1
        w *= 2


def inner_loop(ctx, s):
    for _ in ctx.steps(3, s):
        total = 0.0
        for number in range(3):
            total += number
        s.u = s.u + total + sum([number for number in range(2)])  # noqa: C416


def attribute(ctx, s):
    for _ in ctx.steps(3, s):
        s.t += 0.5
        s.u = s.u + s.t


@pytest.mark.parametrize(
    ("function", "names"),
    [
        *((time, ["t"]), (previous, ["scale", "before"]), (closing, ["t"]), (residual, [])),
        *((views_of_the_state, []), (inner_loop, []), (attribute, [])),
    ],
)
def test_values_that_a_loop_carries_are_named(alone, function, names, own_log):
    s = alone.state(u=np.ones(3), t=0.0)
    function(alone, s)
    assert len(own_log.messages) == bool(names)
    assert not names or any(f"Give them to ctx.state: s.{name}." in own_log.text for name in names)
