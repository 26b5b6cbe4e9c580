"""Records of values that do not add up over the parts of an array."""

from __future__ import annotations

from functools import partial

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
def test_means_extremes_and_norms_are_named(client, function):
    with pytest.warns(P2PWarning, match=r"record\['m'\] .* add up, and .* op='max'"):
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
        with pytest.warns(P2PWarning, match=r"until .* add up, .* Return sums"):
            steps(number)


@pytest.mark.parametrize("x", [np.ones((24, 18)), np.pad(np.ones((8, 6)), ((0, 16), (0, 12)))])
def test_means_of_uniform_fields_are_named(client, x):
    with pytest.warns(P2PWarning, match="add up"):
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


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda u: u.sum(), {}),
        (lambda u: (u**2).sum(), {}),
        (lambda u: np.histogram(u, 4, (-9, 9))[0], {"shape": (4,), "dtype": int}),
        (lambda u: u.size, {"dtype": int}),
        (lambda u: ((u[1:] - u[:-1]) ** 2).sum(), {}),
        (lambda u: own(u).mean(), {"op": "max"}),
        (lambda u: np.linalg.norm(own(u)), {"op": "max"}),
        (lambda u: own(u).sum(), {"op": "min"}),
        (lambda u: (1 + u / 100).prod(), {"op": "prod"}),
    ],
)
def test_values_that_depend_on_the_number_of_ranks_are_named(client, function, options):
    with pytest.warns(P2PWarning, match=r"record\['m'\] .* depends on the number of ranks"):
        found = recorded(function, **options)
    assert not np.allclose(found, recorded(function, ranks=1, **options))


class Statistics:
    def __init__(self):
        self.scale, self.seen = np.ones(1), []

    def rms(self, u):
        return np.sqrt((self.own(u) ** 2).mean())

    def total(self, u):
        self.seen.append(u.sum())
        return self.own(u).sum() * len(self.seen)

    def own(self, u):
        return u[1:-1, 1:-1] * self.scale


def test_means_by_methods_are_named(client):
    with pytest.warns(P2PWarning, match="add up"):
        recorded(Statistics().rms)


class Drift:
    """Numbers that add up, of functions that remember those of their own block."""

    def __init__(self):
        self.first, self.sum = None, 0.0

    def since_the_first(self, u):
        total = u[1:-1, 1:-1].sum()
        self.first = total if self.first is None else self.first
        return total - self.first

    def up_to_now(self, u):
        self.sum += u[1:-1, 1:-1].sum()
        return self.sum


@pytest.mark.parametrize("name", ["since_the_first", "up_to_now"])
def test_functions_that_remember_their_block_are_not_named(client, recwarn, name):
    found = recorded(getattr(Drift(), name))
    assert found == pytest.approx(recorded(getattr(Drift(), name), ranks=1))
    assert not warned(recwarn)


def test_methods_that_return_means_to_until_are_named(client):
    class Solver:
        def __init__(self):
            self.residuals = []

        def step(self, u):
            new = self.smoothed(u)
            self.residuals.append(abs(new - u[1:-1, 1:-1]).max())
            return new, self.residuals[-1]

        def smoothed(self, u):
            return (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]) / 4

    x = da.from_array(X, chunks=(12, 18))
    with pytest.warns(P2PWarning, match="until returns other values for halves"):
        iterate(Solver().step, x, 1, 3, until=lambda residual: False, ranks=2).compute()


def test_comparisons_leave_objects_as_they_are(client):
    assert recorded(Statistics().total) == pytest.approx([X.sum(), 2 * X.sum()])


def test_halos_of_a_single_pulse_are_named(client):
    rows, columns = np.ogrid[:24, :18]
    x = np.exp(-((rows - 5.0) ** 2 + (columns - 4.0) ** 2) / 2)
    with pytest.warns(P2PWarning, match="without the halo"):
        recorded(lambda u: u.sum(), x, ranks=2)


def test_a_halo_of_one_element_is_named(client):
    x = np.pad([[1.0]], ((5, 18), (4, 13)))
    with pytest.warns(P2PWarning, match="count twice"):
        recorded(lambda u: u.sum(), x, ranks=2)


def test_numbers_for_until_with_halos_are_named(client):
    def step(u):
        return u[1:-1] * 0.5, (u**2).sum()

    x = da.from_array(X, chunks=(8, 18))
    with pytest.warns(P2PWarning, match="until .* depends on the number of ranks"):
        iterate(step, x, {0: 1}, 4, ranks=3, until=lambda total: total < 0).compute()


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
