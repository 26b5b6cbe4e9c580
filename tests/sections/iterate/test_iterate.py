from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_p2p import iterate
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from dask_p2p.plans.ranks import ORDERS
from tests.sections.support import nothing_is_left

X = np.random.default_rng(0).normal(size=(24, 30))
CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def array(x=X, chunks=((5, 7, 4, 8), (14, 16))):
    return da.from_array(x, chunks=chunks)


def star(u, out):
    """A five-point stencil with another weight for each side."""
    out[:] = u[1:-1, 1:-1] + 0.1 * u[:-2, 1:-1] + 0.2 * u[2:, 1:-1]
    out[:] += 0.3 * u[1:-1, :-2] + 0.4 * u[1:-1, 2:]


def wave(u, before, speed, factor, out, scale):
    """Two levels of time, a coefficient for each point, and one for all."""
    own = (slice(2, -2),) * 2
    out[:] = u[2:-2, 4:] + u[2:-2, :-4] + u[4:, 2:-2] + u[:-4, 2:-2] - 4 * u[own]
    out *= scale * factor * speed
    out += 2 * u[own] - before[own]


def reference(function, fields, depth, steps, boundary, constants=(), **kwargs):
    """Compute the same by NumPy, with whole arrays."""
    modes = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}
    mode = modes.get(boundary, "constant")
    value = {"constant_values": boundary} if mode == "constant" else {}
    for _ in range(steps):
        halo_array = [np.pad(field, depth, mode, **value) for field in fields]
        new = np.empty_like(fields[0])
        function(*halo_array, *constants, out=new, **kwargs)
        fields = [new, *fields[:-1]]
    return fields


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "nearest", 0.5])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_boundaries(client, boundary, ranks):
    y = iterate(star, array(), 1, 5, boundary=boundary, ranks=ranks)
    assert y.chunks == array().chunks
    (wanted,) = reference(star, [X], 1, 5, boundary)
    assert np.array_equal(y.compute(), wanted)
    alone = iterate(star, array(), 1, 5, boundary=boundary, ranks=1)
    assert np.array_equal(alone.compute(scheduler="threads"), wanted)


def test_nothing_is_left_of_it(client):
    for _ in range(3):
        iterate(star, array(), 1, 5, ranks=4).compute()
    nothing_is_left(client)


def test_levels_of_time_constants_and_keywords(client):
    speed = np.random.default_rng(1).random(X.shape)
    wanted = reference(wave, [X, X + 1], 2, 7, 0.0, (speed, 0.5), scale=0.1)
    made = iterate(
        wave,
        (array(), array(X + 1)),
        2,
        7,
        boundary=0.0,
        constants=(array(speed, (6, 30)), 0.5),
        ranks=4,
        scale=0.1,
    )
    for y, z in zip(dask.compute(*made), wanted, strict=True):
        assert np.array_equal(y, z)


def test_fields_have_halos_of_their_own(client):
    def differs(u, before, out):
        assert before.shape[1] == out.shape[1] + 1
        out[:] = u[4:, :] - before[:, :-1]

    u, before = X.copy(), X + 1
    for _ in range(3):
        halo_array = np.pad(u, ((4, 0), (0, 0)), "wrap")
        wider = np.pad(before, ((0, 0), (1, 0)), "wrap")
        u, before = halo_array[4:, :] - wider[:, :-1], u
    y, _ = iterate(differs, (array(), array(X + 1)), [{0: (4, 0)}, {1: (1, 0)}], 3, ranks=4)
    assert np.array_equal(y.compute(), u)


@pytest.mark.parametrize("exchange", ORDERS[1:])
def test_the_order_of_messages_changes_no_bit(client, exchange):
    y = iterate(star, array(), 1, 5, boundary="nearest", ranks=8, exchange=exchange)
    (wanted,) = reference(star, [X], 1, 5, "nearest")
    assert np.array_equal(y.compute(), wanted)


@pytest.mark.parametrize("boundary", ["periodic", "none"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_overlap_changes_no_bit(client, boundary, ranks):
    """For functions that fill `out`, and that return arrays with or without halos."""

    def filling(u, before, factor, out, has_numbers):
        out[:] = np.sin(u[2:-1, 1:-1]) + factor * u[:-3, 1:-1] * before[:, 1:] - u[1:-2, 2:]
        return (out.size, np.sum(out)) if has_numbers else None

    def returning(u, before, factor):
        new = u * 1.5
        new[2:-1, 1:-1] += np.sin(u[:-3, 1:-1]) * u[3:, 1:-1] - u[2:-1, 2:]
        return new

    function = filling if boundary == "periodic" else returning

    def given(until):
        return {"has_numbers": until is not None} if function is filling else {}

    found = [
        dask.compute(
            *iterate(
                function,
                (array(), array(X + 1)),
                [((2, 1), 1), {1: (1, 0)}],
                5,
                boundary=boundary,
                constants=(array(X / 3),),
                overlap=overlap,
                until=until,
                check_every=3,
                ranks=ranks,
                **given(until),
            )
        )
        for overlap, until in (
            (False, None),
            (True, None),
            (True, lambda *numbers: numbers[0] != X.size),
        )
        if until is None or function is filling
    ]
    for each in found[1:]:
        assert all(map(np.array_equal, each, found[0]))


def test_halos_wider_than_local_blocks_and_corners(client):
    def diagonal(u, out):
        out[:] = u[14:, :-14] + u[:-14, 14:] + u[7:-7, 7:-7]

    (wanted,) = reference(diagonal, [X], 7, 3, "periodic")
    y = iterate(diagonal, array(), 7, 3, corners=True, ranks=8)
    assert np.array_equal(y.compute(), wanted)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_to_four_axes_are_divided(client, data):
    ndim = data.draw(st.integers(1, 4))
    sizes = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)
    chunks = tuple(data.draw(sizes) for _ in range(ndim))
    x = np.random.default_rng(0).normal(size=tuple(map(sum, chunks)))

    def sides(u, out):
        own = (slice(1, -1),) * u.ndim
        out[:] = u[own]
        for axis in range(u.ndim):
            before = tuple(slice(0, -2) if a == axis else slice(1, -1) for a in range(u.ndim))
            out += (1 + axis) * u[before]

    boundary = data.draw(st.sampled_from(["periodic", "reflect", "nearest", 2.0]))
    (wanted,) = reference(sides, [x], 1, 2, boundary)
    y = iterate(sides, array(x, chunks), 1, 2, boundary=boundary, ranks=2**ndim)
    assert np.array_equal(y.compute(), wanted)


def test_functions_may_return_local_blocks_with_and_without_halos(client):
    """As in map_overlap. They must, if there are no halos beyond the ends."""

    def smoothed(u):
        new = u.copy()
        new[1:-1] = (u[:-2] + u[2:]) / 2
        return new

    wanted = X
    for _ in range(4):
        wanted = smoothed(wanted)
    y = iterate(smoothed, array(), {0: 1}, 4, boundary="none", ranks=4)
    assert np.array_equal(y.compute(), wanted)

    def inner(u):
        return u[1:-1, 1:-1] + u[2:, 1:-1]

    wanted = X
    for _ in range(3):
        wanted = wanted + np.roll(wanted, -1, 0)
    assert np.array_equal(iterate(inner, array(), 1, 3, ranks=4).compute(), wanted)


@pytest.mark.parametrize("every", [1, 3])
def test_it_stops_when_the_function_asks_for_it(client, every):
    def halved(u, out):
        out[:] = u[1:-1, 1:-1] / 2
        return out.size, np.float64(out.sum())

    def small(count, total):
        assert count == X.size, "summed over all ranks"
        return total < count / 4

    y = iterate(halved, array(np.ones_like(X)), 1, 100, until=small, check_every=every, ranks=4)
    value = 2.0 ** -{1: 3, 3: 3}[every]
    assert (y.compute() == value).all()


def test_dtypes(client):
    counts = np.arange(24).reshape(4, 6)
    y = iterate(lambda u: u / 2, array(counts, (2, 3)), 0, 2, dtype="f4", ranks=4)
    assert y.dtype == "f4"
    assert np.array_equal(y.compute(), (counts / 4).astype("f4"))
    y = iterate(lambda u: u / 2, array(counts, (2, 3)), 0, 2, ranks=4)
    expected = "expected an array from the function that can be converted to int64 without loss"
    with pytest.raises(BlockMismatchError, match=expected):
        y.compute()


@pytest.mark.parametrize(("first", "second"), [("i8", "f8"), ("f8", "c16"), ("?", "i1")])
def test_fields_are_not_narrowed_to_the_first_one(first, second):
    fields = [array((X * 10).astype(of)) for of in (first, second)]
    with pytest.raises(InputError, match=f"fields that become .* dtype='{np.dtype(second)}'"):
        iterate(lambda u, v: u, fields, 1, 1, ranks=1)
    found = iterate(lambda u, v: u, fields, 1, 1, ranks=1, dtype=second)
    assert [each.dtype for each in found] == [second] * 2


def test_a_wrong_result_is_named(client):
    y = iterate(lambda u: u[1:], array(), 1, 2, ranks=2)
    with pytest.raises(BlockMismatchError, match=r"expected an array of shape .*, or .* with halo"):
        y.compute()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("more", [{}, {"until": lambda total: total < 0}, {"overlap": True}])
@pytest.mark.parametrize("every", [None, np.int64(5)])
def test_without_steps_fields_come_back(client, ranks, more, every):
    def failing(u, v, out):
        raise AssertionError("no step was asked for")

    fields = array(X, (8, 3)), array(2 * X, (8, 3))
    kwargs = {"ranks": ranks, "checkpoint_every": every, **more}
    u, v = iterate(failing, fields, 1, 0, dtype="f4", **kwargs)
    u, v = dask.compute(u, v)
    assert u.dtype == v.dtype == "f4"
    assert np.array_equal(u, X.astype("f4"))
    assert np.array_equal(v, (2 * X).astype("f4"))


def test_by_default_each_worker_has_a_rank(client):
    y = iterate(lambda u: u, array(), 1, 2)
    assert sum("ranks" in str(key[0]) and key[1] != "commit" for key in y.dask.to_dict()) == 2


def test_wrong_arguments_are_refused():
    def func(u):
        return u

    for wrong, match in (
        ((array(), func, 1, 2), "expected a function of fields with a halo"),
        ((func, array(), -1, 2), "expected a halo width"),
        ((func, array(), 25, 2), "no wider than the array"),
        ((func, array(), {5: 1}, 2), "depth: expected axes from 0 to 1, got the axis 5 in {5: 1}"),
        ((func, array(), 1, -1), "number of steps, at least 0, got steps=-1. Give an integer"),
        ((func, (), 1, 1), "at least one Dask array"),
        ((func, (array(), array()), [1], 1), "expected a list with one depth for each of 2"),
    ):
        with pytest.raises(InputError, match=match):
            iterate(*wrong)
    with pytest.raises(InputError, match="expected a boundary out of"):
        iterate(func, array(), 1, 2, boundary="open")
    with pytest.raises(InputError, match="exchange: expected one of auto, diagonal"):
        iterate(func, array(), 1, 2, exchange="ring")
    with pytest.raises(InputError, match="overlap: expected True, False or 'auto', got 'yes'"):
        iterate(func, array(), 1, 2, overlap="yes")
    with pytest.raises(InputError, match="boundary: expected one for all time levels"):
        iterate(func, array(), 1, 2, boundary=["none"])
    with pytest.raises(InputError, match="number of steps, at least 1, got check_every=0"):
        iterate(func, array(), 1, 2, check_every=0)
    with pytest.raises(UnsupportedArrayError, match="expected a Dask array"):
        iterate(func, X, 1, 2)
    with pytest.raises(InputError, match="constants: expected Dask arrays of the fields' shape"):
        iterate(func, array(), 1, 2, constants=[da.ones(3)])
