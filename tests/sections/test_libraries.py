"""Programs of PyTorch and JAX, against the same programs in NumPy."""

from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Points, Save, iterate, map_on_gpu, spmd
from dask_p2p.errors import InputError, MissingPackageError
from tests.sections.iterate.test_coupled import inner, react

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
U, V = (np.random.default_rng(n).random((24, 20)) for n in range(2))
CHUNKS = ((7, 5, 12), (9, 11))
KINDS = {"torch": "Tensor", "jax": "Array"}


def array(x):
    return da.from_array(x, chunks=CHUNKS)


def enable(library):
    """Make JAX of this process compute with 64 bits."""
    if library == "jax":
        import_module("jax").config.update("jax_enable_x64", True)


@pytest.fixture(params=KINDS)
def library(request):
    pytest.importorskip(request.param)
    enable(request.param)
    return request.param


def called_with(library, function):
    """Return the function, with a check of the kind of its first argument."""

    @wraps(function)
    def checked(u, *operands, **named):
        assert isinstance(u, getattr(import_module(library), KINDS[library]))
        return function(u, *operands, **named)

    return checked


def step(u, v, mask, at):
    new = react(u, v)
    return {"u": new["u"] * mask * (at.index[0] % 3 > 0), "v": new["v"]}


def mass(u):
    return inner(u).sum()


def iterated(wrapped=lambda function: function, steps=12, **options):
    fields, constants = {"u": array(U), "v": array(V)}, {"mask": array(U)}
    record = {"mass": wrapped(mass)}
    return iterate(
        wrapped(step), fields, 1, steps, constants=constants, record=record, **options
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_fields_constants_position_and_records(client, library, ranks):
    client.run(enable, library)

    def wrapped(function):
        return called_with(library, function)

    (result,) = dask.compute(iterated(wrapped, ranks=ranks, as_library=library))
    (expected,) = dask.compute(iterated(ranks=1), scheduler="sync")
    for name, value in result.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12)


def test_a_jitted_step_and_computed_fields(library, tmp_path):
    zarr = pytest.importorskip("zarr")
    jitted = import_module("jax").jit if library == "jax" else called_with("torch", react)
    function = jitted(react) if library == "jax" else jitted
    save = Save(tmp_path / "frames", 4, compute={"sum": lambda u, v: inner(u) + inner(v)})
    fields = {"u": array(U), "v": array(V)}
    result = iterate(function, fields, 1, 8, as_library=library, save=save)
    results = dask.compute(result, scheduler="sync")[0]
    expected = dask.compute(iterate(react, fields, 1, 8), scheduler="sync")[0]
    np.testing.assert_allclose(results["u"], expected["u"], rtol=1e-12)
    frames = zarr.open(tmp_path / "frames", mode="r")
    np.testing.assert_allclose(frames["sum"][1], expected["u"] + expected["v"], rtol=1e-12)


def test_memory_to_fill(tmp_path):
    torch = pytest.importorskip("torch")

    def average(u, out):
        torch.add(u[:-2], u[2:], out=out)
        out /= 2

    def plain(u, out):
        np.add(u[:-2], u[2:], out=out)
        out /= 2

    options = {0: 1, 1: 0}, 9
    result = iterate(average, array(U), *options, as_library="torch").compute(scheduler="sync")
    np.testing.assert_array_equal(
        result, iterate(plain, array(U), *options).compute(scheduler="sync")
    )  # fmt: skip


def test_numbers_for_until(library):
    def halved(u):
        return u / 2, (u.max() if library == "jax" else u.max().item())

    result = iterate(halved, array(U), 0, 50, until=lambda top: top < 0.1, as_library=library)
    assert 0.02 < result.compute(scheduler="sync").max() < 0.05


def test_a_function_that_writes_into_its_fields_is_refused():
    pytest.importorskip("torch")
    result = iterate(lambda u: u.mul_(2), array(U), 0, 2, as_library="torch")
    with pytest.raises(InputError, match="only reads its fields"):
        result.compute(scheduler="sync")


@pytest.mark.parametrize("ranks", [1, 2])
def test_spmd(client, library, ranks):
    client.run(enable, library)

    def normalized(ctx, x):
        total = ctx.allreduce(float((x**2).sum()))
        return x / total**0.5, x.sum()

    def checked(ctx, x):
        return called_with(library, lambda x: normalized(ctx, x))(x)

    options = {"per_rank": [0.0], "ranks": ranks}
    results = dask.compute(*spmd(checked, array(U), as_library=library, **options))
    np.testing.assert_allclose(results[0], U / (U**2).sum() ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(results[1].sum(), U.sum(), rtol=1e-12)


def test_map_on_gpu(library):
    def sines(x):
        return called_with(library, import_module({"jax": "jax.numpy"}.get(library, library)).sin)(
            x
        )

    options = {"fallback": "numpy", "as_library": library, "part_bytes": 100}
    result = map_on_gpu(sines, array(U), **options)
    np.testing.assert_allclose(result.compute(scheduler="sync"), np.sin(U), rtol=1e-12)
    totals = map_on_gpu(
        lambda x: x.sum(0, keepdims=True), array(U), reduce=lambda a, b: a + b, **options
    )
    np.testing.assert_allclose(totals.compute(scheduler="sync").sum(0), U.sum(0), rtol=1e-12)


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
