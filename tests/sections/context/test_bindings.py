from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.sections.context.state import Bindings, State
from dask_p2p.sections.exchange.device import HOST


def state(**values):
    return State(HOST, values)


def test_the_variable_is_named_as_in_the_source():
    s = state(u=np.zeros(3))
    fields = {"u": s.u, 2: [np.zeros(3)]}
    bindings = Bindings(s, sys._getframe())
    bindings.check(sys._getframe())
    fields["u"] = fields["u"] * 1
    with pytest.raises(InputError, match=r"expected fields\['u'\] to stay the array u of"):
        bindings.check(sys._getframe())


def test_names_of_other_values_do_not_matter():
    s = state(u=np.zeros(3))
    x = of = s.u
    bindings = Bindings(s, sys._getframe())
    x, of = None, of.sum()  # no array of its shape
    bindings.check(sys._getframe())
    x = np.zeros(3)
    s.u = x + 1  # the state does not have the array any more
    bindings.check(sys._getframe())
    assert of == 0


def test_names_keep_no_array_that_the_function_drops():
    s = state(u=np.zeros(3))
    other = s.u + 1
    bindings, dropped = Bindings(s, sys._getframe()), weakref.ref(other)
    bindings.check(sys._getframe())
    del other
    gc.collect()
    assert dropped() is None
