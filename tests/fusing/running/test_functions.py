"""Functions of tasks: those of users, and those that keep a state."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
import scipy.fft
import toolz
from dask.array.core import getter
from dask.array.random import _choice_rng as known_choice
from dask.task_spec import List, Task, TaskRef
from distributed.protocol.pickle import dumps

from dask_p2p.fusing.running import program as module
from dask_p2p.fusing.running.program import Functions, parts_of
from dask_p2p.ops.overlap import Stencil, Trim
from tests.fusing.support import smooth

X = TaskRef("x")
FACTOR, SEEN = 3, []


def scaled(block):
    return block * FACTOR


def recorded(block):
    SEEN.append(1)
    return block


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, block):
        self.count += 1
        return block + self.count


def by_value(function):
    """Return a function as cloudpickle makes it: no module has it."""
    made = type(function)(
        function.__code__, function.__globals__, "by_value", function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__qualname__ = "by_value"
    return made


def default(block, seen=[]):  # noqa: B006
    return block


def closing_over(value):
    return lambda block: (value, block)[1]


def calls_itself(n):
    return calls_itself(n - 1) if n else 0


@pytest.mark.parametrize(
    "task",
    [
        Task("y", operator.add, X, X),
        Task("y", np.sum, X, axis=(0, 1), keepdims=True),
        Task("y", getter, X, (slice(0, 3), [1, 2]), lock=None),
        Task("y", functools.partial(np.std, ddof=1), List(X, X)),
        Task("y", toolz.compose(np.abs, np.sum), X),
        Task("y", np.add, X, np.ones(3)),
        Task("y", np.sum, X, out=None),
        Task("y", scipy.fft.fft, X, overwrite_x=False),
    ],
)
def test_functions_of_known_packages(task):
    assert not Functions().is_of_user(task)


@pytest.mark.parametrize(
    ("task", "is_constant"),
    [
        (Task("y", smooth, X), True),
        (Task("y", functools.partial(np.apply_along_axis, smooth, 0), X), True),
        (Task("y", by_value(scaled), X), True),
        (Task("y", closing_over((1, "a", np.sum))), True),
        (Task("y", by_value(calls_itself), X), True),
        (Task("y", Stencil(smooth, Trim((((1, 1),),))), X), True),
        (Task("y", by_value(recorded), X), False),
        (Task("y", by_value(default), X), False),
        (Task("y", closing_over([]), X), False),
        (Task("y", closing_over(np.ones(3)), X), False),
        (Task("y", Counter(), X), False),
        (Task("y", Counter().__call__, X), False),
        (Task("y", np.random.default_rng(0).normal, X), False),
        (Task("y", smooth, X, np.random.default_rng(0)), False),
        (Task("y", smooth, X, buffer=np.empty(3)), False),
        (Task("y", toolz.compose(np.abs, Counter()), X), False),
        (Task("y", np.vectorize(by_value(recorded)), X), False),
        (Task("y", Stencil(Counter()), X), False),
        (Task("y", operator.iadd, X, 1), True),
        (Task("y", np.add, X, 1, np.empty(3)), False),
        (Task("y", np.add, X, 1, out=np.empty(3)), False),
        (Task("y", np.add, X, 1, out=X), True),
        (Task("y", functools.partial(np.add, 1, out=np.empty(3)), X), False),
        (Task("y", scipy.fft.fft, X, overwrite_x=True), True),
        (Task("y", known_choice, np.random.PCG64(0), 5), False),
        (Task("y", known_choice, np.random.RandomState(0), 5), False),
    ],
)
def test_functions_of_users(task, is_constant):
    functions = Functions()
    for _ in range(2):  # also from memory
        assert functions.is_of_user(task)
        assert (functions.fresh(task) is task) is is_constant


@pytest.mark.parametrize("runs_again", [False, True])
def test_a_copy_for_each_task(runs_again, monkeypatch):
    pickled = []
    monkeypatch.setattr(module, "dumps", lambda task: pickled.append(task) or dumps(task))
    functions, counter = Functions(runs_again), Counter()
    assert [functions.fresh(counter)(0) for _ in range(3)] == [1, 1, 1]
    assert len(pickled) == (1 if runs_again else 3)
    assert counter.count == 0


def test_constant_values_that_functions_share_are_examined_once(monkeypatch):
    """A loop of many blocks has the halos of all blocks in each of its functions."""
    halo, examined = (((1, 1),) * 9,), []
    monkeypatch.setattr(module, "parts_of", lambda whole: examined.append(whole) or parts_of(whole))
    functions = Functions()
    shared = [Stencil(smooth, Trim(halo)) for _ in range(3)]
    assert all(map(functions.is_constant, shared))
    assert sum(whole is halo for whole in examined) == 1
