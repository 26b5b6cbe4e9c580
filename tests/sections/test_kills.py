"""Workers that are killed in the middle of a gang, at Dask's default settings, with nannies."""

import os
import signal
import time
from threading import Thread

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, die_once, mostly_slow, result_of
from tests.transports.loopback import wait_until

X = np.arange(96.0).reshape(8, 12)
CLUSTER = {"n_workers": 3, "threads_per_worker": 2}


def three_workers(client):
    """Wait for the workers. A nanny may fail to bring its own back on a busy machine."""
    try:
        client.wait_for_workers(3, timeout=30)
    except TimeoutError:
        client.cluster.scale(len(client.cluster.workers) + 1)
        client.wait_for_workers(3, timeout=BOUND_S)


def circling(ctx, x, steps, folder, kill):
    """Sends its block, of 1.6 MB, around a ring; kills its own worker once, before a message."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for step in range(steps):
        time.sleep(0.02)
        if (ctx.rank, step) == kill:
            die_once(folder / "killed")
        sent = ctx.isend(x, right, tag=step)
        received = ctx.recv(left, tag=step)
        sent.wait()
        x = received + step
    return x


@pytest.mark.parametrize("kill", mostly_slow([(0, 0), (2, 7)], [(2, 7)]))
def test_a_killed_worker_ends_waits_for_messages(client, tmp_path, kill):
    values = np.arange(600_000.0).reshape(3, 200_000)
    x = da.from_array(values, chunks=(1, 200_000))
    y = spmd(circling, x, ranks=3, steps=9, folder=tmp_path, kill=kill)
    assert (result_of(client, client.compute(y)) == values + 36).all()
    assert (tmp_path / "killed").exists()


def test_a_worker_dies_when_only_some_blocks_are_handed_out(client, tmp_path):
    """Between commit and hand-out: outputs of some ranks are in memory, others are gone."""
    first = tmp_path / "first"  # is there as soon as one block is handed out

    def die():
        wait_until(first.exists)
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(ctx, x, path):
        total = ctx.allreduce(1.0)
        if ctx.rank == 1 and not path.exists():
            path.touch()
            Thread(target=die, daemon=True).start()
        return x + total

    x = da.from_array(X, chunks=(1, 12))
    y = spmd(dying, x, ranks=3, path=tmp_path / "died")
    y = y.map_blocks(slow, first, dtype=x.dtype)
    assert np.array_equal(result_of(client, client.compute(y)), X + 3)
    assert first.exists()
    nothing_is_left(client)


def slow(block, first):
    first.touch()
    time.sleep(0.1)
    return block


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def stepping_on(ctx, x, folder, kill, where="in a step"):
    """Notes its steps, and kills workers once: those of some ranks, or two, in a step."""
    ranks, at = kill
    earlier = any(folder.glob("* was killed"))  # all look before anyone gets as far as `at`
    if ranks == "two workers":
        workers = ctx.allgather(os.getpid())
        ranks = [*{pid: rank for rank, pid in enumerate(workers)}.values()][:2]
    s = ctx.state(x=x)
    for step in ctx.steps(20, s, every=5):
        note(folder / f"{ctx.rank}.log", step)
        s.x = s.x + ctx.allreduce(s.x.sum()) / (step + 1e6)
        if step == at and ctx.rank in ranks and not earlier:
            (folder / f"{ctx.rank} was killed").touch()
            wait_until(lambda: all((folder / f"{r} was killed").exists() for r in ranks))
            if where == "in a step":
                die()
            ctx.device.copy_to_host = die  # in a checkpoint, as soon as it copies the state
    return s.x


def note(path, step):
    with open(path, "a") as file:
        file.write(f"{step}\n")


def attempts(folder):
    """The steps that each rank made, by attempt."""
    logs = []
    for path in sorted(folder.glob("*.log")):
        steps = [*map(int, path.read_text().split())]
        starts = [i for i, step in enumerate(steps) if not i or step != steps[i - 1] + 1]
        logs.append([steps[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)])
    return logs


@pytest.mark.parametrize(
    ("kill", "where", "resumed"),
    [
        (([1], 17), "in a step", 15),
        (([0], 2), "in a step", 0),  # there is no state yet
        (([2], 14), "in a checkpoint", 10),  # when only some states exist
        (("two workers", 17), "in a step", 0),  # with both states of one rank
    ],
)
def test_ranks_go_on_from_the_last_checkpoint(client, tmp_path, kill, where, resumed):
    three_workers(client)
    x = da.from_array(X, chunks=(2, 12)) + 0.5
    truth = X + 0.5
    for step in range(20):
        # In the order in which the ranks add.
        truth = truth + sum(truth[i : i + 2].sum() for i in range(0, 8, 2)) / (step + 1e6)
    y = spmd(stepping_on, x, folder=tmp_path, kill=kill, where=where, ranks=4)
    future = client.compute(y)
    assert np.array_equal(result_of(client, future), truth), "the same bits"
    for of_rank in attempts(tmp_path):
        assert of_rank[-1] == [*range(resumed, 20)]
        assert len(of_rank) > 1
    del future
    nothing_is_left(client)


def dying_often(ctx, x, folder):
    """One rank kills its worker five times, and each time all get further."""
    s = ctx.state(x=x)
    for step in ctx.steps(20, s, every=1):
        s.x += ctx.allreduce(1.0)
        if ctx.rank == 1 and step in (3, 6, 9, 12, 15):
            die_once(folder / str(step))
    return s.x


@pytest.mark.slow
def test_dask_does_not_count_deaths_before_the_last_progress(client, tmp_path):
    three_workers(client)
    y = spmd(dying_often, da.zeros(12, chunks=4), ranks=3, folder=tmp_path)
    assert np.array_equal(result_of(client, client.compute(y)), np.full(12, 60.0))
    assert len([*tmp_path.iterdir()]) == 5
    nothing_is_left(client)


def test_a_rank_killed_in_a_visit_resumes(client, tmp_path):
    def step(u, out, folder, die_at):
        note(folder / "calls", 1)
        if len((folder / "calls").read_bytes()) // 2 >= die_at:
            die_once(folder / "killed")
        out[...] = (u[:-2] + 2 * u[1:-1] + u[2:]) / 4

    x, calls = da.from_array(X, chunks=(2, 12)), []
    options = {"ranks": 3, "checkpoint_every": 4, "on_gpu": "stream", "steps_per_visit": 3}
    results = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        die_at = 0.8 * calls[0] if calls else np.inf
        y = iterate(step, x, {0: 1}, 16, folder=folder, die_at=die_at, **options)
        results.append(result_of(client, client.compute(y)))
        calls.append(len((folder / "calls").read_bytes()) // 2)
        del y
    assert np.array_equal(*results), "the same bits"
    assert (tmp_path / "killed/killed").exists()
    assert calls[1] < 1.7 * calls[0], "it resumes from a checkpoint"
    nothing_is_left(client)


def counting_steps(folder, array_bytes):
    """Return a function that counts its steps in an array of its own."""
    count = np.zeros(array_bytes // 8)

    def step(u, at):
        count[0] += 1
        if at.rank == 1 and at.step == 10:
            die_once(folder / "killed")
        return (u[:-2] + u[2:]) / 2 + count[0]

    return step


@pytest.mark.filterwarnings("ignore:Sending large graph")
@pytest.mark.parametrize("array_bytes", [8, pytest.param(2**26 + 8, marks=pytest.mark.slow)])
def test_functions_that_keep_values_start_again(client, tmp_path, array_bytes):
    """A checkpoint would not have the values."""
    x = da.from_array(X, chunks=(2, 12))
    y = iterate(counting_steps(tmp_path, array_bytes), x, {0: 1}, 16, ranks=3, checkpoint_every=4)
    truth = X
    for number in range(1, 17):
        truth = (np.roll(truth, 1, 0) + np.roll(truth, -1, 0)) / 2 + number
    assert np.array_equal(result_of(client, client.compute(y)), truth)
    assert (tmp_path / "killed").exists()
    del y
    nothing_is_left(client)
