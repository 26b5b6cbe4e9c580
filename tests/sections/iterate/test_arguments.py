"""Arguments of `iterate` and `spmd` of other types than the declared ones."""

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, LocalBlock, Points, Record, Save, iterate, spmd
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.sections.api.test_rank_body import matrix
from tests.sections.context.test_context import OTHERS
from tests.sections.emulated import on_gpu, run_section

X = da.ones((8, 6), chunks=(4, 3))


def halved(u):
    return {"u": u[1:-1, 1:-1] / 2}


def started(**options):
    return iterate(halved, {"u": X}, 1, 3, **options)


def with_points(**options):
    points = Points(**{"xy": [[1], [2]], **options})
    return iterate(lambda u, p: {"u": u}, {"u": X}, 1, 3, constants={"p": points})


CALLS = {
    "dtype": lambda value: started(dtype=value),
    "dtype without names": lambda value: iterate(lambda u: u[1:-1, 1:-1], X, 1, 3, dtype=value),
    "dtype of spmd": lambda value: spmd(lambda ctx, x: x, X, dtype=value),
    "dtype of a local block": lambda value: spmd(lambda ctx, x: x, X, outputs=LocalBlock(value)),
    "dtype of a field": lambda value: iterate(halved, {"u": Field(X, dtype=value)}, 1, 3),
    "dtype of a number": lambda value: iterate(
        halved, {"u": X, "t": Field(0.0, dtype=value)}, 1, 3
    ),
    "dtype of a record": lambda value: started(record={"m": Record(np.sum, dtype=value)}),
    "corners": lambda value: started(corners=value),
    "corners of a field": lambda value: iterate(halved, {"u": Field(X, corners=value)}, 1, 3),
    "overlap": lambda value: started(overlap=value),
    "exchange": lambda value: started(exchange=value),
    "capture": lambda value: started(capture=value),
    "as_library": lambda value: started(as_library=value),
    "ranks": lambda value: started(ranks=value),
    "constants": lambda value: started(constants=[value] if isinstance(value, dict) else value),
    "record": lambda value: started(record=value),
    "op": lambda value: started(record={"m": Record(lambda u: u[0, 0], op=value)}),
    "shape": lambda value: started(record={"m": Record(lambda u: u[0, 0], shape=value)}),
    "save": lambda value: started(save=value),
    "fields of a save": lambda value: started(save=Save("frames", 1, fields=value)),
    "region": lambda value: started(save=Save("frames", 1, region=value)),
    "compute": lambda value: started(save=Save("frames", 1, compute=value)),
    "dims": lambda value: started(save=Save("frames", 1, dims=value)),
    "coords": lambda value: started(save=Save("frames", 1, coords=value)),
    "checkpoint": lambda value: started(checkpoint=value),
    "every": lambda value: started(checkpoint=Checkpoint("states", value)),
    "keep": lambda value: started(checkpoint=Checkpoint("states", keep=value)),
    "points": lambda value: with_points(xy=value),
    "weights": lambda value: with_points(weights=value),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_types_are_refused(name):
    for value in OTHERS:
        with pytest.raises(InputError, match=r"expected .* got "):
            CALLS[name](value)


ARRAY = np.random.default_rng(0).normal(size=(6, 4))


def array():
    return da.from_array(ARRAY, chunks=(3, 4))


def centred(u):
    u -= u.mean()
    return float((u**2).sum())


def centred_field(u):
    u -= u.mean()
    return u


@pytest.mark.parametrize("kind", ["record", "save"])
def test_functions_after_steps_only_read_fields(tmp_path, kind):
    save = Save(tmp_path / "frames.zarr", every=1, compute={"e": centred_field})
    options = {"record": {"record": {"size": centred}}, "save": {"save": save}}[kind]
    y = iterate(lambda u: {"u": u[1:-1] + 0}, {"u": array()}, {0: 1}, 3, ranks=1, **options)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        dask.compute(y)


def test_a_record_on_a_gpu(gpu):
    """Arrays of GPUs refuse no writes."""

    def negative(u):
        u[...] = u.apply(lambda values: -values)
        return 0.0

    def same(u):
        return {"u": u.apply(lambda values: values[1:-1] + 0)}

    fields = {"u": on_gpu(gpu, array())}
    lazy_result = iterate(same, fields, {0: 1}, 3, record={"n": negative}, ranks=2)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        run_section(gpu, lazy_result["u"], [ARRAY])


def test_indices():
    """Later calls receive the same arrays."""

    def shifted(u, at):
        rows, _ = at.index
        rows -= 4
        return u + rows

    with pytest.raises(InputError, match="only reads its fields and constants"):
        iterate(shifted, array(), 0, 3, ranks=1).compute(scheduler="sync")


def computed(y):
    return y.compute(scheduler="sync")


@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "U3", [("a", "f8")]])
def test_few_small_elements_and_other_kinds_are_not_looked_at(dtype):
    def copied(u, out):
        out[:] = u

    x = np.zeros((6, 4), dtype)
    assert np.array_equal(computed(iterate(copied, matrix(x), 0, 2, ranks=1)), x)


@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "i2"])
def test_small_elements_that_are_not_filled_are_named(dtype):
    """Cells of an automaton would be zeros, without a word."""
    x = da.from_array(np.zeros((20, 20), dtype), chunks=5)
    with pytest.raises(BlockMismatchError, match="but it left 400 of 400 elements as they"):
        computed(iterate(lambda u, out: u + 1, x, 0, 3, ranks=1))


def test_none_does_not_stop_it():
    """Conditions often are ``if small: return True``, without another return."""

    def until(last):
        return True if last["sum"] > 4 * 12 else None

    options = {"record": {"sum": lambda u: u.sum()}, "until": until, "ranks": 1}
    lazy_result = iterate(lambda u: {"u": u + 1}, {"u": matrix(np.zeros((3, 4)))}, 0, 9, **options)
    assert computed(lazy_result["steps"]) == 5


def test_fields_and_constants_are_only_read():
    """The next step, the other part of an overlapped one, or another run would read the change."""

    def field(u, weight, bias, out):
        out[:] = u
        u *= 0.5

    def array_constant(u, weight, bias, out):
        weight += 1
        out[:] = u

    def divided_constant(u, weight, bias, out):
        bias[0] = 1
        out[:] = u

    def returning(u, weight, bias):
        u[0] = 0
        return u

    def older(u, before, out):
        before[...] = 0
        out[:] = u

    weight, bias = np.zeros(1), matrix() * 0
    for function in (field, array_constant, divided_constant, returning):
        for overlap in (False, True):
            options = {"constants": (weight, bias), "ranks": 1, "overlap": overlap}
            y = iterate(function, matrix(), 0, 3, **options)
            with pytest.raises(InputError, match=r"only reads its fields and.*u = u\.copy\(\)"):
                computed(y)
    assert weight == 0
    with pytest.raises(InputError, match="only reads its fields"):
        computed(iterate(older, (matrix(), matrix()), 0, 3, ranks=1)[0])


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (lambda x: np.ma.masked_less(x, 3), UnsupportedArrayError, None),
        (lambda x: x[:1, :1], BlockMismatchError, None),
        (lambda x: x.astype("f4"), BlockMismatchError, None),
        (lambda x: 3.0, UnsupportedArrayError, r"got builtins\.float"),
        (lambda x: None, UnsupportedArrayError, r"got builtins\.NoneType"),
        (lambda x: x.tolist(), UnsupportedArrayError, r"got builtins\.list"),
    ],
    ids=["masked", "of one element", "of another dtype", "a number", "None", "a list"],
)
def test_blocks_that_differ_from_their_array_metadata(block, error, message):
    """A mask would be lost, one element be repeated."""
    x = matrix().map_blocks(block, dtype=float, meta=np.empty((0, 0)))
    for y in (
        iterate(lambda u: u, x, 0, 1, ranks=1),
        iterate(lambda u, c: u, matrix(), 0, 1, constants=(x,), ranks=1),
        spmd(lambda ctx, u: u, x, ranks=1),
    ):
        with pytest.raises(error, match=message):
            computed(y)
