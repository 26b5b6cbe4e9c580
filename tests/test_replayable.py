"""Functions whose calls a graph may replace, found by their code."""

import math
import random
import time
from functools import cache, lru_cache, partial

import numpy as np
import pytest
from numpy import roll, save

from dask_p2p.sections.iterate.functions import is_constant, is_replayable

RATE, SHAPE = 0.1, (3, 4)
COUNTS, TOTAL = {"steps": 0}, 0
WEIGHTS = np.ones(3)
GENERATOR = np.random.default_rng(0)


def laplacian(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def heat(u, out, *, rate=RATE):
    out[:] = u[1:-1, 1:-1] + rate * laplacian(u)


def gray_scott(u, v):
    uvv = u * v * v
    return {"u": u + np.float32(0.2) * uvv, "v": v - math.sqrt(RATE) * uvv}


def shifted(u):
    import numpy

    return sum(numpy.roll(u, n, 0) for n in range(3)) + roll(u, 1)


def with_helpers(u):
    scale = 2.0

    def scaled(a):
        return scale * a

    total = [scaled(part) for part in (u, -u)]
    return max(len(total), 3) * total[0] + np.add(u, 1) + np.zeros(SHAPE)[0, 0]


@cache
def table(n):
    return n + 1


def counted(u):
    global TOTAL
    TOTAL += 1
    return u * TOTAL


def counted_in_a_dict(u):
    COUNTS["steps"] += 1
    return u * COUNTS["steps"]


def counter():
    count = 0

    def step(u):
        nonlocal count
        count += 1
        return u * count

    return step


def product_with(factor):
    return lambda u: u * factor


def noisy_by_name(u):
    from numpy.random import random as draw

    return u + draw(u.shape)


def marks(u, out):
    out.done = True
    return u


def remembers(u, memory=[]):  # noqa: B006
    memory.append(u)
    return u * len(memory)


def yields(u):
    yield u


EXPRESSIONS = {
    "calls a counter": lambda u: 1 * counted(u),
    "in a loop": lambda u: sum(counted(u) for _ in range(2)),
    "noisy": lambda u: u + np.random.random(u.shape),
    "with a generator": lambda u: u + GENERATOR.random(),
    "with Python's random": lambda u: u * random.random(),
    "timed": lambda u: u * time.time(),
    "weighted": lambda u: u * WEIGHTS[0],
    "unknown": lambda u: 1 * no_such_name(u),  # noqa: F821
    "prints": lambda u: print("a step") or u,  # noqa: T201
    "saves": lambda u, at: np.save(f"{at.step}.npy", u) or u,
    "saves by name": lambda u: save("u.npy", u) or u,
    "writes": lambda u: u.tofile("u.bin") or u,
}


class Stepper:
    def __init__(self):
        self.steps = 0

    def step(self, u):
        self.steps += 1
        return u * self.steps

    def __call__(self, u):
        return self.step(u)


def attributed(u):
    return u * attributed.steps


attributed.steps = 3


@pytest.mark.parametrize(
    "function",
    [
        *(heat, gray_scott, shifted, with_helpers, np.negative, np.roll, math.sqrt),
        *(partial(heat, rate=0.5), lru_cache(laplacian)),
        *(lambda u: u + RATE, lambda u: u * table(2), product_with(2.0)),
    ],
    ids=lambda function: getattr(function, "__name__", type(function).__name__),
)
def test_functions_of_their_arguments(function):
    assert is_replayable(function)


@pytest.mark.parametrize(
    "function",
    [
        *(pytest.param(function, id=name) for name, function in EXPRESSIONS.items()),
        *(counted, counted_in_a_dict, counter(), noisy_by_name, marks, remembers, yields),
        *(attributed, Stepper(), Stepper().step, Stepper, partial(heat, rate=[1])),
        *(np.random.random, GENERATOR.normal, random.random, [].append, WEIGHTS.sum, None.__eq__),
        *(cache(counted), np.save, product_with(WEIGHTS)),
    ],
    ids=lambda function: getattr(function, "__name__", type(function).__name__),
)
def test_functions_that_may_have_a_state(function):
    assert not is_replayable(function)


def test_a_function_that_calls_itself():
    def halved(u, n):
        return u if n == 0 else halved(u / 2, n - 1)

    assert is_replayable(halved)


def test_constants():
    assert all(map(is_constant, (1, 2.5, "a", None, (1, (2, "b")), np.float32(1), np.ones(3))))
    assert not any(map(is_constant, ([1], {"n": 1}, (1, [2]), Stepper(), {1}, bytearray(2))))
