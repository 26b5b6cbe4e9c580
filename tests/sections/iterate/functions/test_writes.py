"""Functions that are called after steps, and write into the fields that they should only read."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Save, iterate
from dask_p2p.errors import InputError
from tests.sections.emulated import on_gpu, run_section

X = np.random.default_rng(0).normal(size=(6, 4))


def array():
    return da.from_array(X, chunks=(3, 4))


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
        u[...] = u.made(lambda values: -values)
        return 0.0

    def same(u):
        return {"u": u.made(lambda values: values[1:-1] + 0)}

    fields = {"u": on_gpu(gpu, array())}
    made = iterate(same, fields, {0: 1}, 3, record={"n": negative}, ranks=2)
    with pytest.raises(InputError, match=r"only reads its fields .* Write into a copy"):
        run_section(gpu, made["u"], [X])


def test_indices():
    """Later calls receive the same arrays."""

    def shifted(u, at):
        rows, _ = at.index
        rows -= 4
        return u + rows

    with pytest.raises(InputError, match="only reads its fields and constants"):
        iterate(shifted, array(), 0, 3, ranks=1).compute(scheduler="sync")
