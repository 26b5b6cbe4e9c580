"""Variables that loops carry from step to step, next to their states."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dask_p2p.sections.context.state import State, carried_values
from dask_p2p.sections.exchange.device import HOST


def steps(state, found):
    """Three steps; record the carried values after the first one."""
    for step in range(3):
        yield step
        if step == 0:
            frame = sys._getframe(1)
            found += carried_values(state, frame.f_code, frame)


def time(s, loop):
    t = 0.0
    for _ in loop:
        s.u = s.u + t
        t += 0.5


def previous(s, loop):
    before, scale = s.u.copy(), np.float64(1)
    for _ in loop:
        s.u, before = 2 * scale * s.u - before, s.u
        scale = scale / 2


def residual(s, loop):
    error, small = np.inf, 1e-3
    for step in loop:
        new = s.u / 2
        error = abs(new - s.u).max()
        s.u = new
        if error < small or step > 100:
            break
    return error


def of_state(s, loop):
    u = s.u
    w = s.u[1:]
    for _ in loop:
        u += 1
        w *= 2


def inner(s, loop):
    for _ in loop:
        total = 0.0
        for number in range(3):
            total += number
        s.u = s.u + total + sum([number for number in range(2)])  # noqa: C416


def closing(s, loop):
    t = 0

    def scaled():
        return s.u * t

    for _ in loop:
        t += 1
        s.u = scaled()


def attribute(s, loop):
    for _ in loop:
        s.t += 0.5
        s.u = s.u + s.t


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (time, ["t"]), (previous, ["scale", "before"]), (closing, ["t"]),
        (residual, []), (of_state, []), (inner, []), (attribute, []),
    ],
)  # fmt: skip
def test_values_that_a_loop_carries(function, names, own_log):
    state, found = State(HOST, {"u": np.ones(3), "t": 0.0}), []
    function(state, steps(state, found))
    assert sorted(found) == sorted(names)
    assert [f"Give them to ctx.state: s.{name}." in own_log.text for name in found[:1]] == [
        True for _ in names[:1]
    ]
    assert len(own_log.messages) == len(names[:1])


def test_a_loop_of_other_code():
    """Such as that of a progress bar, with counters of its own."""
    assert carried_values(State(HOST, {"u": np.ones(3)}), time.__code__, sys._getframe()) == []


def test_a_loop_by_calls_of_next():
    state, found = State(HOST, {"u": np.ones(3)}), []
    loop, t = steps(state, found), 0
    while next(loop, None) is not None:
        t += 1
    assert (t, found) == (3, [])
