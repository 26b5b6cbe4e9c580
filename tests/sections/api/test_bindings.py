from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.sections.api.bindings import Bindings


def test_the_variable_is_named_as_in_the_source():
    state = {"u": np.zeros(3), 2: [np.zeros(3)]}
    bindings = Bindings([state["u"]], sys._getframe())
    bindings.check(sys._getframe())
    state["u"] = state["u"] * 1
    with pytest.raises(
        InputError, match=r"but state\['u'\] is no longer the saved .* state\['u'\]\[\.\.\.\]"
    ):
        bindings.check(sys._getframe())


def test_names_of_other_values_do_not_matter():
    x = of = np.zeros(3)
    bindings = Bindings([x], sys._getframe())
    of = of + 1  # another name for the array
    bindings.check(sys._getframe())
    x, of = None, of.sum()  # no array of its shape
    bindings.check(sys._getframe())
    x = np.zeros(3)
    with pytest.raises(InputError, match="x is no longer the saved array"):
        bindings.check(sys._getframe())


def test_a_function_that_calls_itself_has_names_of_its_own():
    def nested(x, depth):
        if depth:
            nested(x + 1, depth - 1)
            return
        bindings = Bindings([x], sys._getframe())
        bindings.check(sys._getframe())
        x = x + 1
        with pytest.raises(InputError, match="x is no longer the saved array"):
            bindings.check(sys._getframe())

    nested(np.zeros(3), 2)


def test_a_loop_that_goes_on_elsewhere_is_not_checked():
    def begun():
        x = np.zeros(3)
        bindings = Bindings([x], sys._getframe())
        return bindings, x

    bindings, _ = begun()
    bindings.check(sys._getframe())


class Proxy:
    """A proxy of a framework, for an object that does not exist."""

    def __getattribute__(self, name):
        raise RuntimeError("outside of its context")


def test_objects_are_not_asked_for_attributes():
    proxy, many = Proxy(), list(range(10_000))
    x = np.zeros(3)
    Bindings([x], sys._getframe()).check(sys._getframe())
    del proxy, many


def test_names_keep_no_array_that_the_function_drops():
    x = np.zeros(3)
    other = x + 1
    bindings, dropped = Bindings([x], sys._getframe()), weakref.ref(other)
    bindings.check(sys._getframe())
    del other
    gc.collect()
    assert dropped() is None
