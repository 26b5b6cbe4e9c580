"""Values of users that ranks take, in any place: their masks, units and operators are not lost."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pint
import pytest

from dask_p2p import Array, PerRank, Points, Rows, Same, Save, iterate, map_on_gpu, spmd
from dask_p2p.errors import InputError, UnsupportedArrayError
from tests.backends.test_plain import Quantity

X = np.arange(24.0).reshape(4, 6)


def array():
    return da.from_array(X, chunks=(4, 6))


def in_metres(x):
    return x * pint.get_application_registry().m


UNITS = {
    "astropy": lambda x: np.asarray(x).view(Quantity),
    "pint": in_metres,
    "masked": lambda x: np.ma.masked_array(x, np.zeros(np.shape(x), bool)),
    "matrix": lambda x: np.atleast_2d(x).view(np.matrix),
}


def stored(path, unit):
    save = Save(path / "frames.zarr", every=1, compute={"c": lambda u: unit(u)})
    return iterate(lambda u: {"u": u}, {"u": array()}, 0, 2, save=save)["u"]


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
    with pytest.raises(UnsupportedArrayError, match=r"compute\['c'\]: .* would be lost"):
        stored(tmp_path, UNITS[unit]).compute(scheduler="sync")
    coords = {"y": UNITS[unit](np.arange(4.0))}
    with pytest.raises(UnsupportedArrayError, match=r"coords\['y'\]: .* would be lost"):
        iterate(lambda u: {"u": u}, {"u": array()}, 0, 2, save=Save(tmp_path, 1, coords=coords))
    with pytest.raises(UnsupportedArrayError, match=r"points: .* would be lost"):
        named(lambda u, at: {"u": u}, constants={"at_points": Points(UNITS[unit](np.ones((2, 3))))})


def test_maps_and_records_are_plain_arrays():
    for kind in (np.memmap, np.recarray):
        got = spmd(lambda ctx, x, kind=kind: x.view(kind), array()).compute(scheduler="sync")
        np.testing.assert_array_equal(got, X)
