"""Copies of functions, to compare results for parts of a block."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.sections.exchange.divided import copies_of


def counting():
    calls = []

    def count(u):
        calls.append(1)
        return u + len(calls)

    return count


def with_nested_lists():
    nested = []
    for _ in range(10_000):
        nested = [nested]
    return lambda u: u + len(nested)


class Unpickled:
    def __getstate__(self):
        raise ValueError

    def step(self, u):
        return u


def test_copies_begin_with_the_present_state():
    count = counting()
    assert count(0) == 1
    copies = copies_of(count)
    assert [copies()(0) for _ in range(3)] == [2, 2, 2]
    assert count(0) == 2


def test_a_function_without_a_state_is_its_own_copy():
    assert copies_of(np.negative)() is np.negative


@pytest.mark.parametrize("function", [with_nested_lists(), Unpickled().step])
def test_other_functions_have_no_copies(function):
    assert copies_of(function) is None
