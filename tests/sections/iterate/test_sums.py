"""Records of values that do not add up over the parts of an array."""

from __future__ import annotations

from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, Whole, iterate
from dask_p2p.errors import InputError
from dask_p2p.sections.iterate.sums import adds_up, halves

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


@pytest.mark.parametrize(
    "function",
    [
        lambda u: own(u).mean(),
        lambda u: own(u).max(),
        lambda u: abs(own(u)).max(),
        lambda u: np.median(own(u)),
        lambda u: np.linalg.norm(own(u)),
        lambda u: np.sqrt((own(u) ** 2).mean()),
        lambda u: u[1, 1],
        lambda u: (own(u) > 1).any(),
    ],
)
def test_means_extremes_and_norms_are_refused(client, function):
    with pytest.raises(InputError, match=r"record\['m'\]: .* add up, as .* op='max'"):
        recorded(function)
    assert recorded(function, ranks=1).shape == (2,)


def returned(u, number):
    return u[1:-1] * 0.5, number(u[1:-1])


def filled(u, out, number):
    out[...] = u[1:-1] * 0.5
    return None, number(u[1:-1])


@pytest.mark.parametrize("step", [returned, filled])
def test_numbers_for_until(client, step):
    """A largest change would end the run later on more ranks."""

    def steps(number):
        x = da.from_array(X, chunks=(8, 18))
        step_of = partial(step, number=number)
        y = iterate(step_of, x, {0: 1}, 9, ranks=3, until=lambda total: total < 50)
        return round(np.log2(X.sum() / y.sum().compute()))

    wanted = next(n for n in range(9) if (X**2).sum() / 4**n < 50) + 1  # of the field before
    assert steps(lambda u: (u**2).sum()) == wanted
    for number in (lambda u: abs(u).max(), np.mean, lambda u: np.linalg.norm(u)):
        with pytest.raises(InputError, match=r"until: expected .* add up, .* Return sums"):
            steps(number)


@pytest.mark.parametrize("x", [np.ones((24, 18)), np.pad(np.ones((8, 6)), ((0, 16), (0, 12)))])
def test_means_of_uniform_fields_are_refused(client, x):
    with pytest.raises(InputError, match="add up"):
        recorded(lambda u: own(u).mean(), x)


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


def test_sums_near_zero(client):
    """Rounding errors are no means."""
    waves = np.sin(np.arange(18) * 2 * np.pi / 18) * np.ones((24, 1))
    for dtype in ("f8", "f4"):
        assert abs(recorded(lambda u: own(u).sum(), waves.astype(dtype))).max() < 1e-3
    assert not recorded(lambda u: own(u).max(), X * 0).any()


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_values_that_all_ranks_have_count_once(client, op):
    assert recorded(lambda t: t, op=op).tolist() == [1, 2]
    constants = {"table": Whole(da.arange(4, chunks=2)), "factor": 3.0}
    found = recorded(lambda table, factor: table.sum() * factor, op=op, constants=constants)
    assert found.tolist() == [18, 18]


def test_halves_cover_a_box():
    assert list(halves(((0, 6), (2, 3)))) == [
        (((0, 2), (2, 3)), ((2, 6), (2, 3))),
        (((0, 3), (2, 3)), ((3, 6), (2, 3))),
    ]


@pytest.mark.parametrize(
    ("whole", "parts", "found"),
    [
        (3, [(1, 2), (2.5, 0.5)], True),
        (1.5, [(1, 2), (1.4, 1.6)], False),
        (5, [(3, 4), (4, 3)], False),
        (2, [(2, 2), (2, 2)], False),
        (0, [(0, 0), (0, 0)], None),
        (1e-12, [(-1e-12, 2e-12), (1e-12, 1e-12)], None),
        (np.nan, [(1, 2), (1, 2)], None),
        (2, [(2, 1e-9), (1e-9, 2)], None),
        (3, [(1, 2), (1, 1)], None),
        (3, [], None),
    ],
)
def test_values_of_parts(whole, parts, found):
    assert adds_up(whole, parts, 1.0) is found
