"""Programs as one first writes them, with CuPy blocks: right by default, or refused at once."""

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Save, iterate
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.sections.iterate.capture import Captured
from tests.backends.support import cupy
from tests.gpu.support import has_one_gpu_each, on_gpu, on_host
from tests.gpu.test_sections import UNEVEN, X, check, heat, heat_of, nine, way
from tests.sections.iterate.test_coupled import both, inner, laplacian, padded, pressure, velocities
from tests.sections.iterate.test_programs import reference
from tests.support import persisted

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "nearest", 0.5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"capture": True}], ids=str)
def test_functions_that_read_corners(client, way, options, ranks, boundary):
    y = iterate(nine, on_gpu(X, UNEVEN), 1, 50, boundary=boundary, ranks=ranks, **options)
    check(y, reference(nine, [X], 1, 50, boundary)[0])


def test_cubes_whose_functions_read_corners(client, way):
    def box(u, out):
        out[...] = 0
        for i in range(3):
            for j in range(3):
                for k in range(3):
                    ends = (n - 2 for n in u.shape)
                    at = zip((i, j, k), ends, strict=True)
                    out += (1 + i + 3 * j + 9 * k) / 405 * u[tuple(slice(s, s + n) for s, n in at)]

    x = np.random.default_rng(0).normal(size=(20, 24, 18))
    for boundary in ("periodic", "nearest"):
        for ranks in (2, 4):
            y = iterate(box, on_gpu(x, (10, 8, 9)), 1, 20, boundary=boundary, ranks=ranks)
            check(y, reference(box, [x], 1, 20, boundary)[0])


@pytest.mark.parametrize("dtype", ["f8", "i8", "u1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_corners_that_are_asked_not_to_be_exchanged(client, way, ranks, dtype):
    def star(u, out):
        out[...] = u[2:, 1:-1] + u[:-2, 1:-1]

    def corner(u, out):
        out[...] = u[2:, 2:]

    x = np.arange(X.size).reshape(X.shape).astype(dtype)
    y = iterate(star, on_gpu(x, UNEVEN), 1, 5, corners=False, ranks=ranks)
    assert np.array_equal(on_host(y), reference(star, [x], 1, 5, "periodic")[0])
    with pytest.raises(InputError, match=r"corners=False: expected .* Leave corners=False out"):
        iterate(corner, on_gpu(x, UNEVEN), 1, 5, corners=False, ranks=ranks).compute()


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "?"])
def test_fractions_in_fields_of_integers_are_refused(client, dtype):
    x = np.zeros(X.shape, dtype)  # the first step makes no fractions
    x[3, 4] = 4

    def step_whole(u, out):
        out[...] = (u[2:] * 1.0 + u[:-2]) / 2

    def in_parts(u, out):
        out[:2] = 0.5 * u[1:3]
        out[2:] = 1

    for function in (step_whole, in_parts):
        with pytest.raises(BlockMismatchError, match=r"dtype="):
            iterate(function, on_gpu(x, UNEVEN), {0: 1}, 3).compute()


def test_imaginary_parts_in_real_fields_are_refused(client):
    def turned(u, out):
        out[...] = 1j * u

    with pytest.raises(BlockMismatchError, match="complex128"):
        iterate(turned, on_gpu(X, UNEVEN), 0, 3).compute()


def test_kernels_that_take_pointers_fill_out(client):
    """They write to the address of `out`, whatever class it has."""

    def tripled(u, out):
        import cupy

        kernel = cupy.ElementwiseKernel("T x", "T y", "y = 3 * x")
        kernel(u, out)

    for dtype in ("i4", "f4"):
        x = np.arange(X.size).reshape(X.shape).astype(dtype)
        y = iterate(tripled, on_gpu(x, UNEVEN), 0, 2)
        assert np.array_equal(on_host(y), 9 * x)


@pytest.mark.parametrize("dtype", ["u4", "f4", "f8", "i8"])
def test_data_that_equal_the_marks_of_unfilled_memory(client, dtype):
    def copied(u, out):
        out[...] = u

    bits = b"\xa5" * (X.size * np.dtype(dtype).itemsize)
    x = np.frombuffer(bits, dtype).reshape(X.shape)
    y = iterate(copied, on_gpu(x, UNEVEN), 0, 3)
    assert np.array_equal(on_host(y), x)


V, P = X[::-1] / 3, X.T.reshape(X.shape) / 2
OPTIONS = pytest.mark.parametrize("options", [{}, {"overlap": True}, {"capture": True}], ids=str)


def react(u, v):
    rate = inner(u) * inner(v) * inner(v)
    return {"u": inner(u) + 0.1 * laplacian(u) - 1e-4 * rate, "v": inner(v) + 0.05 * laplacian(v)}


@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_phases(client, way, ranks, options):
    fields = {"u": on_gpu(X, UNEVEN), "v": on_gpu(V, UNEVEN), "p": on_gpu(P, UNEVEN)}
    boundary = {"p": "nearest", "*": 0.0}
    options = {"boundary": boundary, "ranks": ranks, **options}
    result = iterate([velocities, pressure], fields, 1, 30, **options)
    phases = [(velocities, "puv"), (pressure, "uvp")]
    expected = both({"u": X, "v": V, "p": P}, 1, 30, phases, boundary)
    for name, y in result.items():
        check(y, expected[name])


@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_levels_constants_and_position(client, way, ranks, options):
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


STEPS = 700
WANTED = reference(heat, [X], 1, STEPS, "periodic")[0]
replays = []  # on a worker


def note_replays():
    if not hasattr(Captured, "original"):
        Captured.original = Captured.__call__
        Captured.__call__ = lambda graph: (replays.append(1), graph.original())


def take_replays():
    replay_count = len(replays)
    replays.clear()
    return replay_count


@pytest.fixture
def count_of_replays(client):
    """Return the number of replays on all workers since the last call."""
    client.run(note_replays)
    client.run(take_replays)
    return lambda: sum(client.run(take_replays).values())


@pytest.mark.parametrize("function", [heat, heat_of])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_plain_steps(client, way, count_of_replays, function, ranks):
    x = persisted(client, on_gpu(X, UNEVEN))
    check(iterate(function, x, 1, STEPS, ranks=ranks), WANTED)
    # Ranks of one process, or on one GPU, have no windows.
    assert (count_of_replays() > 0) == (
        ranks == 1 or (way == "windows" and ranks == 2 and has_one_gpu_each())
    )


def test_large_fields(client, way, count_of_replays):
    """Their captured steps overlap by default: 32 MiB a rank."""
    x = da.random.default_rng(0).normal(size=(4096, 2048), chunks=2048).map_blocks(cupy.asarray)
    x = persisted(client, x)
    actual, expected = (
        iterate(heat, x, 1, STEPS, ranks=2, **options) for options in ({}, {"capture": False})
    )
    assert not int(abs(actual - expected).max().compute())
    assert (count_of_replays() > 0) == (way == "windows" and has_one_gpu_each())
