"""Steps as one writes them, captured by default if that is safe: values are those of NumPy."""

from __future__ import annotations

import dask.array as da
import pytest

from dask_p2p import iterate
from dask_p2p.sections.iterate.capture import Captured
from tests.gpu.support import has_one_gpu_each, on_gpu
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
