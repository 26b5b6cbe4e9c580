from __future__ import annotations

import doctest

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import fft, spmd
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.ops.fft import estimate as fft_estimate
from tests.support import persisted, run_of, spread

MIB = 2**20


def cube(chunks, dtype="D"):
    return da.ones((64,) * 3, chunks=chunks, dtype=dtype)


def test_examples_in_docstrings():
    assert doctest.testmod(fft_estimate).failed == 0


def test_what_moves_and_how_often():
    slabs = fft.fftn(cube((16, -1, -1)))
    found = fft.estimate(slabs, workers=4)
    (exchange,) = found.exchanges
    assert exchange.operation == "p2p-fft"
    assert (exchange.before[0], exchange.after[1]) == ((16,) * 4, (16,) * 4)
    assert exchange.size_bytes == 4 * MIB
    assert found.moved_bytes == exchange.moved_bytes == 3 * MIB
    assert fft.estimate(slabs, workers=2).moved_bytes == 2 * MIB
    assert fft.estimate(slabs, workers=1).moved_bytes == 0
    there_and_back = cube((16, -1, -1))
    for _ in range(4):
        there_and_back = fft.ifftn(fft.fftn(there_and_back) * 2)
    back = fft.estimate(there_and_back, workers=4)
    assert [one.before[0] for one in back.exchanges] == [(16,) * 4, (64,)] * 4, "in their order"
    half = fft.estimate(fft.rfftn(cube((16, -1, -1), "d")), workers=4)
    assert half.moved_bytes == 3 * MIB * 33 / 64
    of_a_gang = spmd(lambda ctx, a: a, cube((16, -1, -1)), ranks=4)
    assert fft.estimate(fft.fftn(of_a_gang), workers=4) == found, "what a gang exchanges apart"
    assert fft.estimate(cube(16)).exchanges == ()
    assert str(fft.estimate(cube(16), workers=2)).startswith("0 exchanges between 2 workers; 0 B")
    assert len(str(back).splitlines()) == 9


def test_what_a_task_and_a_worker_hold():
    with dask.config.set({"p2p.transports.order": ["cma"]}):
        to_complex = fft.fft(cube((16, -1, -1), "d"), axis=0)
        in_place = fft.fft(cube((16, -1, -1)), axis=0)
    found, same = (fft.estimate(y, workers=1).exchanges[0] for y in (to_complex, in_place))
    # Of 2 MiB of real numbers cut into four blocks: one, and its transform beside it.
    assert found.task_bytes == MIB / 2 + MIB
    assert found.worker_bytes == 2 * MIB + 2 * MIB + MIB
    assert same.task_bytes == MIB, "in its place"
    assert same.worker_bytes == 8 * MIB
    shared = fft.estimate(in_place, workers=4).exchanges[0]
    assert 2 * MIB < shared.worker_bytes <= 2 * MIB + shared.task_bytes


@pytest.mark.usefixtures("without_stealing")
def test_it_comes_true(client):
    x = spread(client, cube((16, -1, -1)))
    y = fft.fftn(x)
    found = fft.estimate(y)
    assert found.workers == 4
    y = persisted(client, y)
    assert run_of(client, y).moved_bytes == found.moved_bytes


@pytest.mark.parametrize(
    ("y", "workers", "error"),
    [
        (np.ones(3), 2, UnsupportedArrayError),
        (cube(16), 0, InputError),
        (cube(16), 1.5, InputError),
    ],
)
def test_wrong_input(y, workers, error):
    with pytest.raises(error):
        fft.estimate(y, workers=workers)
