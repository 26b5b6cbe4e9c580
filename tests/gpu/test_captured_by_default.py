"""Steps as one writes them, captured by default if that is safe: values are those of NumPy."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, iterate, tuning
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.iterate.capture import Captured
from tests.gpu.support import has_one_gpu_each, on_gpu, on_host
from tests.gpu.test_sections import UNEVEN, X, check, heat, heat_of, way
from tests.sections.iterate.test_iterate import reference
from tests.support import persisted

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)
STEPS = 700
WANTED = reference(heat, [X], 1, STEPS, "periodic")[0]
replays, forks, replaced = [], [], []  # on a worker


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


def note_forks():
    replaced[:] = tuning.current, Gpu.on_side_stream
    original = Gpu.on_side_stream
    tuning.current = replace(tuning.current, graph_overlap_bytes=1)
    Gpu.on_side_stream = lambda gpu: (forks.append(1), original(gpu))[1]


def count_forks():
    return len(forks)


def restore_forks():
    tuning.current, Gpu.on_side_stream = replaced
    forks.clear()


@pytest.fixture
def count_of_forks(client):
    """Overlap captured steps of any size; return the number of forks on all workers."""
    client.run(note_forks)
    yield lambda: sum(client.run(count_forks).values())
    client.run(restore_forks)


@pytest.mark.parametrize("function", [heat, heat_of])
def test_exchanges_during_captured_steps(client, way, count_of_forks, function):
    x = persisted(client, on_gpu(X, UNEVEN))
    check(iterate(function, x, 1, STEPS, ranks=2), WANTED)
    assert (count_of_forks() > 0) == (way == "windows" and has_one_gpu_each())


def test_large_fields(client, way, count_of_replays):
    """Their captured steps overlap by default: 32 MiB a rank."""
    import cupy

    x = da.random.default_rng(0).normal(size=(4096, 2048), chunks=2048).map_blocks(cupy.asarray)
    x = persisted(client, x)
    actual, expected = (
        iterate(heat, x, 1, STEPS, ranks=2, **options) for options in ({}, {"capture": False})
    )
    assert not int(abs(actual - expected).max().compute())
    assert (count_of_replays() > 0) == (way == "windows" and has_one_gpu_each())


def test_steps_that_read_the_host(client, way, count_of_replays):
    def step(u):
        return heat_of(u) if float(abs(u).max()) < 1e9 else u * 0

    check(iterate(step, on_gpu(X, UNEVEN), 1, STEPS), WANTED)
    assert not count_of_replays()


def test_steps_of_one_rank_that_read_the_host(client, way, count_of_replays):
    def step(u):
        if u.shape == (15, 35):
            u.get()
        return heat_of(u)

    check(iterate(step, on_gpu(X, UNEVEN), 1, STEPS, ranks=8), WANTED)
    assert not count_of_replays()


def counter():
    count = 0

    def step(u):
        nonlocal count
        count += 1
        return heat_of(u) * (1 if count < 300 else 0.999)

    return step


def test_steps_that_count(client, way, count_of_replays):
    actual, expected = (
        on_host(iterate(counter(), on_gpu(X, UNEVEN), 1, STEPS, **options))
        for options in ({}, {"capture": False})
    )
    np.testing.assert_array_equal(actual, expected)
    assert not count_of_replays()


def test_coupled_fields_with_records(client, way, count_of_replays):
    def react(u, v, rate):
        return {"u": heat_of(u) - rate * v[1:-1, 1:-1], "v": heat_of(v) + rate * u[1:-1, 1:-1]}

    fields = {"u": on_gpu(X, UNEVEN), "v": on_gpu(X + 1, UNEVEN)}
    total = Record(lambda u: u[1:-1, 1:-1].sum(), every=100)
    options = {"record": {"total": total}, "rate": 1e-3}
    actual, expected = (
        iterate(react, fields, 1, STEPS, **options, **capture_options)
        for capture_options in ({}, {"capture": False})
    )
    for name in ("u", "v"):
        np.testing.assert_array_equal(on_host(actual[name]), on_host(expected[name]))
    np.testing.assert_array_equal(actual["total"].compute(), expected["total"].compute())
