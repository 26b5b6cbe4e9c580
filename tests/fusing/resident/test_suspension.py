"""Resident gangs that end while they are idle, and go on at the next call."""

from __future__ import annotations

import time

import dask
import pytest
from distributed import get_worker

import dask_p2p
from dask_p2p.errors import SectionError
from tests.fusing.programs import array, same_bits
from tests.fusing.resident.test_client import heat, no_rank_is_left, queues_on, repeated
from tests.fusing.resident.test_idle import are_back
from tests.fusing.resident.test_kills import kill, workers_of
from tests.support import restart, tune
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "resources": {"GPU": 1}}


@pytest.fixture(autouse=True)
def ends_soon(client):
    workers_of(client)
    with dask.config.set({"p2p.sections.resident-end": "200 ms"}):
        yield


def stored_on(dask_worker):
    return sorted(key[1:] for key in dask_worker.data if "suspended" in str(key))


def stored(client):
    """Ranks and numbers of the copies of all states on workers."""
    return sorted(index for each in client.run(stored_on).values() for index in each)


def ends(client, *runs):
    """Wait until the ranks of some gangs have ended, and no task is left."""
    wait_until(lambda: all(run._streams._future is None for run in runs))
    wait_until(lambda: not any(client.run(queues_on).values()))
    wait_until(lambda: not any(client.processing().values()))


def test_a_gang_goes_on_after_its_end(client):
    x = array()
    with dask_p2p.compile(lambda u: (heat(u), u.sum()), x).resident(x) as run:
        u, first = run(x)
        for calls in range(1, 4):
            ends(client, run)
            # States of the end before may leave the workers later.
            wait_until(lambda: stored(client) == [(0, 0), (0, 1), (1, 0), (1, 1)])
            if calls == 1:
                assert same_bits(run.fetch(u), heat(x).compute())
            elif calls == 2:
                field = run.array(u)
                assert same_bits(field.compute(), repeated(heat, x, 2).compute())
            u, total = run(u)
        assert same_bits(run.fetch(u), repeated(heat, x, 4).compute())
        assert same_bits(run.fetch(total), repeated(heat, x, 3).sum().compute())
        assert same_bits(run.fetch(first), x.sum().compute())
        assert same_bits(run.fetch(run(x)[0]), heat(x).compute())
        ends(client, run)
    with pytest.raises(SectionError, match="has ended"):
        run.fetch(u)
    assert same_bits(field.compute(), repeated(heat, x, 2).compute())
    del field, u, total, first
    no_rank_is_left(client)
    wait_until(lambda: not any(client.run(stored_on).values()))


def with_units(block):
    assert get_worker().state.available_resources["GPU"] == 0
    return block


@pytest.mark.parametrize("ranks", [2, 1])
def test_resources_are_those_of_the_first_ranks(client, ranks):
    x = array()
    step = dask_p2p.compile(lambda u: heat(u.map_blocks(with_units, meta=u._meta)), x, ranks=ranks)
    with dask.annotate(resources={"GPU": 1}):
        gang = step.resident(x)
    with gang as run:
        u = run(x)
        ends(client, run)
        are_back(client, 1)
        with dask.annotate(resources={"GPU": 99}):  # of the user's other work
            u = run(u)
        assert same_bits(run.fetch(u), repeated(heat, x, 2).compute())
    del u
    no_rank_is_left(client)
    are_back(client, 1)


@pytest.mark.slow
def test_calls_while_a_gang_ends(client, monkeypatch):
    """At any time of the end: each pause has another length."""
    tune(monkeypatch, suspend_pause_s=1e-3)
    x = array()
    step = dask_p2p.compile(heat, x)
    with dask.config.set({"p2p.sections.resident-end": "1 ms"}), step.resident(x) as run:
        u = x
        for number in range(40):
            u = run(u)
            if number % 3 == 0:
                run.fetch(u)
            if number % 8 == 0:
                wait_until(lambda: run._streams._is_suspended)  # the ranks still run, or have ended
            time.sleep(number % 13 * 3e-3)
        assert same_bits(run.fetch(u), repeated(heat, x, 40).compute())
        assert run._streams.attempt > 1
    del u
    no_rank_is_left(client)
    wait_until(lambda: not any(client.run(stored_on).values()))


@pytest.mark.slow
@pytest.mark.parametrize("are_all", [False, True])
def test_workers_are_killed_after_the_end(client, are_all):
    """A copy of the handles is left, or the client repeats all calls."""
    x = array()
    with dask_p2p.compile(heat, x).resident(x) as run:
        u = repeated(run, x, 10)
        values = run.fetch(u)
        ends(client, run)
        victims = workers_of(client)
        kill(client, *(victims if are_all else victims[:1]))
        wait_until(lambda: not {*victims} <= {*workers_of(client)})
        assert same_bits(run.fetch(u), values)
        assert (run._streams.log.kept == 0) == are_all
        assert same_bits(run.fetch(run(u)), repeated(heat, x, 11).compute())
    del u
    no_rank_is_left(client)


def test_a_worker_is_killed_after_the_gang_has_gone_on(client):
    x = array()
    with dask_p2p.compile(heat, x).resident(x) as run:
        u = repeated(run, x, 10)
        ends(client, run)
        u = repeated(run, u, 10)
        run.fetch(u)
        kill(client, run._streams.ranks[0][0])
        assert same_bits(run.fetch(run(u)), repeated(heat, x, 21).compute())
    del u
    no_rank_is_left(client)


@pytest.mark.slow
def test_all_workers_retire_after_the_end(client):
    """Dask moves the handles, as all data."""
    before = workers_of(client)
    x = array()
    with dask_p2p.compile(heat, x).resident(x) as run:
        u = repeated(run, x, 10)
        values = run.fetch(u)
        ends(client, run)
        for worker in before:
            client.retire_workers([worker], close_workers=False, remove=False)
            restart(client, [worker])
        assert same_bits(run.fetch(u), values)
        assert run._streams.log.kept > 0
        assert same_bits(run.fetch(run(u)), repeated(heat, x, 11).compute())
    del u
    no_rank_is_left(client)
