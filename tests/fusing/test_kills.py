"""Workers that are killed while a fused graph runs, and after it, at Dask's default settings."""

from __future__ import annotations

import signal

import dask
import dask.array as da
import pytest
from distributed import wait

import dask_p2p
from tests.fusing.support import smooth
from tests.sections.support import nothing_is_left
from tests.support import die_once, result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def smoothed(x, steps):
    for _ in range(steps):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
    return x


def killed_once(block, path):
    """Kill this worker once, when a rank has the block."""
    die_once(path)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 6])
def test_a_killed_worker_brings_all_ranks_again(client, tmp_path, steps):
    client.wait_for_workers(2)
    x = client.persist(da.random.default_rng(0).normal(size=(32, 16), chunks=(4, 16)))
    wait(x)
    expected, y = smoothed(x, 8), smoothed(x, steps)
    y = smoothed(y.map_blocks(killed_once, tmp_path / "killed", meta=y._meta), 8 - steps)
    future = client.compute(dask_p2p.fused(dask_p2p.transpose(y)))
    assert result_of(client, future).tobytes() == expected.compute().T.copy().tobytes()
    assert (tmp_path / "killed").exists()
    del future, x, y, expected
    nothing_is_left(client)


@pytest.mark.parametrize("by_option", [False, True])
def test_an_output_that_is_lost_is_made_again(client, by_option):
    client.wait_for_workers(2)
    x = da.random.default_rng(0).normal(size=(32, 16), chunks=(4, 16))
    y = smoothed(x, 8)
    expected = y.compute()
    with dask.config.set({"p2p.fuse": "on" if by_option else "off"}):
        y = client.persist(y if by_option else dask_p2p.fused(y))
    wait(y)
    for _ in range(2):
        victim = next(iter(client.who_has(y).values()))[0]
        client.run(signal.raise_signal, signal.SIGKILL, workers=[victim], on_error="ignore")
        assert result_of(client, client.compute(y)).tobytes() == expected.tobytes()
    del y
    nothing_is_left(client)
