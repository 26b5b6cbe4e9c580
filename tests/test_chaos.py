"""Random arrays, clusters and kills: each run ends with the right bits, within its bound.

What a seed decides is what is done; when it hits is left to the machine.
"""

import contextlib
import math
import os
import random
import signal
import threading
import time
from itertools import pairwise

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from tests.faults.support import BOUND_S, cluster_of, source
from tests.fusing.support import OPERATIONS
from tests.support import assert_same_bits, bits

RUNS = 200
RUNS_BY_DEFAULT = 3

DTYPES = [
    "?", "i1", "u1", ">i2", "u4", "i8", "f2", "f4", "f8", ">f8", "c8", ">c16", "longdouble",
    "M8[ns]", "m8[s]", "S5", "U3", "V7", [("a", "i1"), ("b", ">f8")], [("x", "c8"), ("y", "?")],
]  # fmt: skip


class FaultInjector(threading.Thread):
    """Kills, terminates and halts processes, now and then, as long as it is entered."""

    def __init__(self, choose: random.Random, pids: list[int]) -> None:
        super().__init__(daemon=True)
        # All chosen beforehand: another thread draws from the same source.
        self._acts = [
            (
                choose.random() * pause_s,
                choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]),
                choose.choice(pids),
            )
            for pause_s in [0.05, 0.1, 0.3][: choose.randint(0, 3) or 2]
        ]
        self._stopped = threading.Event()

    def run(self) -> None:
        for pause_s, how, pid in self._acts:
            if self._stopped.wait(pause_s):
                return
            with contextlib.suppress(ProcessLookupError):  # killed before
                os.kill(pid, how)
                if how == signal.SIGSTOP:
                    self._stopped.wait(0.2)
                    os.kill(pid, signal.SIGCONT)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self.join()


def cut(choose, length, max_blocks):
    """Cut an axis into uneven blocks, empty ones now and then."""
    bounds = sorted(choose.randint(0, length) for _ in range(choose.randint(0, max_blocks - 1)))
    if choose.random() < 0.9:
        bounds = sorted({*bounds} - {0, length})
    bounds = [0, *bounds, length]
    return tuple(stop - start for start, stop in pairwise(bounds))


_SLOW = [], [pytest.mark.slow]
SEEDS = pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.long] if seed >= RUNS_BY_DEFAULT else _SLOW[seed > 0])
        for seed in range(RUNS)
    ],
)


@SEEDS
def test_a_run_with_kills(seed):
    choose = random.Random(seed)
    dtype = np.dtype(choose.choice(DTYPES))
    ndim = choose.randint(1, 4)
    longest = int(choose.choice([20, 20_000, 300_000]) ** (1 / ndim))
    shape = tuple(choose.randint(0 if choose.random() < 0.05 else 1, longest) for _ in range(ndim))
    max_blocks = {1: 12, 2: 6, 3: 3, 4: 2}[ndim]  # blocks along an axis
    axes = choose.sample(range(ndim), ndim)
    to = [None, tuple(cut(choose, shape[axis], max_blocks) for axis in axes)][choose.random() < 0.7]
    inverse = [int(axis) for axis in np.argsort(axes)]
    positions = source(shape, tuple(cut(choose, n, max_blocks) for n in shape), int)
    x = positions.map_blocks(bits, dtype, meta=np.empty((0,) * ndim, dtype))
    expected = bits(np.arange(math.prod(shape)).reshape(shape), dtype)
    options = {
        "p2p.transports.order": ["auto", ["comm"], "auto", ["ucx"]][seed % 4],
        "p2p.transports.part-bytes": ["1 kiB", "100 kB", "auto"][seed // 4 % 3],
        "p2p.timeouts.request": "10 s",  # of Dask's own, which are 30 s, it can be told apart
        "distributed.scheduler.work-stealing": choose.random() < 0.5,
    }
    n_workers = choose.randint(2, 4)
    with cluster_of(n_workers, options, threads_per_worker=choose.randint(1, 2)) as client:
        x = client.persist(x)
        if choose.random() < 0.7:
            wait(x)
        trouble = FaultInjector(choose, list(client.run(os.getpid).values()))
        started_s = time.monotonic()
        with trouble:
            y = client.persist(dask_p2p.transpose(x, axes, chunks=to))
            z = dask_p2p.transpose(y, inverse, chunks=x.chunks)
            assert_same_bits(client.compute(z).result(timeout=BOUND_S), expected)
            assert_same_bits(client.compute(y).result(timeout=BOUND_S), expected.transpose(axes))
        assert time.monotonic() - started_s < BOUND_S


def slowly(block, pause_s):
    """Return a block later, so that kills hit ranks that run."""
    time.sleep(pause_s)
    return block


def fused_program(choose, x):
    """Return two arrays of a random graph, the result of some operations and its sum."""
    have = [x, x + 1]
    for _ in range(choose.randint(3, 10)):
        operation = choose.choice(OPERATIONS)
        array = operation(choose.choice(have), choose.choice(have), choose.randint(0, 99))
        if choose.random() < 0.5:
            array = array.map_blocks(slowly, choose.random() / 20, dtype=array.dtype)
        have.append(array)
    return have[-1], have[-1].sum(axis=0)


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")  # of few rows
@SEEDS
def test_a_fused_graph_with_kills(seed):
    choose = random.Random(f"fused {seed}")
    n = choose.choice([12, 64, 256])
    values = np.random.default_rng(seed).normal(size=(n, n))
    chunks = tuple(choose.randint(max(1, n // 6), n) for _ in range(2))
    expected = dask.compute(
        *fused_program(random.Random(seed), da.from_array(values, chunks=chunks)), scheduler="sync"
    )
    n_workers = choose.randint(2, 4)
    with cluster_of(n_workers, threads_per_worker=choose.randint(1, 2)) as client:
        x = client.persist(da.from_array(values, chunks=chunks))
        if choose.random() < 0.7:
            wait(x)
        mode = choose.choice(["on", "auto", "fused"])
        arrays = fused_program(random.Random(seed), x)
        arrays = dask_p2p.fused(*arrays) if mode == "fused" else arrays
        trouble = FaultInjector(choose, list(client.run(os.getpid).values()))
        with trouble, dask.config.set({"p2p.fuse": "off" if mode == "fused" else mode}):
            futures = client.compute([*arrays])
            for future, value in zip(futures, expected, strict=True):
                assert_same_bits(future.result(timeout=BOUND_S), value)
