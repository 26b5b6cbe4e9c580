"""Random arrays, clusters and kills: each run ends with the right values, within its bound."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import dask_p2p

BOUND_S = 60


def indexed(shape, chunks):
    columns = shape[1]
    return da.fromfunction(lambda i, j: i * columns + j, shape=shape, chunks=chunks, dtype=float)


class Killer(threading.Thread):
    """Kills some of these processes, now and then, until it is told to stop."""

    def __init__(self, choose: random.Random, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._choose, self._pids = choose, pids
        self._stopped = threading.Event()

    def run(self) -> None:
        for pause_s in [0.15, 0.8, 0.8][: self._choose.randint(1, 3)]:
            if self._stopped.wait(self._choose.random() * pause_s):
                return
            how = self._choose.choice([signal.SIGKILL, signal.SIGTERM])
            with contextlib.suppress(ProcessLookupError):  # killed before
                os.kill(self._choose.choice(self._pids), how)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_kills(seed):
    choose = random.Random(seed)
    shape = (choose.randint(1, 900), choose.randint(1, 900))
    chunks = tuple(max(1, length // choose.randint(1, 9)) for length in shape)
    expected = np.arange(shape[0] * shape[1], dtype=float).reshape(shape)
    with (
        dask.config.set({"p2p.transports.comm.part-bytes": choose.choice(["1 kiB", "16 MiB"])}),
        LocalCluster(
            n_workers=choose.randint(2, 4),
            threads_per_worker=choose.randint(1, 2),
            dashboard_address=":0",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        x = client.persist(indexed(shape, chunks))
        if choose.random() < 0.7:
            wait(x)
        killer = Killer(choose, list(client.run(os.getpid).values()))
        killer.start()
        started_s = time.monotonic()
        y = client.persist(dask_p2p.transpose(x))
        back = dask_p2p.transpose(y + 1, chunks=choose.choice([None, (100, -1), 97]))
        got = client.compute(back).result(timeout=BOUND_S)
        np.testing.assert_array_equal(got, expected + 1)
        np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), expected.T)
        killer.stop()
        assert time.monotonic() - started_s < BOUND_S
