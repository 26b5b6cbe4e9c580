"""Functions that keep values from step to step."""

from __future__ import annotations

import logging
from functools import partial
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.sections.exchange.device import HOST
from dask_p2p.sections.iterate.function_state import FunctionState

FACTOR = 3


def plain(u):
    return FACTOR * np.sin(u[1:-1])


def printing(u):
    print(u.shape)  # noqa: T201
    return u


def counting():
    seen = []
    return lambda u: seen.append(1) or u + len(seen)


def counting_in_an_attribute():
    def count(u):
        count.calls += 1
        return u + count.calls

    count.calls = 0
    return count


def counting_in_a_default():
    def count(u, seen=[0]):  # noqa: B006
        seen[0] += 1
        return u + seen[0]

    return count


def counting_in_an_array():
    calls = np.zeros(1)

    def count(u):
        calls[0] += 1
        return u + calls[0]

    return count


class Counter:
    calls = 0

    def __call__(self, u):
        self.calls += 1
        return u + self.calls

    def step(self, u):
        return self(u)


def drawing():
    rng = np.random.default_rng(0)
    return lambda u: u + rng.normal()


def keeping_a_lock():
    lock, seen = Lock(), []
    return lambda u: (lock, seen.append(1), u)[2]


STATES = [
    *(counting, counting_in_an_attribute, counting_in_a_default, counting_in_an_array),
    *(Counter, lambda: Counter().step, lambda: partial(counting()), drawing),
]


def state_of(function, until=None, checkpoint=None, boundary=(), computed=(), **kwargs):
    """Return the state of one rank, whose collective calls are counted."""
    calls = []

    def allreduce(value, op):
        calls.append(op)
        return value

    phases = [SimpleNamespace(function=function)]
    of = SimpleNamespace(
        phases=phases, series=(), until=until, fixed_arguments=[*kwargs.values()],
        stores=SimpleNamespace(checkpoint=checkpoint, frames=[SimpleNamespace(computed=computed)]),
        fields=[SimpleNamespace(boundary=boundary)],
    )  # fmt: skip
    return FunctionState(of, SimpleNamespace(allreduce=allreduce, rank=0, device=HOST)), calls


def test_plain_functions_need_no_collective_call():
    state, calls = state_of(plain, lambda total: total < 1, factor=2.0, weights=np.ones(3))
    assert not state.has_changed()
    assert not calls


@pytest.mark.parametrize("make", STATES)
def test_functions_that_keep_values(make, own_log):
    function = make()
    state, calls = state_of(function)
    assert not state.has_changed()
    assert not own_log.messages
    with own_log.at_level(logging.WARNING):
        for _ in range(2):
            function(np.ones(3))
            assert state.has_changed()
    assert len(calls) == 3
    assert len(own_log.messages) == 1
    assert "Give such a value as a field" in own_log.text


def test_boundaries_and_computed_fields_that_keep_values():
    for place in ("boundary", "computed"):
        function = counting()
        computed = [SimpleNamespace(function=function)]
        given = ["periodic", (0, function)] if place == "boundary" else computed
        state, _ = state_of(plain, **{place: given})
        assert not state.has_changed()
        function(0)
        assert state.has_changed()


def test_until_and_keywords_that_keep_values():
    until, factors = counting(), [1.0]
    state, _ = state_of(plain, until)
    until(0)
    assert state.has_changed()
    state, _ = state_of(plain, factors=factors)
    assert not state.has_changed()
    factors.append(2.0)
    assert state.has_changed()


@pytest.mark.parametrize("make", [lambda: printing, keeping_a_lock, lambda: np.vectorize(abs)])
def test_functions_without_a_known_change(make):
    function = make()
    state, _ = state_of(function)
    function(np.ones(3))
    assert not state.has_changed()


def steps_of(function, checkpoint):
    state, _ = state_of(function, checkpoint=checkpoint)
    for done in range(1, 6):
        function(np.ones(300))
        state.check(done)


@pytest.mark.parametrize("make", STATES)
def test_checkpoints_in_files_of_functions_that_keep_values(make):
    with pytest.raises(InputError, match="checkpoint: expected functions that depend on their arg"):
        steps_of(make(), "folder")
    steps_of(make(), None)


def filling():
    """A function with memory for its temporaries."""
    kept = {}

    def fill(u):
        return np.multiply(u, kept.setdefault("sum", 0 * u + 1), out=kept["sum"])

    return fill


@pytest.mark.parametrize("make", [lambda: plain, lambda: printing, keeping_a_lock, filling])
def test_checkpoints_in_files_of_other_functions(make):
    steps_of(make(), "folder")


def test_functions_without_a_pickle_are_no_errors(own_log):
    state, _ = state_of(keeping_a_lock())
    state.has_changed()
    assert not own_log.records
