import dask.array as da
import numpy as np
import pint
import pytest

from dask_p2p import Array, LocalBlock, PerRank, Points, Rows, Same, Save, iterate, map_on_gpu, spmd
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.backends.test_plain import Quantity

pytestmark = pytest.mark.cluster


@pytest.fixture
def x():
    return da.from_array(np.arange(24.0).reshape(12, 2), chunks=(3, 2))


def described(ctx, x):
    """Return all kinds of outputs."""
    low, high = ctx.box[0]
    spectrum = np.arange(10)[slice(*ctx.box_of((0,), (10,))[0])]
    return {
        "double": 2 * x,
        "is even": x % 2 == 0,
        "spectrum": spectrum.astype(complex),
        "rows": x[x[:, 0] % 3 == 0],
        "edges": np.array([low, high]),
        "sum": ctx.allreduce(x.sum()),
    }


OUTPUTS = {
    "double": LocalBlock(),
    "is even": LocalBlock(bool),
    "spectrum": Array((10,), complex),
    "rows": Rows(float, (2,)),
    "edges": PerRank([0, 0]),
    "sum": Same(0.0),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_of_all_kinds(client, x, ranks):
    lazy = spmd(described, x, outputs=OUTPUTS, ranks=ranks)
    assert list(lazy) == list(OUTPUTS)
    values = np.arange(24.0).reshape(12, 2)
    results = dict(zip(lazy, client.gather(client.compute([*lazy.values()])), strict=True))
    assert (results["double"] == 2 * values).all()
    assert (results["is even"] == (values % 2 == 0)).all()
    assert results["spectrum"].tolist() == list(range(10))
    assert (results["rows"] == values[values[:, 0] % 3 == 0]).all()
    assert (results["edges"].shape, results["edges"][-1, 1]) == ((ranks, 2), 12)
    assert results["sum"] == values.sum()
    for name, array in lazy.items():
        assert array.dtype == results[name].dtype
    assert (lazy["double"].chunks, lazy["sum"].ndim) == (x.chunks, 0)
    assert np.isnan(lazy["rows"].chunks[0]).all()
    assert float(lazy["spectrum"].imag.max().compute()) == 0


@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 3), (2, 1, 2)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_arrays_of_any_shape(client, shape, ranks):
    """Also with fewer elements than ranks: no block is empty."""

    def ones(ctx, shape):
        return np.ones([high - low for low, high in ctx.grid_of(shape).box])

    y = spmd(ones, outputs=Array(shape, float), ranks=ranks, shape=shape)
    assert y.shape == shape
    assert 0 in shape or all(n for sizes in y.chunks for n in sizes)
    assert (y.compute() == np.ones(shape)).all()


@pytest.mark.parametrize(
    ("outputs", "returned", "error"),
    [
        ({"a": LocalBlock()}, lambda x: x, "expected a dict of a from the .*, got ndarray"),
        ({"a": LocalBlock()}, lambda x: {"b": x}, r"dict of a from .* got \['b'\]\. Return"),
        (LocalBlock(), lambda x: x[1:], r"expected an array of shape \(12, 2\) from .* \(11, 2\)"),
        ({"a": LocalBlock()}, lambda x: {"a": x > 0}, "a: expected an array that becomes float64"),
        (Array((5,), float), lambda x: np.ones(4), r"expected an array of shape \(5,\) .* \(4,\)"),
        (Rows(float, (2,)), lambda x: np.ones(4), r"of shape \(any number, 2\) .* \(4,\)"),
        (Rows(int), lambda x: np.ones(4), "expected an array that becomes int64 from .* float64"),
        (PerRank(0), lambda x: 0.5, r"expected a value of shape \(\) that becomes int64"),
        (Same([0.0]), lambda x: 0.5, r"expected a value of shape \(1,\) that becomes float64"),
        (Rows(float), lambda x: [1.0], "got list"),
    ],
)
def test_other_values_are_refused(x, outputs, returned, error):
    lazy = spmd(lambda ctx, x: returned(x), x, outputs=outputs, ranks=1)
    with pytest.raises(BlockMismatchError, match=error):
        (lazy["a"] if isinstance(lazy, dict) else lazy).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: spmd(described, x, outputs={}), "outputs: expected a number of outputs, one of"),
        (lambda x: spmd(described, x, outputs={"a": 1}), "outputs: expected a number"),
        (lambda x: spmd(described, x, outputs={1: Same(0)}), "outputs: expected a number"),
        (lambda x: spmd(described, x, outputs=Same(0), dtype=float), "without dtype= and per_rank"),
        (lambda x: spmd(described, x, outputs={"a": Same(0)}, per_rank=[0]), "without dtype= and"),
        (lambda x: spmd(described, outputs=Same(0)), "ranks: expected a number of ranks for a sec"),
        (lambda x: spmd(described, outputs=LocalBlock(), ranks=1), "without arrays, got LocalBl"),
        (lambda x: spmd(described, ranks=1), "expected at least one Dask array"),
        (lambda x: Array((), float), r"shape: expected at least one axis"),
        (lambda x: Array((-1,), float), "shape: expected lengths of axes"),
        (lambda x: Rows(object), "dtype: expected one without Python objects"),
        (lambda x: Same("text"), "expected a number or a NumPy array as an example, got str"),
        (lambda x: PerRank(x), "expected a number or a NumPy array as an example, got Array"),
    ],
)
def test_wrong_outputs_are_refused(x, call, error):
    with pytest.raises(InputError, match=error):
        call(x)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_sequence_of_outputs_is_that_of_the_returned_tuple(client, x, sequence):
    def centred(ctx, x):
        mean = ctx.allreduce(x.sum()) / 24
        return x - mean, mean, x[:, 0] > mean

    outputs = sequence([LocalBlock(), Same(0.0), Rows(bool)])
    centred_x, mean, is_above = spmd(centred, x, outputs=outputs, ranks=2)
    assert float(mean.compute()) == 11.5
    assert float(centred_x.sum().compute()) == 0
    assert is_above.compute().sum() == 6
    (only,) = spmd(lambda ctx, x: (2 * x,), x, outputs=sequence([LocalBlock()]))
    assert only.chunks == x.chunks
    assert float(only.sum().compute()) == 552
    (total,) = spmd(lambda ctx: ([3.0],), outputs=sequence([Same([0.0])]), ranks=1)
    assert total.compute().tolist() == [3.0]


X = np.arange(24.0).reshape(4, 6)


def array():
    return da.from_array(X, chunks=(4, 6))


UNITS = {
    "astropy": lambda x: np.asarray(x).view(Quantity),
    "pint": lambda x: x * pint.get_application_registry().m,
    "masked": lambda x: np.ma.masked_array(x, np.zeros(np.shape(x), bool)),
    "matrix": lambda x: np.atleast_2d(x).view(np.matrix),
}


def on_gpu(unit, **options):
    return map_on_gpu(lambda x: unit(x), array(), dtype=float, fallback="numpy", **options)


def named(function, boundary="none", **options):
    return iterate(function, {"u": array(), "t": 0.0}, 0, 2, boundary=boundary, **options)


def filled(unit):
    def assigned(u, out):
        out[...] = unit(u)

    return iterate(assigned, array(), 0, 2, boundary="none")


WHOLE = {
    "spmd": lambda unit: spmd(lambda ctx, x: unit(x), array()),
    "rows": lambda unit: spmd(lambda ctx, x: unit(x), array(), outputs=Rows(float, (6,))),
    "array": lambda unit: spmd(lambda ctx, x: unit(x), array(), outputs=Array((4, 6), float)),
    "halo": lambda unit: spmd(lambda ctx, x: ctx.with_halo(unit(x), 1).inner, array()),
    "redistribute": lambda unit: spmd(lambda ctx, x: ctx.redistribute(unit(x)), array()),
    "transform": lambda unit: spmd(lambda ctx, x: ctx.fftn(unit(x)).real, array()),
    "iterate": lambda unit: iterate(lambda u: unit(u), array(), 0, 2, boundary="none"),
    "out": filled,
    "fields": lambda unit: named(lambda u: {"u": unit(u)})["u"],
    "on a GPU": on_gpu,
    "reduced": lambda unit: on_gpu(
        unit, reduce=lambda a, b: a + b, chunks=((4,), (6,)), part_bytes=2**20
    ),
}
NUMBERS = {
    "per rank": lambda unit: spmd(lambda ctx, x: unit(1.0), array(), outputs=PerRank(0.0)),
    "same": lambda unit: spmd(lambda ctx, x: unit(1.0), array(), outputs=Same(0.0)),
    "field": lambda unit: named(lambda u, t: {"t": unit(t)})["t"],
    "record": lambda unit: named(lambda u: {"u": u}, record={"m": lambda u: unit(1.0)})["m"],
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("program", WHOLE)
def test_arrays_with_a_mask_a_unit_or_operators(program, unit):
    with pytest.raises(UnsupportedArrayError, match=r"(?s)(asarray|filled)"):
        WHOLE[program](UNITS[unit]).compute(scheduler="sync")


@pytest.mark.parametrize("unit", ["astropy", "pint", "masked"])
@pytest.mark.parametrize("program", NUMBERS)
def test_numbers_with_a_mask_or_a_unit(program, unit):
    with pytest.raises(UnsupportedArrayError, match=r"(?s)whose .* would be lost"):
        NUMBERS[program](UNITS[unit]).compute(scheduler="sync")


@pytest.mark.parametrize("unit", UNITS)
def test_numbers_in_arguments(unit):
    number = UNITS[unit](np.array(1.0))
    with pytest.raises(InputError):
        named(lambda u: {"u": u}, boundary=number)
    with pytest.raises(InputError):
        iterate(lambda u, t: {"u": u}, {"u": array(), "t": number}, 0, 2)


@pytest.mark.parametrize("unit", UNITS)
def test_computed_fields_and_coordinates(unit, tmp_path):
    pytest.importorskip("zarr")
    save = Save(tmp_path / "frames.zarr", every=1, compute={"c": lambda u: UNITS[unit](u)})
    with pytest.raises(UnsupportedArrayError, match=r"compute\['c'\]: .* would be lost"):
        named(lambda u: {"u": u}, save=save)["u"].compute(scheduler="sync")
    coords = {"y": UNITS[unit](np.arange(4.0))}
    with pytest.raises(UnsupportedArrayError, match=r"coords\['y'\]: .* would be lost"):
        iterate(lambda u: {"u": u}, {"u": array()}, 0, 2, save=Save(tmp_path, 1, coords=coords))
    with pytest.raises(UnsupportedArrayError, match=r"points: .* would be lost"):
        named(lambda u, at: {"u": u}, constants={"at_points": Points(UNITS[unit](np.ones((2, 3))))})


def test_maps_and_records_are_plain_arrays():
    for kind in (np.memmap, np.recarray):
        plain = spmd(lambda ctx, x, kind=kind: x.view(kind), array()).compute(scheduler="sync")
        np.testing.assert_array_equal(plain, X)
