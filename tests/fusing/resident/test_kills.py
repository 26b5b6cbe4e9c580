"""Workers that are killed between the calls of a resident gang, and during one."""

import signal

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.errors import SectionError
from tests.fusing.programs import array, same_bits
from tests.fusing.resident.test_client import no_rank_is_left, repeated
from tests.fusing.support import smoothed
from tests.fusing.test_fused import killed_once
from tests.support import tune

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def kill(client, *victims):
    client.run(signal.raise_signal, signal.SIGKILL, workers=list(victims), on_error="ignore")


@pytest.fixture(autouse=True)
def _two_workers(client):
    client.wait_for_workers(2)


# After the first kill one worker may have all ranks, and so all states.
@pytest.mark.slow
@pytest.mark.parametrize(("keep", "kills"), [(20, (60,)), (10_000, (30, 60))])
def test_a_worker_is_killed_between_two_calls(client, monkeypatch, keep, kills):
    tune(monkeypatch, kept_commands=keep)
    x = client.persist(array())
    wait(x)
    with dask_p2p.compile(lambda u: (smoothed(u), u.sum()), x).resident(x) as run:
        u = x
        for k in range(90):
            u, total = run(u)
            if k == 0 or k in kills:
                run.fetch(total)  # the ranks have begun
            if k in kills:
                assert keep != 20 or run._streams.log.last_checkpoint > 0
                kill(client, run._streams.ranks[0][0])
                run.fetch(u)
        fetched, again = run.fetch(u), run.fetch(total)
        assert run._streams.attempt > len(kills)
        field = run.array(u)
    expected = smoothed(array(), 89)
    assert same_bits(fetched, smoothed(expected).compute())
    assert same_bits(again, expected.sum().compute())
    assert same_bits(field.compute(), fetched)
    del field, x, u, total
    no_rank_is_left(client)


def test_a_worker_is_killed_during_a_call(client, monkeypatch, tmp_path):
    tune(monkeypatch, kept_s=float("inf"))  # no checkpoint before a loss
    x = client.persist(array())
    wait(x)

    def function(u, v):
        u = smoothed(u)
        # Only the second argument of one call has a path that does not exist.
        return smoothed(u.map_blocks(killed_if, v, path=tmp_path / "killed", meta=u._meta)), v

    flags = da.zeros(x.shape, chunks=x.chunks)
    with dask_p2p.compile(function, x, flags).resident(x, flags) as run:
        u, _ = run(x, flags)
        earlier = u
        for k in range(8):
            u, _ = run(u, flags)
            if k == 4:
                u, _ = run(u, u)  # its numbers are not zero
        fetched, first = run.fetch(u), run.fetch(earlier)
        streams = run._streams  # as if the ranks were on two workers again
        streams.ranks = [(str(rank), *rest) for rank, (_, *rest) in enumerate(streams.ranks)]
        run.fetch(run(u, flags)[1])
        assert streams.log.last_checkpoint, "one is due soon after a loss"
    assert (tmp_path / "killed").exists()
    assert same_bits(first, smoothed(array(), 2).compute())
    assert same_bits(fetched, smoothed(array(), 20).compute())
    del x, u, earlier
    no_rank_is_left(client)


def killed_if(block, flags, path):
    return killed_once(block, path) if flags.any() else block


@pytest.mark.slow
@pytest.mark.parametrize("keep", [5, 10_000])
def test_all_workers_are_killed(client, monkeypatch, keep):
    """All calls are repeated, since no checkpoint is left."""
    tune(monkeypatch, kept_commands=keep)
    x = array()
    with dask_p2p.compile(smoothed, x).resident(x) as run:
        u = run(x)
        run.fetch(u)  # the ranks have begun
        u = repeated(run, u, 20)
        run.fetch(u)
        assert (run._streams.log.last_checkpoint > 0) == (keep == 5)
        kill(client, *client.nthreads())
        assert same_bits(run.fetch(run(u)), smoothed(x, 22).compute())
    del u
    no_rank_is_left(client)


def test_handles_that_are_lost_with_their_checkpoints(client, monkeypatch):
    tune(monkeypatch, kept_commands=5, logged_commands=10)
    x = array()
    with dask_p2p.compile(smoothed, x).resident(x) as run:
        u = run(x)
        run.fetch(u)  # the ranks have begun
        u = repeated(run, u, 20)
        run.fetch(u)
        kill(client, *client.nthreads())
        with pytest.raises(SectionError, match="handles are lost"):
            run.fetch(run(u))
    with pytest.raises(SectionError, match="handles are lost"):
        run.fetch(u)
    assert np.isfinite(x.sum().compute())
    del u
    no_rank_is_left(client)
