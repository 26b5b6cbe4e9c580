"""Steps whose functions compute the interior while their halos are in flight."""

from collections import Counter
from functools import partial
from threading import get_ident

import numpy as np
import pytest

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.geometry import box_shape
from dask_p2p.sections.iterate.step import Call
from dask_p2p.sections.wire.connections import Connections
from tests.sections.test_checks import in_ranks, rounds_otherwise, smooth
from tests.support import noted, tune

#: Workers in this process, which fixtures can change.
CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
pytestmark = pytest.mark.usefixtures("client")


def uses_mean(u, out):
    smooth(u, out)
    out -= u.mean()


def counter():
    counts = Counter()  # by thread: the ranks of this process have the same function

    def count(u, out):
        counts[get_ident()] += 1
        out[:] = 0.5 * u[1:-1] + 0.25 * (u[:-2] + u[2:]) + counts[get_ident()]

    return count


def cached():
    """A function that keeps memory for each shape."""
    results = {}

    def fill(u):
        new = results.setdefault((get_ident(), u.shape), np.empty((len(u) - 2, u.shape[1])))
        new[:] = 0.5 * u[1:-1] + 0.25 * (u[:-2] + u[2:])
        return new

    return fill


@pytest.fixture
def boxes(monkeypatch):
    """The shapes of all boxes that functions compute after the first step."""
    return noted(monkeypatch, Call, "apply", lambda call, box: box_shape(box))


@pytest.fixture
def far(monkeypatch):
    """Ranks as on hosts of their own, where small blocks are worth overlap."""
    monkeypatch.setattr(Connections, "is_on_other_host", lambda connections, rank: True)
    tune(monkeypatch, overlap_elements=1)


def whole(function, steps, **options):
    return in_ranks(function, steps, overlap=False, **options)


@pytest.mark.parametrize(
    ("is_far", "least", "overlaps"), [(True, 60, True), (True, 61, False), (False, 1, False)]
)
def test_by_default_large_blocks_are_done_in_parts_where_halos_come_from_other_hosts(
    monkeypatch, boxes, is_far, least, overlaps
):
    expected = whole(smooth, 4)
    boxes.clear()
    monkeypatch.setattr(Connections, "is_on_other_host", lambda connections, rank: is_far)
    tune(monkeypatch, overlap_elements=least)
    assert np.array_equal(in_ranks(smooth, 4), expected)
    assert len(boxes) == 2 * (1 + 3 + 3 + 3 if overlaps else 3)


def test_the_interior_comes_first(boxes):
    """The second step computes the whole block and compares its parts; later ones compute parts."""
    assert np.array_equal(in_ranks(smooth, 3, overlap=True), whole(smooth, 3))
    parts = [(10, 5), (1, 5), (1, 5)]
    assert sorted(boxes[:14]) == sorted([(12, 5), *parts, *parts] * 2)
    assert boxes[-2:] == [(12, 5)] * 2


@pytest.mark.parametrize("make", [counter, cached])
def test_by_default_functions_with_a_state_compute_whole_blocks(far, boxes, make):
    assert np.array_equal(in_ranks(make(), 4), in_ranks(make(), 4, ranks=1))
    assert {*boxes} == {(12, 5), (24, 5)}


def test_by_default_functions_of_the_block_compute_whole_blocks(far, boxes):
    """Their code is plain, but results for parts differ."""
    with pytest.warns(P2PWarning, match="uses_mean returns other values for halves"):
        expected = whole(uses_mean, 4)
    with pytest.warns(P2PWarning, match="uses_mean returns other values for halves"):
        assert np.array_equal(in_ranks(uses_mean, 4), expected)
    assert boxes[-2:] == [(12, 5)] * 2


def test_by_default_functions_that_round_parts_otherwise_compute_whole_blocks(far, boxes):
    assert np.array_equal(whole(rounds_otherwise, 4), in_ranks(rounds_otherwise, 4))
    assert boxes[-2:] == [(12, 5)] * 2


@pytest.mark.parametrize("make", [counter, lambda: uses_mean])
def test_functions_that_compute_parts_otherwise_are_refused(make):
    with pytest.raises(InputError, match="overlap=True: expected a function that computes parts"):
        in_ranks(make(), 4, overlap=True)


@pytest.mark.parametrize("make", [cached, lambda: partial(rounds_otherwise)])
def test_other_functions_compute_parts_if_asked(boxes, make):
    expected = whole(make(), 4)
    np.testing.assert_allclose(in_ranks(make(), 4, overlap=True), expected, rtol=1e-14)
    assert (10, 5) in boxes[-12:]
