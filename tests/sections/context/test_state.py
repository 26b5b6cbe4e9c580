from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.sections.gang.checkpoints import copy_into_state, size_of


def saved(state):
    arrays = state.arrays()
    memory = memoryview(bytearray(size_of(arrays)))
    copy_into_state(memory, arrays)
    return memory


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6).reshape(2, 3).T[::-1],
        np.zeros((0, 3)),
        np.array(3.5),
        np.zeros(3, [("a", "i4"), ("b", ">f8", 2)]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(3, dtype=">i2"),
        "abc" == "abd",
        2**62,
        np.complex64(3 + 1j),
    ],
)
def test_values_come_back(alone, value):
    s = alone.state(of=value)
    memory = saved(s)
    second_state = alone.state(of=np.ones(2))
    second_state.load(memory)
    assert type(second_state.of) is type(value)
    assert np.array_equal(second_state.of, value)
    assert np.asarray(second_state.of).dtype == np.asarray(value).dtype


def test_arrays_of_the_same_shape_are_filled_in_place(alone):
    s = alone.state(u=np.zeros(3), n=1, of=[np.ones(2)])
    memory = saved(s)
    u, inside = s.u, s.of[0]
    u += 5
    inside[:] = 3
    s.n = 7
    s.load(memory)
    assert s.u is u
    assert s.of[0] is inside
    assert (u.tolist(), inside.tolist(), s.n) == ([0, 0, 0], [1, 1], 1)


KINDS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("kind", KINDS)
def test_generators_go_on(alone, kind):
    s = alone.state(draw=np.random.Generator(kind(3)))
    s.draw.integers(9, size=3, dtype=np.int32)  # leaves half of a word
    memory, draw = saved(s), s.draw
    expected = [draw.integers(9, dtype=np.int32), draw.normal()]
    s.load(memory)
    assert [draw.integers(9, dtype=np.int32), draw.normal()] == expected


MANY = 1 << 70


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ("text", "str as u"),
        (None, "NoneType as u"),
        ([np.zeros(2), {"a": b"bytes"}], r"bytes as u\[1\]\['a'\]"),
        (np.array([None]), "ndarray as u"),
        (MANY, f"{MANY} as u"),
        (np.random.RandomState(3), "RandomState as u"),
    ],
)
def test_other_values_are_refused(alone, value, received):
    with pytest.raises(InputError, match=f"numbers of 64 bits, .* got {received}"):
        alone.state(u=value)
    s = alone.state(u=0)
    steps = alone.steps(3, s)
    next(steps)
    s.u = value
    with pytest.raises(InputError, match="state: expected"):
        next(steps)


def test_values_keep_their_names(alone):
    s = alone.state(u=np.zeros(3))
    steps = alone.steps(3, s)
    next(steps)
    s.v = 3
    with pytest.raises(InputError, match=r"values that ctx\.state got, \['u'\], got \['u', 'v'\]"):
        next(steps)
