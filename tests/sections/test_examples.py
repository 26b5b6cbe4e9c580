"""Methods that iterate, as users write them, against what is known of their results."""

from __future__ import annotations

from contextlib import ExitStack

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dask_p2p import spmd
from dask_p2p.sections.api import graph as arguments
from tests.docs.pages import DOCS, blocks_of
from tests.support import mostly_slow

_, *PROGRAMS = [
    block
    for block in blocks_of(DOCS / "how-to" / "solvers.md")
    if block.language == "python" and not block.not_run
]
CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
SOLVERS = ("heat", "wave", "derivative", "solve", "square_roots")


def result_of(program):
    """Run a program alone, as one copies it from the page: it checks its result."""
    names = {"__name__": "docs"}
    exec(compile(program.text, program.where, "exec"), names)
    return names["result"]


@pytest.fixture(scope="module")
def alone():
    """Results without a client: that of a test is made later, as it is for one test."""
    with dask.config.set(scheduler="threads"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "cluster_workers", list)
        return [result_of(program) for program in PROGRAMS]


def test_the_page_has_a_program_for_each(alone):
    assert len(PROGRAMS) == len(SOLVERS)
    for program, name in zip(PROGRAMS, SOLVERS, strict=True):
        assert f"def {name}(" in program.text


@pytest.mark.parametrize("ranks", mostly_slow([None, 1, 4], [4]))
def test_values_are_the_same_on_any_number_of_workers(client, alone, ranks, monkeypatch):
    """By default as many ranks as workers. Sums over ranks are in another order."""
    with ExitStack() as stack:
        if ranks == 1:
            cluster = LocalCluster(n_workers=1, dashboard_address=":0")
            stack.enter_context(Client(stack.enter_context(cluster)))
        elif ranks is not None:
            monkeypatch.setattr(arguments, "cluster_workers", lambda: [{"nthreads": 2}] * ranks)
        for program, name, wanted in zip(PROGRAMS, SOLVERS, alone, strict=True):
            result = result_of(program)
            if name in ("solve", "square_roots"):
                np.testing.assert_allclose(result, wanted, atol=1e-8)
            else:
                assert np.array_equal(result, wanted), name


def test_alternating_directions_solve_the_heat_equation(client):
    """Stencils along the divided axis, and solves along each axis where it is whole."""
    n, r, steps = 42, 0.7, 20
    second = -2 * np.eye(n) + np.roll(np.eye(n), 1, 0) + np.roll(np.eye(n), -1, 0)
    ahead, back = np.eye(n) + r / 2 * second, np.linalg.inv(np.eye(n) - r / 2 * second)

    def alternating(ctx, u, count):
        p, columns = ctx.with_halo(u, {0: 1}, "periodic"), ctx.redistribute(u, (1,))
        for _ in ctx.steps(count, ctx.state(p=p)):
            halo = ctx.update_halo(p)
            half = (p.inner + r / 2 * (halo[2:] - 2 * p.inner + halo[:-2])) @ back
            ctx.redistribute(half @ ahead, (1,), out=columns)
            ctx.redistribute(back @ columns, from_partition=(1,), out=half)
            p.inner[:] = half
        return p.inner

    x = np.random.default_rng(0).normal(size=(n, n))
    y = spmd(alternating, da.from_array(x, chunks=(9, 42)), ranks=4, count=steps).compute()
    wanted = x
    for _ in range(steps):
        wanted = back @ (ahead @ wanted @ back @ ahead)
    np.testing.assert_allclose(y, wanted, atol=1e-13)
    angle = 2 * np.pi * np.arange(n) / n
    x = np.sin(angle)[:, None] * np.cos(angle)
    y = spmd(alternating, da.from_array(x, chunks=(20, 42)), count=steps).compute()
    slowed = 2 * r * np.sin(np.pi / n) ** 2
    np.testing.assert_allclose(y, ((1 - slowed) / (1 + slowed)) ** (2 * steps) * x, atol=1e-12)


def test_transforms_solve_poissons_equation_in_a_periodic_box(client):
    def solve(ctx, f, spacing):
        waves = ctx.rfftn(f, partition=(1,))
        squares = sum(k**2 for k in ctx.wavenumbers(spacing, partition=(1,), real=True))
        squares[squares == 0] = np.inf  # the mean is free
        return ctx.irfftn(-waves / squares, from_partition=(1,))

    shape = (30, 21, 16)
    angle = np.meshgrid(*(2 * np.pi * np.arange(n) / n for n in shape), indexing="ij", sparse=True)
    u = np.sin(angle[0]) * np.cos(2 * angle[1]) * np.sin(angle[2])
    spacing = 2 * np.pi / np.array(shape)
    f = -6 * u
    x = da.from_array(f, chunks=(8, 21, 16))
    y = spmd(solve, x, spacing=spacing, ranks=4).compute()
    np.testing.assert_allclose(y, u, atol=1e-12)
    random = np.random.default_rng(0).normal(size=shape)
    y = spmd(solve, da.from_array(random, chunks=(8, 21, 16)), spacing=spacing, ranks=3).compute()
    k = np.meshgrid(*(np.fft.fftfreq(n, 1 / n) for n in shape), indexing="ij", sparse=True)
    squares = k[0] ** 2 + k[1] ** 2 + k[2] ** 2
    squares[0, 0, 0] = np.inf
    np.testing.assert_allclose(y, np.fft.ifftn(-np.fft.fftn(random) / squares).real, atol=1e-12)
