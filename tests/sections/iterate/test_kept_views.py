"""Functions that keep arrays which they received, whose memory later steps overwrite."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, Save, iterate
from dask_p2p.errors import InputError

X = np.arange(48.0).reshape(8, 6)
OPTIONS = {"boundary": "periodic", "ranks": 1}


def array():
    return da.from_array(X, chunks=(4, 6))


def computed(y):
    return y.compute(scheduler="sync")


def halved(u):
    return {"u": u[1:-1, 1:-1] * 0.5}


class Change:
    """The largest change since the last record, as one first writes it."""

    def __init__(self, kept):
        self.kept, self.before = kept, None

    def __call__(self, u):
        found = 0.0 if self.before is None else abs(u - self.before).max()
        self.before = self.kept(u)
        return found


VIEWS = {
    "field": lambda u: u,
    "part": lambda u: u[1:-1],
    "buffer": lambda u: memoryview(u),
    "in a list": lambda u: [u.T],
}


@pytest.mark.parametrize("view", VIEWS)
def test_steps_that_keep_fields_are_refused(view):
    kept = []

    def step(u):
        kept.append(VIEWS[view](u))
        return u[1:-1, 1:-1]

    with pytest.raises(InputError, match=r"keeps no arrays .* u\.copy\(\)"):
        computed(iterate(step, array(), 1, 3, **OPTIONS))


def test_a_later_step_that_keeps_a_field_is_refused():
    kept = []

    def step(u, at):
        if at.step == 5:
            kept.append(u)
        return u[1:-1, 1:-1]

    with pytest.raises(InputError, match="keeps no arrays"):
        computed(iterate(step, array(), 1, 9, **OPTIONS))
    assert kept


def test_memory_to_fill_that_is_kept_is_refused():
    kept = []

    def step(u, out):
        out[...] = u[1:-1, 1:-1]
        kept.append(out)

    with pytest.raises(InputError, match="keeps no arrays"):
        computed(iterate(step, array(), 1, 3, **OPTIONS))


@pytest.mark.parametrize("every", [1, 2])
def test_records_of_changes(every):
    def changes(kept):
        record = {"change": Record(Change(kept), every=every, op="max")}
        return computed(iterate(halved, {"u": array()}, 1, 8, record=record, **OPTIONS)["change"])

    expected = [0.0, *(X.max() * (0.5**n - 0.5 ** (n + every)) for n in range(every, 8, every))]
    np.testing.assert_array_equal(changes(lambda u: u.copy()), expected)
    with pytest.raises(InputError, match="keeps no arrays"):
        changes(lambda u: u)


def test_computed_fields_that_keep_fields_are_refused(tmp_path):
    pytest.importorskip("zarr")
    kept = []

    def same(u):
        kept.append(u)
        return u

    save = Save(tmp_path / "kept", every=1, compute={"c": same})
    with pytest.raises(InputError, match="keeps no arrays"):
        computed(iterate(halved, {"u": array()}, 1, 2, save=save, **OPTIONS)["u"])
    save = Save(tmp_path / "own", every=1, compute={"c": lambda u: u[1:-1, 1:-1]})
    computed(iterate(halved, {"u": array()}, 1, 2, save=save, **OPTIONS)["u"])


def test_functions_that_keep_nothing_of_the_fields():
    """Copies, constants and garbage; results may be views."""
    kept = []

    class Cycle:
        def __init__(self, u):
            self.u, self.own = u, self

    def step(u, weights):
        kept.append((u.copy(), weights, weights[1:]))
        Cycle(u)
        try:
            raise ValueError(u)
        except ValueError as exc:
            _ = exc
        return {"u": u[2:, 1:-1]}

    constants = {"weights": np.ones((8, 6))}
    y = iterate(step, {"u": array()}, 1, 6, constants=constants, **OPTIONS)["u"]
    np.testing.assert_array_equal(computed(y), np.roll(X, -6, 0))


def test_boundary_functions_may_keep_what_they_receive():
    """Conditions that let waves out read values of the step before."""
    before = {}

    def ends(rim, inside, at):
        old = before.get(at.box)
        before[at.box] = inside, rim
        rim[...] = 0 if old is None else old[0] + old[1]

    def first(u):
        return u[:-2, 1:-1] + 1

    y = iterate(first, array(), 1, 4, boundary={0: ends, 1: "periodic"}, ranks=1)
    u, old = X, None
    for _ in range(4):
        rim = np.zeros(6) if old is None else old[0] + old[1]
        u, old = np.vstack([rim, u[:-1]]) + 1, (u[0], rim)
    np.testing.assert_array_equal(computed(y), u)
