"""Programs of several fields with CuPy blocks, against the same programs in NumPy."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Save, iterate
from dask_p2p.errors import BlockMismatchError, InputError
from tests.gpu.support import on_gpu
from tests.gpu.test_sections import UNEVEN, X, check, way
from tests.sections.iterate.test_coupled import both, inner, laplacian, padded, pressure, velocities

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)
V, P = X[::-1] / 3, X.T.reshape(X.shape) / 2
OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"capture": True}], ids=str
)  # fmt: skip


def react(u, v):
    rate = inner(u) * inner(v) * inner(v)
    return {"u": inner(u) + 0.1 * laplacian(u) - 1e-4 * rate, "v": inner(v) + 0.05 * laplacian(v)}


@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_phases(client, way, ranks, options):
    fields = {"u": on_gpu(X, UNEVEN), "v": on_gpu(V, UNEVEN), "p": on_gpu(P, UNEVEN)}
    boundary = {"p": "nearest", "*": 0.0}
    result = iterate(
        [velocities, pressure], fields, 1, 30, boundary=boundary, ranks=ranks, **options
    )
    phases = [(velocities, "puv"), (pressure, "uvp")]
    expected = both({"u": X, "v": V, "p": P}, 1, 30, phases, boundary)
    for name, y in result.items():
        check(y, expected[name])


@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_levels_constants_and_position(client, way, ranks, options):
    import cupy

    def leap(w, mask, column, at):
        now, before = w
        new = 2 * inner(now) - before + 0.1 * laplacian(now) * column
        return {"w": new * mask + 1e-3 * (at.index[0] % 3)}

    mask, column = (X[0] > -0.5).astype(float), np.linspace(0, 1, len(X))[:, None]
    constants = {"mask": cupy.asarray(mask), "column": cupy.asarray(column)}
    fields = {"w": Field([on_gpu(X, UNEVEN), on_gpu(V, UNEVEN)], depth=[1, 0])}
    result = iterate(leap, fields, 5, 30, boundary=0.0, constants=constants, ranks=ranks, **options)
    now, before, rows = X, V, np.arange(len(X))[:, None]
    for _ in range(30):
        new = 2 * now - before + 0.1 * laplacian(padded(now, 1, 0.0)) * column
        now, before = new * mask + 1e-3 * (rows % 3), now
    check(result["w"][0], now)
    check(result["w"][1], before)


@OPTIONS
def test_stores(client, tmp_path, options):
    zarr = pytest.importorskip("zarr")

    fields = {"u": on_gpu(X, 10), "v": on_gpu(V, 10)}
    store = {
        "save": Save(tmp_path / "frames", 10),
        "checkpoint": Checkpoint(tmp_path / "states", every=20),
    }
    iterate(react, fields, 1, 30, **store, **options)["u"].compute()
    group = zarr.open(tmp_path / "frames", mode="r")
    expected = both({"u": X, "v": V}, 1, 30, [(react, "uv")])
    np.testing.assert_allclose(group["v"][2], expected["v"], rtol=1e-9)
    result = iterate(react, fields, 1, 50, ranks=1, **store, **options)
    check(result["u"], both({"u": X, "v": V}, 1, 50, [(react, "uv")])["u"])
    assert zarr.open(tmp_path / "frames", mode="r").attrs["frames"] == 5


def test_mistakes_are_named(client):
    fields = {"u": on_gpu(X, UNEVEN), "v": on_gpu(V, UNEVEN)}

    def counts(u, v, at):
        return {"u": inner(u) + at.step}

    with pytest.raises(BlockMismatchError, match="got tuple"):
        iterate(lambda u, v: (u, v), fields, 1, 3)["u"].compute()
    with pytest.raises(InputError, match=r"at\.step: .* Leave out capture=True"):
        iterate(counts, fields, 1, 30, capture=True)["u"].compute()
    with pytest.raises(Exception, match=r"of one kind|expected CuPy blocks"):
        iterate(react, {**fields, "v": da.from_array(V, chunks=UNEVEN)}, 1, 3)
