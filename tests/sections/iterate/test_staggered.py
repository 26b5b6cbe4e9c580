"""Fields on the faces of cells, which are longer by one than those in the cells."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import InputError
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RANKS = [1, 2, 3, 4]
RNG = np.random.default_rng(0)
NY, NX = 24, 20
P = RNG.normal(size=(NY, NX))
U, V = RNG.normal(size=(NY, NX + 1)), RNG.normal(size=(NY + 1, NX))
DT = 0.3


def accelerate(u, v, p, at):
    """Velocities on faces, from the pressures of the cells at both sides; walls stay at rest."""
    du, dv = np.diff(p[1:-1], axis=1), np.diff(p[:, 1:-1], axis=0)
    rows, columns = u.shape[0] - 2, v.shape[1] - 2
    u, v = u[1:-1, 1:-1], v[1:-1, 1:-1]
    return {"u": u - DT * du[:rows, : u.shape[1]], "v": v - DT * dv[: v.shape[0], :columns]}


def compress(p, u, v):
    """Pressures in cells, from the velocities on their faces."""
    rows, columns = p.shape[0] - 2, p.shape[1] - 2
    along_x = np.diff(u[1 : 1 + rows, 1 : 2 + columns], axis=1)
    along_y = np.diff(v[1 : 2 + rows, 1 : 1 + columns], axis=0)
    return {"p": p[1:-1, 1:-1] - DT * (along_x + along_y)}


STEP = [accelerate, compress]
BOUNDARY = {"p": "nearest", "*": 0.0}


def stepped(steps):
    p, u, v = P, U, V
    for _ in range(steps):
        wide = np.pad(p, 1, "edge")
        u = u - DT * np.diff(wide[1:-1], axis=1)
        v = v - DT * np.diff(wide[:, 1:-1], axis=0)
        p = p - DT * (np.diff(u, axis=1) + np.diff(v, axis=0))
    return p, u, v


def fields(chunks):
    p = da.from_array(P, chunks=chunks)
    u, v = da.from_array(U, chunks=(10, 6)), da.from_array(V, chunks=(25, 20))
    return {"p": p, "u": u, "v": v}


@pytest.mark.parametrize("chunks", [(6, 20), (24, 5), (8, 10), (5, 7), (24, 20)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", mostly_slow(RANKS, [1, 4]))
def test_pressures_in_cells_and_velocities_on_faces(client, chunks, ranks, overlap):
    options = {"boundary": BOUNDARY, "ranks": ranks, "overlap": overlap}
    lazy_result = iterate(STEP, fields(chunks), 1, 9, **options)
    assert lazy_result["u"].chunks[1][:-1] == lazy_result["p"].chunks[1][:-1]
    assert lazy_result["v"].chunks[0][-1] == lazy_result["p"].chunks[0][-1] + 1
    (result,) = dask.compute(lazy_result)
    for name, expected in zip("puv", stepped(9), strict=True):
        assert np.array_equal(result[name], expected), name


def test_other_shapes_are_refused():
    p, u = da.from_array(P, chunks=(6, 20)), da.from_array(U, chunks=(6, 21))
    for fields_of_shapes in ({"u": u, "p": p}, {"p": p[:, :-1], "u": u}, {"p": p, "u": u[:, 0]}):
        with pytest.raises(InputError, match=r"first one's"):
            iterate(lambda u, p: {"u": u}, fields_of_shapes, 0, 3)
