"""Tasks whose code shows that a GPU may replay them, and those that do not."""

import functools

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.resident.replayed_calls import is_replayable_step
from tests.fusing.support import smooth, tasks_and_sizes

SEEN = []
X = da.ones((12, 12), chunks=(3, 12))


def recording(block):
    SEEN.append(1)
    return block


def noisy(block):
    return block + np.random.default_rng().normal(size=block.shape)


class Scaled:
    """A function with a state."""

    def __call__(self, block):
        return block


def plain(block, factor=2, rows=(1, 2)):
    return block * factor + len(rows)


def steps_of(y):
    tasks, sizes = tasks_and_sizes(y)
    programs = programs_of(tasks, 2, sizes)
    return [
        step for program in programs for superstep in program.supersteps for step in superstep.steps
    ]  # fmt: skip


def mapped(function):
    return X.map_blocks(function, dtype=float, meta=X._meta)


@pytest.mark.parametrize(
    "y",
    [
        *(X + 1, X / da.sqrt((X * X).sum()), X - X.mean(axis=0), X.std(), da.linalg.norm(X)),
        *(X @ X.T, X[::-1].cumsum(axis=0), da.where(X > 0, X, 0), X.T, X.astype("f4")),
        *(dask_p2p.transpose(X), dask_p2p.rechunk(X, (-1, 3)), dask_p2p.fft.fftn(X).real),
        da.map_overlap(smooth, X, depth=1, boundary="reflect", dtype=float),
        dask_p2p.map_overlap(smooth, X, depth=1, boundary=0.5, dtype=float),
        mapped(plain),
        X.map_blocks(plain, factor=3, rows=[1], dtype=float),
        mapped(functools.partial(plain, factor=np.float32(3))),
    ],
    ids=lambda y: str(y.name).split("-")[0],
)
def test_plain_steps(y):
    assert all(map(is_replayable_step, steps_of(y)))


@pytest.mark.parametrize(
    "y",
    [
        *(mapped(recording), mapped(noisy), mapped(Scaled()), mapped(lambda block: id(block))),
        mapped(functools.partial(plain, factor=np.ones(12))),
        X.map_blocks(plain, factor=np.random.default_rng(0), dtype=float, meta=X._meta),
        X.map_blocks(plain, factor=Scaled(), dtype=float, meta=X._meta),
        dask_p2p.map_overlap(recording, X, depth=1, boundary=0.5, dtype=float),
    ],
)
def test_other_steps(y):
    assert not all(map(is_replayable_step, steps_of(y)))
