"""Arguments of `iterate` and `spmd` of other types than the declared ones."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, LocalBlock, Points, Record, Save, iterate, spmd
from dask_p2p.errors import InputError

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
