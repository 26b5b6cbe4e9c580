"""Functions whose results depend on the number of ranks are named, and no others."""

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import cloudpickle
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import P2PWarning
from dask_p2p.sections.comparison import FunctionCopies

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
pytestmark = pytest.mark.usefixtures("client")
X = np.random.default_rng(0).normal(size=(24, 5))
CALLS = []


def in_ranks(function, steps=4, ranks=2, x=X, **options):
    u = da.from_array(x, chunks=(24 // ranks, 5))
    return iterate(function, u, {0: 1}, steps, ranks=ranks, **options).compute()


def warnings_of(recwarn):
    return [warning for warning in recwarn if issubclass(warning.category, P2PWarning)]


# --- means, norms, and neighbours that are too far away


def without_mean(u):
    return (u - u.mean())[1:-1]


def reads_two(u):  # neighbours on each side, and gets one
    return (np.roll(u, 2, 0) + np.roll(u, -2, 0))[1:-1]


def without_values(u):
    return np.where(np.shape(u)[0] > 8, np.nan, -np.inf) * np.ones_like(u[1:-1])


def by_position(u, at):
    return without_mean(u) + np.sin(at.index[0]) + at.box[0][0] * 0.1


class Solver:
    """A solver as one first writes it: it has parameters, and counts its steps."""

    def __init__(self, weights=1.0):
        self.weights, self.steps = weights, 0
        self.parameters = SimpleNamespace(rate=0.5)
        self.generator = np.random.default_rng(0)

    def without_mean(self, u):
        self.steps += 1
        return (u - self.weights * self.parameters.rate * u.mean())[1:-1]

    def noisy(self, u):
        return u[1:-1] + self.generator.normal(size=u[1:-1].shape)

    def counted(self, u):
        self.steps += 1
        return u[1:-1] * self.weights + self.steps


@pytest.mark.parametrize(
    "function",
    [
        *(without_mean, reads_two, without_values, by_position),
        *(Solver(np.ones(5)).without_mean, partial(without_mean)),
    ],
)
def test_results_that_depend_on_the_number_of_ranks_are_named(function):
    name = getattr(function, "func", function).__name__
    match = f"iterate: {name} returns .* on the number of ranks"
    with pytest.warns(P2PWarning, match=match) as warnings_seen:
        in_ranks(function)
    assert len({str(warning.message) for warning in warnings_seen}) == 1


def test_fields_that_are_uniform_at_first_show_a_mean_later():
    def filled(u, at):
        return (u - u.mean())[1:-1] + (at.step > 2) * at.index[0]

    with pytest.warns(P2PWarning, match="filled returns other values"):
        in_ranks(filled, 8, x=np.zeros((24, 5)))


# --- random numbers


def drawing(draw):
    rng = np.random.default_rng(1)
    return lambda u: u[1:-1] + draw(rng, u[1:-1].shape)


def drawing_by_keyword(u, rng):
    return u[1:-1] + rng.normal(size=u[1:-1].shape)


def seeded(u):
    np.random.seed(0)
    return u[1:-1] + np.random.normal(size=u[1:-1].shape)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (drawing(lambda rng, shape: rng.random(shape)), {}),
        (Solver().noisy, {}),
        (drawing_by_keyword, {"rng": np.random.default_rng(3)}),
        (seeded, {}),
        (lambda u, at: drawing_by_keyword(u, np.random.default_rng((5, at.step))), {}),
    ],
)
@pytest.mark.filterwarnings("ignore:a function drew NumPy's global")
def test_the_same_random_numbers_on_each_rank_are_named(function, options):
    with pytest.warns(P2PWarning, match=r"the same on each rank: seed them by .* at\.rank"):
        in_ranks(function, **options)


def of_the_whole_array(u, at):
    noise = np.random.default_rng((5, at.step)).random(at.shape)
    return u[1:-1] + noise[slice(*at.box[0])]


@pytest.mark.parametrize(
    "function",
    [
        drawing(lambda rng, shape: rng.normal()),  # one number for all elements
        lambda u, at: drawing_by_keyword(u, np.random.default_rng((5, at.step, at.rank))),
        of_the_whole_array,
        lambda u: drawing_by_keyword(u, np.random.default_rng()),
    ],
)
def test_other_random_numbers_are_right(recwarn, function):
    in_ranks(function)
    assert not warnings_of(recwarn)


# --- right programs


def smooth(u, out):
    out[:] = 0.5 * u[1:-1] + 0.25 * (u[:-2] + u[2:])


def rounds_otherwise(u, out):
    smooth(u, out)
    out *= 1 + np.finfo(float).eps * (len(out) < 12)


def of_its_size(u, out):
    out[:] = 0
    out += np.reshape(u, (14, 5))[1:-1] / 2


class Opened:
    """It has a pickle in the client alone, as objects with files that they open later."""

    is_open = False

    def __getstate__(self):
        if self.is_open:
            raise TypeError
        return {}

    def __setstate__(self, state):
        self.is_open = True

    def step(self, u):
        return u[1:-1]


def counting(u):
    CALLS.append(1)  # by one rank at a time, unlike an addition
    return u[1:-1] + len(CALLS)


@pytest.mark.parametrize(
    "function", [smooth, rounds_otherwise, of_its_size, Solver(np.ones(5)).counted]
)
def test_right_functions_are_compared_without_a_word(recwarn, function):
    result = in_ranks(function)
    assert not warnings_of(recwarn)
    if function is not of_its_size:
        np.testing.assert_allclose(result, in_ranks(function, ranks=1), rtol=1e-14)


class Classwide:
    calls: ClassVar[list] = []

    def step(self, u):
        self.calls.append(1)
        return u[1:-1] + len(self.calls)


def test_copies_leave_global_variables_and_classes_as_they_are():
    """Both ranks are threads of this process, which share them."""
    CALLS.clear()
    Classwide.calls.clear()
    in_ranks(counting, 5)
    in_ranks(Classwide().step, 5)
    assert len(CALLS) == len(Classwide.calls) == 2 * 5


class Probe:
    """Pickles a function of this module while it is pickled itself."""

    pickles: ClassVar[list] = []

    def __reduce__(self):
        self.pickles.append(cloudpickle.dumps(counting))
        return int, ()


def test_other_pickles_of_the_process_have_functions_by_name():
    """As when a client in this process sends a task while a rank begins."""
    expected = cloudpickle.dumps(counting)
    Probe.pickles.clear()
    assert FunctionCopies(counting, Probe())
    assert Probe.pickles == [expected]


def test_one_more_call_comes_before_that_for_the_whole_block(recwarn, tmp_path):
    """So files that both write have the values of the whole block."""

    def saving(u, at, folder):
        np.save(f"{folder}/{at.rank}-{at.step}.npy", u)
        with open(f"{folder}/{at.rank}.txt", "a") as lines:
            print(at.step, len(u), file=lines)
        return u[1:-1] * 0.5

    in_ranks(saving, 3, folder=str(tmp_path))
    assert not warnings_of(recwarn)
    for rank in range(2):
        lines = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert lines == ["0 14", "1 7", "1 14", "2 14"]
        assert all(np.load(tmp_path / f"{rank}-{step}.npy").shape == (14, 5) for step in range(3))


def test_functions_without_a_pickle_run_without_a_word(recwarn):
    np.testing.assert_array_equal(in_ranks(Opened().step), X)
    assert not warnings_of(recwarn)


def test_blocks_that_no_cut_divides_are_not_compared(recwarn):
    """Large blocks of one rank, and blocks of one row."""
    x = da.ones((2, 2**17), chunks=(1, -1))
    assert (iterate(lambda u: u + 1, x, 0, 3).compute() == 4).all()
    assert (iterate(lambda u: u + 1, x.rechunk(-1), 0, 3, ranks=1).compute() == 4).all()
    assert not warnings_of(recwarn)


def test_means_of_large_blocks_are_named():
    x = da.random.default_rng(0).random((1024, 1024), chunks=(512, -1))
    with pytest.warns(P2PWarning, match="number of ranks"):
        iterate(lambda u: u - u.mean(), x, 0, 2).compute()
