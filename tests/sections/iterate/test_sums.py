"""Records of values that add up over the parts of an array."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, Whole, iterate
from dask_p2p.errors import P2PWarning

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
X = np.random.default_rng(0).normal(size=(24, 18)) + 1


def own(u):
    return u[1:-1, 1:-1]


def recorded(function, x=X, ranks=3, constants=None, **options):
    fields = {"u": da.from_array(x, chunks=(4, 9)), "t": 0.0}
    more = {"ranks": ranks, "constants": constants or {}, "boundary": "periodic"}
    record = {"m": Record(function, **options)}
    made = iterate(lambda u, t: {"u": own(u), "t": t + 1}, fields, 1, 2, record=record, **more)
    return dask.compute(made["m"])[0]


def warned(recwarn):
    return [each for each in recwarn if issubclass(each.category, P2PWarning)]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda u: own(u).sum(), X.sum()),
        (lambda u: (own(u) ** 2).mean() * own(u).size, (X**2).sum()),
        (lambda u: own(u).size, X.size),
        (lambda u, at: own(u).mean() if at.rank == 0 else 0.0, None),
        (lambda u: ((u[2:] - u[1:-1]) ** 2).sum(), None),
    ],
)
def test_other_values_are_summed(client, function, wanted):
    found = recorded(function)
    assert wanted is None or found == pytest.approx([wanted] * 2)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda u: own(u).sum(), {}),
        (lambda u: np.histogram(own(u), 4, (-9, 9))[0], {"shape": (4,), "dtype": int}),
        (lambda u: ((u[2:] - u[1:-1])[:, 1:-1] ** 2).sum(), {}),
        (lambda u: u.max(), {"op": "max"}),
        (lambda u: abs(np.diff(u)).max(), {"op": "max"}),
        (lambda u: own(u).min(), {"op": "min"}),
        (lambda u: (1 + own(u) / 100).prod(), {"op": "prod"}),
        (lambda u: 1.0, {"op": "max"}),
    ],
)
def test_values_of_elements_are_recorded_without_a_word(client, recwarn, function, options):
    for x in (X, X.astype("f4"), np.cumsum(X).reshape(X.shape), np.zeros_like(X)):
        one = recorded(function, x, ranks=1, **options)
        assert np.allclose(one, recorded(function, x, **options), rtol=1e-3, atol=1e-6)
    assert not warned(recwarn)


def test_sums_near_zero(client, recwarn):
    """Rounding errors are no means."""
    waves = np.sin(np.arange(18) * 2 * np.pi / 18) * np.ones((24, 1))
    for dtype in ("f8", "f4"):
        assert abs(recorded(lambda u: own(u).sum(), waves.astype(dtype))).max() < 1e-3
    assert not recorded(lambda u: own(u).max(), X * 0).any()
    assert not warned(recwarn)


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_values_that_all_ranks_have_count_once(client, op):
    assert recorded(lambda t: t, op=op).tolist() == [1, 2]
    constants = {"table": Whole(da.arange(4, chunks=2)), "factor": 3.0}
    found = recorded(lambda table, factor: table.sum() * factor, op=op, constants=constants)
    assert found.tolist() == [18, 18]
