"""Functions of other array libraries in `iterate`, `spmd` and `map_on_gpu`.

The library is that of `test_dlpack`: its arrays have nothing but DLPack.
"""

import sys
from importlib import import_module

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Points, Save, iterate, map_on_gpu, spmd
from dask_p2p.errors import InputError, MissingPackageError
from tests.backends.test_dlpack import Tensor
from tests.backends.test_dlpack import torch as torch

U, V = (np.random.default_rng(n).random((24, 20)) for n in range(2))


def array(x):
    return da.from_array(x, chunks=((7, 5, 12), (9, 11)))


def computed(y):
    return dask.compute(y, scheduler="sync")[0]


def tensor_of(*arguments):
    """Return the array of the library with the sum of others."""
    assert all(isinstance(argument, Tensor) for argument in arguments)
    return Tensor(sum(argument.values for argument in arguments))


@pytest.mark.usefixtures("torch")
def test_fields_constants_position_records_and_computed_fields(tmp_path):
    zarr = pytest.importorskip("zarr")

    def step(u, c, at):
        return {"u": tensor_of(Tensor(u.values[1:-1]), c, at.index[0])}

    options = {
        "constants": {"c": array(V)},
        "record": {"mass": lambda u: tensor_of(u).values[1:-1].sum()},
        "save": Save(tmp_path / "frames", 3, compute={"double": lambda u: tensor_of(u, u)}),
        "as_library": "torch",
    }
    result = computed(iterate(step, {"u": array(U)}, {0: 1}, 3, **options))
    states = [U + number * (V + np.arange(24.0)[:, None]) for number in range(1, 4)]
    np.testing.assert_allclose(result["u"], states[-1], rtol=1e-12)
    np.testing.assert_allclose(result["mass"], [state.sum() for state in states], rtol=1e-12)
    frames = zarr.open(tmp_path / "frames", mode="r")
    np.testing.assert_allclose(frames["double"][0], 2 * states[-1], rtol=1e-12)


@pytest.mark.usefixtures("torch")
def test_a_function_that_writes_into_its_fields_is_refused():
    def doubled(u):
        u.values[...] *= 2
        return u

    with pytest.raises(InputError, match="only reads its fields"):
        computed(iterate(doubled, array(U), 0, 2, as_library="torch"))


@pytest.mark.usefixtures("torch")
def test_local_blocks_and_parts():
    options = {"as_library": "torch", "per_rank": [0.0]}
    y, sums = spmd(lambda ctx, x: (tensor_of(x, x), x.values.sum()), array(U), **options)
    np.testing.assert_array_equal(computed(y), 2 * U)
    np.testing.assert_allclose(computed(sums), [U.sum()])
    options = {"as_library": "torch", "fallback": "numpy", "part_bytes": 100}
    y = map_on_gpu(lambda x: tensor_of(x, x), array(U), **options)
    np.testing.assert_array_equal(computed(y), 2 * U)


# --- errors, without any of the libraries


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: iterate(lambda u: u, array(U), 0, 1, **options),
        lambda **options: spmd(lambda ctx, x: x, array(U), **options),
        lambda **options: map_on_gpu(
            lambda x: x, array(U), fallback="numpy", dtype=float, **options
        ),
    ],
    ids=["iterate", "spmd", "map_on_gpu"],
)
def test_unknown_and_missing_libraries(call, monkeypatch):
    with pytest.raises(InputError, match="as_library: expected one of torch, jax"):
        call(as_library="tensorflow")
    monkeypatch.setitem(sys.modules, "torch", None)
    import_module("dask_p2p.backends.dlpack")._load_library.cache_clear()
    with pytest.raises(MissingPackageError, match="pip install torch"):
        call(as_library="torch").compute(scheduler="sync")


def test_arguments_that_exclude_each_other():
    fields = {"u": array(U)}
    with pytest.raises(InputError, match="capture: expected a function of CuPy arrays"):
        iterate(lambda u: {"u": u}, fields, 0, 1, as_library="torch", capture=True)
    with pytest.raises(InputError, match="cannot be written, got one with a parameter out"):
        iterate(lambda u, out: None, fields, 0, 1, as_library="jax")
    points = {"points": Points([[1.0], [2.0]])}
    with pytest.raises(InputError, match="got Points"):
        iterate(lambda u, points: u, fields, 0, 1, as_library="torch", constants=points)
