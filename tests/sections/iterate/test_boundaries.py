"""Boundaries by functions of `iterate` and `spmd`, against `numpy.pad`."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, iterate, spmd
from dask_p2p.errors import InputError, P2PWarning
from tests.sections.iterate.test_coupled import U, array, padded

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RANKS = [1, 2, 3, 4]


def wall(rim, inside, at):
    """Let the field be 3 on the face of the wall."""
    rim[...] = 2 * 3 - inside


def profile(rim, inside, at):
    """Inflow that depends on the position and the step."""
    rim[...] = np.sin(at.index[0] + 0.5 * at.index[1] + at.step) - inside


def spread(u):
    """A stencil of all points within its depth, corners too."""
    depth = 1
    return {"u": u[1:-1, 1:-1] * 0.3 + (u[:-2, :-2] + u[2:, 2:] - u[:-2, 2:]) * 0.2 * depth}


BOUNDARIES = {
    "odd": ["odd", "odd"],
    "one wall": [(wall, "nearest"), "periodic"],
    "walls": [wall, (wall, "odd")],
    "mixed": [("odd", 0.5), (profile, "reflect")],
    "number": [(wall, profile), (0.25, "nearest")],
    "inflow": [(profile, wall), (profile, "odd")],
}


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_boundaries(client, ranks, overlap, boundary):
    options = {"boundary": dict(enumerate(boundary)), "ranks": ranks, "overlap": overlap}
    result = iterate(spread, {"u": array(U)}, 1, 7, **options)["u"].compute()
    u = U
    for step in range(7):
        u = spread(padded(u, 1, boundary, step))["u"]
    assert np.array_equal(result, u)


@pytest.mark.parametrize("chunks", [(12, 10), (24, 5), (6, 20), (3, 20), (24, 2)])
def test_halos_wider_than_local_blocks(client, chunks):
    boundary = [(wall, "odd"), ("odd", profile)]

    def function(ctx, u):
        p = ctx.with_halo(u, depth=7, boundary=dict(enumerate(boundary)))
        block = ctx.update_halo(p)
        expected = padded(U, 7, boundary)
        part = tuple(slice(start, stop + 14) for start, stop in ctx.box)
        ctx.pad(u, 7, 0.0)
        padded_anew = ctx.pad(u, 7, dict(enumerate(boundary)))
        is_equal = np.array_equal(block, expected[part]) and np.array_equal(padded_anew, block)
        return np.full_like(u, is_equal)

    assert spmd(function, da.from_array(U, chunks=chunks), ranks=4).compute().all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_records_read_the_halo_of_the_next_step(client, ranks):
    boundary = [profile, "odd"]
    rim = Record(lambda u, at: u[0].sum() if at.box[0][0] == 0 else 0.0)
    options = {"boundary": dict(enumerate(boundary)), "record": {"rim": rim}, "ranks": ranks}
    (result,) = dask.compute(iterate(spread, {"u": array(U, chunks=(8, 20))}, 1, 5, **options))
    u, expected = U, []
    for step in range(5):
        u = spread(padded(u, 1, boundary, step))["u"]
        expected.append(padded(u, 1, boundary, step + 1)[0].sum())
    assert np.array_equal(result["u"], u)
    np.testing.assert_allclose(result["rim"], expected, rtol=1e-12)


def test_wrong_boundaries_are_refused(client):
    def returns(rim, inside, at):
        return -inside

    lazy_result = iterate(spread, {"u": array(U)}, 1, 3, boundary=returns, ranks=2)
    with pytest.raises(InputError, match=r"fills its first argument.*returns a value"):
        dask.compute(lazy_result)
    integers = array(np.zeros((24, 20), "uint8"))
    with pytest.raises(InputError, match="'odd' for uint8, which has no negative"):
        iterate(spread, {"u": integers}, 1, 3, boundary="odd")
    with pytest.raises(InputError, match=r"'odd', a function of \(rim, inside, at\), or a number"):
        iterate(spread, {"u": array(U)}, 1, 3, boundary="mirror")
    captured = iterate(spread, {"u": array(U)}, 1, 9, boundary=profile, capture=True)
    with pytest.raises(InputError, match=r"at\.step: .* capture=True"):
        dask.compute(captured)


def of_its_mean(rim, inside, at):
    rim[...] = 2 * inside.mean() - inside


def along_the_wall(rim, inside, at):
    rim[...] = np.cumsum(inside, axis=1)


def stepped(boundary, ranks):
    """Return the result of a stencil on columns; the first halos have ones alone."""
    one = array(np.ones_like(U), (24, 5))

    def spread(u, c, at):
        return {"u": (u[:-2] + u[2:])[:, 1:-1] / 2 + c * (at.step > 0)}

    options = {"boundary": (boundary, "periodic"), "constants": {"c": array(U, (24, 5))}}
    return dask.compute(iterate(spread, {"u": one}, 1, 4, ranks=ranks, **options)["u"])[0]


@pytest.mark.parametrize("function", [of_its_mean, along_the_wall])
def test_functions_that_depend_on_the_number_of_ranks_are_named(client, function):
    match = f"boundary: {function.__name__} returns other values .* number of ranks"
    with pytest.warns(P2PWarning, match=match):
        result = stepped(function, 4)
    assert not np.allclose(result, stepped(function, 1))


@pytest.mark.parametrize("function", [wall, profile])
def test_other_functions_are_compared_without_a_word(client, recwarn, function):
    assert np.array_equal(stepped(function, 4), stepped(function, 1))
    assert not [warning for warning in recwarn if issubclass(warning.category, P2PWarning)]
