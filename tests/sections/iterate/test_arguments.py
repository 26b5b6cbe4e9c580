"""Arguments of `iterate` and `spmd` of other types than the declared ones."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, LocalBlock, Points, Record, Save, iterate, spmd
from dask_p2p.errors import InputError
from tests.sections.emulated import on_gpu, run_section

X = da.ones((8, 6), chunks=(4, 3))
#: Values that Python compares, iterates or hashes in different ways.
OTHERS = [1.5, object(), np.zeros(2), ["x", None], {"a": 1}, lambda: 1, 1j]


def halved(u):
    return {"u": u[1:-1, 1:-1] / 2}


def started(**options):
    return iterate(halved, {"u": X}, 1, 3, **options)


def unnamed(**options):
    return iterate(lambda u: u[1:-1, 1:-1], X, 1, 3, **options)


def with_points(**options):
    points = Points(**{"xy": [[1], [2]], **options})
    return iterate(lambda u, p: {"u": u}, {"u": X}, 1, 3, constants={"p": points})


CALLS = {
    "dtype": lambda wrong: started(dtype=wrong),
    "dtype without names": lambda wrong: unnamed(dtype=wrong),
    "dtype of spmd": lambda wrong: spmd(lambda ctx, x: x, X, dtype=wrong),
    "dtype of a local block": lambda wrong: spmd(lambda ctx, x: x, X, outputs=LocalBlock(wrong)),
    "dtype of a field": lambda wrong: iterate(halved, {"u": Field(X, dtype=wrong)}, 1, 3),
    "dtype of a number": lambda wrong: iterate(
        halved, {"u": X, "t": Field(0.0, dtype=wrong)}, 1, 3
    ),
    "dtype of a record": lambda wrong: started(record={"m": Record(np.sum, dtype=wrong)}),
    "corners": lambda wrong: started(corners=wrong),
    "corners of a field": lambda wrong: iterate(halved, {"u": Field(X, corners=wrong)}, 1, 3),
    "overlap": lambda wrong: started(overlap=wrong),
    "exchange": lambda wrong: started(exchange=wrong),
    "capture": lambda wrong: started(capture=wrong),
    "as_library": lambda wrong: started(as_library=wrong),
    "ranks": lambda wrong: started(ranks=wrong),
    "constants": lambda wrong: started(constants=[wrong] if isinstance(wrong, dict) else wrong),
    "record": lambda wrong: started(record=wrong),
    "op": lambda wrong: started(record={"m": Record(lambda u: u[0, 0], op=wrong)}),
    "shape": lambda wrong: started(record={"m": Record(lambda u: u[0, 0], shape=wrong)}),
    "save": lambda wrong: started(save=wrong),
    "fields of a save": lambda wrong: started(save=Save("frames", 1, fields=wrong)),
    "region": lambda wrong: started(save=Save("frames", 1, region=wrong)),
    "compute": lambda wrong: started(save=Save("frames", 1, compute=wrong)),
    "dims": lambda wrong: started(save=Save("frames", 1, dims=wrong)),
    "coords": lambda wrong: started(save=Save("frames", 1, coords=wrong)),
    "checkpoint": lambda wrong: started(checkpoint=wrong),
    "every": lambda wrong: started(checkpoint=Checkpoint("states", wrong)),
    "keep": lambda wrong: started(checkpoint=Checkpoint("states", keep=wrong)),
    "points": lambda wrong: with_points(xy=wrong),
    "weights": lambda wrong: with_points(weights=wrong),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_types_are_refused(name):
    for wrong in OTHERS:
        with pytest.raises(InputError, match=r"expected .* got "):
            CALLS[name](wrong)


ARRAY = np.random.default_rng(0).normal(size=(6, 4))


def array():
    return da.from_array(ARRAY, chunks=(3, 4))


def unchanged(u):
    return {"u": u[1:-1] + 0}


def centred(u):
    u -= u.mean()
    return float((u**2).sum())


def centred_field(u):
    u -= u.mean()
    return u


def test_a_record():
    made = iterate(unchanged, {"u": array()}, {0: 1}, 3, record={"size": centred}, ranks=1)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        dask.compute(made)


def test_a_computed_field(tmp_path):
    save = Save(tmp_path / "frames.zarr", every=1, compute={"e": centred_field})
    made = iterate(unchanged, {"u": array()}, {0: 1}, 3, save=save, ranks=1)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        dask.compute(made)


def test_a_record_on_a_gpu(gpu):
    """Arrays of GPUs refuse no writes."""

    def negative(u):
        u[...] = u.apply(lambda values: -values)
        return 0.0

    def same(u):
        return {"u": u.apply(lambda values: values[1:-1] + 0)}

    fields = {"u": on_gpu(gpu, array())}
    made = iterate(same, fields, {0: 1}, 3, record={"n": negative}, ranks=2)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        run_section(gpu, made["u"], [ARRAY])


def test_indices():
    """Later calls receive the same arrays."""

    def shifted(u, at):
        rows, _ = at.index
        rows -= 4
        return u + rows

    with pytest.raises(InputError, match="only reads its fields and constants"):
        iterate(shifted, array(), 0, 3, ranks=1).compute(scheduler="sync")
