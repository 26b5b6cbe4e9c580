"""Loops of steps that save arrays: which state a rank goes on with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import InputError
from tests.sections.context.resuming import first_step_again

STEPS = 12


def bound_again(ctx, x):
    for _ in ctx.steps(STEPS, save=[x]):
        x = x + 1


def one_of_two(ctx, x):
    y = x.copy()
    for _ in ctx.steps(STEPS, save=(of for of in (x, y))):
        x += 1
        y = y + x


def later(ctx, x):
    for step in ctx.steps(STEPS, save=[x], every=5):
        if step < 6:
            x += 1
        else:
            x = x + 1


def swapped(ctx, u):
    v = u.copy()
    for _ in ctx.steps(STEPS, save=[u, v]):
        v += u
        u, v = v, u


def swapped_names_of_names(ctx, x, y=None):
    y = x.copy()
    u, v = x, y
    for _ in ctx.steps(STEPS, save=[u, v]):
        v += u
        u, v = v, u


def levels(ctx, u):
    before = u
    for _ in ctx.steps(STEPS, save=[u, before]):
        u, before = 2 * u - before + 1, u


def of_integers(ctx, x):
    n = np.zeros(1, int)
    for _ in ctx.steps(STEPS, save=[n]):
        n = n + 1


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


def in_a_dict(ctx, x):
    state = {"u": x + 0}
    for _ in ctx.steps(STEPS, save=state.values()):
        state["u"] = state["u"] + 1


def in_a_list(ctx, x):
    state = [x + 0]
    for _ in ctx.steps(STEPS, save=state):
        state[0] = state[0] + 1


def a_list_turned(ctx, x):
    state = [x + 0, x + 1]
    for _ in ctx.steps(STEPS, save=state):
        state[1] += state[0]
        state.reverse()


def a_new_list(ctx, x):
    state = [x + 0, x + 1]
    for _ in ctx.steps(STEPS, save=state):
        state = [each + 1 for each in state]


def a_new_tuple(ctx, x):
    fields = x, x + 1
    for _ in ctx.steps(STEPS, save=fields):
        fields = tuple(each + 1 for each in fields)


def in_attributes(ctx, x):
    of = SimpleNamespace(u=x + 0, v=x + 1)
    for _ in ctx.steps(STEPS, save=[of.u, of.v]):
        of.u, of.v = of.v, of.u


def halo_array_anew(ctx, x):
    p = ctx.with_halo(x)
    for _ in ctx.steps(STEPS, save=[p.inner]):
        p = ctx.with_halo(p.inner + 1)


def halo_arrays_in_turn(ctx, x):
    p, q = ctx.with_halo(x), ctx.with_halo(x)
    for _ in ctx.steps(STEPS, save=[p.inner]):
        q.inner[:] = p.inner + 1
        p, q = q, p


def wrapped(ctx, x):
    def counted(steps):
        yield from steps

    for _ in counted(ctx.steps(STEPS, save=[x])):
        x = x + 1


def in_a_function_of_its_own(ctx, x):
    bound_again(ctx, x)


def steps_of_its_own(ctx, x):
    def steps(save):
        yield from enumerate(ctx.steps(STEPS, save=save))

    for _ in steps([x]):
        x = x + 1


def a_free_variable(ctx, x):
    def step():
        nonlocal x
        x = x + 1

    for _ in ctx.steps(STEPS, save=[x]):
        step()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (bound_again, "x"),
        (one_of_two, "y"),
        (later, "x"),
        (swapped, "u"),
        (swapped_names_of_names, "u"),
        (levels, "before|u"),
        (of_integers, "n"),
        (a_number, "n"),
        (empty, "e"),
        (in_a_view, "inner"),
        (in_a_dict, r"state\['u'\]"),
        (in_a_list, r"state\[0\]"),
        (a_list_turned, r"state\[0\]"),
        (a_new_list, r"state\[0\]"),
        (a_new_tuple, r"fields\[1\]"),
        (in_attributes, r"of\.u"),
        (halo_array_anew, r"p\.inner"),
        (halo_arrays_in_turn, r"p\.inner"),
        (wrapped, "x"),
        (in_a_function_of_its_own, "x"),
        (steps_of_its_own, "x"),
        (a_free_variable, "x"),
    ],
)
def test_a_state_in_other_arrays_is_refused(alone, function, name):
    alone.is_due = lambda period, step: period._every == 5 and step % 5 == 0
    now = r"is no longer the saved array\."
    message = rf"save: .* but ({name}) {now} .* place, ({name})\[\.\.\.\] = "
    with pytest.raises(InputError, match=message):
        function(alone, np.arange(3.0))


def in_place(ctx, x):
    new = x
    for _ in ctx.steps(STEPS, save=[x], every=1):
        new = x + 1
        x[:] = new
    return x


def constant(ctx, x):
    converged, zeros, field = x.copy(), np.zeros(3, int), {"u": x}
    for _ in ctx.steps(STEPS, save=[converged, zeros, field["u"]], every=1):
        other = converged * 1
        converged[:] = other
    return x + STEPS


def changes_rarely(ctx, x):
    rare = np.zeros(())
    for step in ctx.steps(STEPS, save=[x, rare], every=1):
        x += 1
        if step == 7:
            rare[...] = 1
    return x


def names_reused(ctx, x):
    """A name of a loop before, and one of an array that an object has."""
    of = SimpleNamespace(u=x, v=x.copy())
    for a in (of.u, of.v):
        a *= 1
    for _ in ctx.steps(STEPS, save=[of.u, of.v], every=1):
        a = of.u + 1
        x = a * 1
        of.u[:] = a
        of.v -= 1
    return of.u


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


RIGHT = [
    in_place,
    constant,
    changes_rarely,
    names_reused,
    swapped_back,
    never_saved,
]


@pytest.mark.parametrize("function", RIGHT)
def test_right_states_are_not_refused(alone, function):
    assert function(alone, np.arange(3.0)).tolist() == [12, 13, 14]


def copy_worked_on(ctx, x):
    y = x.copy()
    for _ in ctx.steps(STEPS, save=[x], every=1):
        y += 1
    return y


def another_name(ctx, x):
    y = x
    for _ in ctx.steps(STEPS, save=[y], every=1):
        y = y + 1
    return y


def rows(ctx, x):
    for _ in ctx.steps(STEPS, save=[x[:2], x[2:]], every=1):
        x = x + 1
    return x


def deep_inside(ctx, x):
    of = SimpleNamespace(deep=SimpleNamespace(u=x.copy()))
    for _ in ctx.steps(STEPS, save=[of.deep.u], every=1):
        of.deep.u = of.deep.u + 1
    return of.deep.u


@pytest.mark.parametrize("function", [*RIGHT, copy_worked_on, another_name, rows, deep_inside])
def test_ranks_that_begin_again_make_the_same(function):
    """An unchanged state is no reason to leave out steps, whichever state was kept."""
    first_step_again(function)
