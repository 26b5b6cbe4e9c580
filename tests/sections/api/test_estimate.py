"""Estimates of ranks' memory, compared with NumPy's allocations in tracemalloc."""

import tracemalloc

import dask.array as da
import numpy as np
import pytest
from distributed import wait

from dask_p2p import estimate, iterate, spmd
from dask_p2p.errors import MemoryLimitError
from dask_p2p.sections.api.rank_body import SectionEstimate
from dask_p2p.sections.gang import checkpoints as state_memory
from dask_p2p.transports.buffers import Segment

SHAPE, CHUNKS = (1200, 500), (300, 250)
SLACK_BYTES = 300_000  # of Dask, in addition to 5 to 20 MB
CLUSTER = {"n_workers": 2, "threads_per_worker": 2, "memory_limit": "1 GiB"}


class Counted(Segment):
    """Memory that workers share, which tracemalloc does not count."""

    total_bytes = 0

    def __init__(self, fd, name):
        super().__init__(fd, name)
        Counted.total_bytes += name.size_bytes


def start_tracing():
    tracemalloc.stop()
    tracemalloc.start()
    state_memory.Segment, Counted.total_bytes = Counted, 0


def peak_bytes():
    return tracemalloc.get_traced_memory()[1] + Counted.total_bytes


def smooth(u, out):
    np.add(u[2:-2, 1:-1], u[:-4, 1:-1], out=out)


def wave(u, before, speed, out):
    np.add(u[2:-2, 1:-1], before[:-4, 1:-1], out=out)
    out *= speed


def normalized(ctx, x):
    x /= ctx.size
    return x


DEPTH = {0: 2, 1: 1}
CASES = {
    "one field": lambda x: [iterate(smooth, x, DEPTH, 6, checkpoint_every=1, ranks=2)],
    "no checkpoints": lambda x: [iterate(smooth, x, DEPTH, 3, checkpoint_every=None, ranks=2)],
    "two fields and a constant": lambda x: iterate(
        wave, (x, x + 1), DEPTH, 6, constants=(x + 2,), checkpoint_every=1, ranks=2
    ),
    "any function": lambda x: [spmd(normalized, x, ranks=2)],
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_memory_of_the_estimate(client, case):
    x = client.persist(da.ones(SHAPE, chunks=CHUNKS))
    wait(x)
    # Workers import modules for the first section, which takes memory, too.
    da.compute(*CASES[case](da.ones((8, 8), chunks=4)))
    y = CASES[case](x)
    memory = estimate(y[0])
    assert memory.workers == 2
    assert memory.total_bytes - memory.input_bytes > 4_500_000
    client.run(start_tracing)
    try:
        outputs = client.persist(y)
        wait(outputs)
        ran = client.run(_ranks, y[0].name)
        for worker, peak in client.run(peak_bytes).items():
            # x itself was there before; other inputs are made, and may come from others.
            if ran[worker] == 1:
                assert peak >= memory.total_bytes - memory.input_bytes - SLACK_BYTES, (case, memory)
            inputs_bytes = 2 * memory.input_bytes if "two" in case else memory.input_bytes
            most_bytes = memory.total_bytes - memory.input_bytes + inputs_bytes + SLACK_BYTES
            assert peak <= max(1, ran[worker]) * most_bytes, (case, memory)
    finally:
        client.run(tracemalloc.stop)


def _ranks(name, dask_worker):
    gang = name.replace("-0-", "-ranks-")
    return sum(
        key[:1] == (gang,) and key[1] != "commit"
        for key in dask_worker.state.tasks
        if isinstance(key, tuple)
    )


def test_the_sum_of_all_memory():
    """Two ranks of 50 x 10 elements, with a halo of a row at each boundary of blocks,
    and of two at each end.

    Rows go to other ranks with the halos at their ends.
    """
    x = da.ones((100, 10), chunks=(25, 10), dtype="f4")
    y, _ = iterate(wave, (x, x), [{0: 1, 1: 2}, {}], 3, constants=(x.astype("f8"), 3), ranks=2)
    halo_array = 52 * 14 * 4
    assert estimate(y) == SectionEstimate(
        workers=2,
        input_bytes=50 * 10 * (4 + 4 + 8),
        output_bytes=2 * 50 * 10 * 4,
        staging_bytes=2 * 14 * 4,
        packed_bytes=2 * 14 * 4,
        work_bytes=3 * halo_array + 50 * 10 * 8,
        returned_bytes=2 * halo_array,
        state_bytes=2 * 2 * 2 * 50 * 10 * 4,
        step_bytes=2 * 14 * 4,
        checkpoint_bytes=2 * 50 * 10 * 4,
    )
    assert str(estimate(y)).startswith("2 ranks: at most 36.09 kiB each (7.81 kiB input blocks, ")
    assert str(estimate(y)).endswith("sends 112 B per step, and 3.91 kiB per checkpoint")
    alone = iterate(wave, (x, x), 1, 3, ranks=1)[1]
    assert (estimate(alone).state_bytes, estimate(alone).step_bytes) == (0, 0)
    without_checkpoints = iterate(wave, (x, x), 1, 3, ranks=2, checkpoint_every=None)[0]
    assert estimate(without_checkpoints).state_bytes == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_fit_is_refused_before_anything_is_allocated(client, ranks):
    """1 GiB a worker; the blocks of the input take no memory."""

    def repeated(block):
        return np.broadcast_to(np.float64(1), (10_000 * block.shape[0], 5_000))

    chunks = ((10_000,) * 2, (5_000,))
    x = da.zeros((2, 1), chunks=1).map_blocks(repeated, chunks=chunks, dtype=float)
    client.run(start_tracing)
    y = iterate(smooth, x, DEPTH, 2, ranks=ranks)
    with pytest.raises(MemoryLimitError, match=r"fits into the 1.00 GiB .* are missing") as caught:
        client.compute(y.sum()).result()
    assert max(client.run(peak_bytes).values()) < 20_000_000
    assert caught.value.needed_bytes <= estimate(y).total_bytes
    assert caught.value.missing_bytes == caught.value.needed_bytes - 2**30
