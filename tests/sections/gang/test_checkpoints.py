from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest

from dask_p2p.errors import TransferError
from dask_p2p.sections.gang import checkpoints as module
from dask_p2p.sections.gang.checkpoints import Checkpoints, Period, SavedStates, States, host_arrays
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.transports.buffers import Segment
from tests.clock import Clock
from tests.sections.wire.support import Gang
from tests.support import BOUND_S, noted


def test_a_checkpoint_has_room_of_two_generations_and_keeps_the_whole_one(monkeypatch):
    """One rank has a state of step 7: its attempt ended before the others had theirs.

    Another attempt goes on at 3, and comes to step 5. If that ended in the middle, and 3 was gone,
    all would begin at the start.
    """
    memories = [SavedStates() for _ in range(2)]
    for step, holders in ((2, memories), (3, memories), (7, memories[1:])):
        for saved in holders:
            saved.add(saved.open("x"), 1, step, [memoryview(b"%d" % step)])

    def steps_of(saved, to, *state):
        return {step for states in to.values() for step in states}

    seen = noted(monkeypatch, SavedStates, "add", steps_of)

    def save(rank, connections):
        states = States(memories[rank], "x", 3, (0, 1), lambda: None)
        checkpoints = Checkpoints(rank, ["a", "b"], connections, states)
        checkpoints.save(5, [np.zeros(1)])
        checkpoints.save(6, [np.zeros(1)])

    with Gang(2) as gang:
        gang.run(save)
    assert [steps - {5, 6} for steps in seen[:4]] == [{3}] * 4
    assert all(len(steps - {6}) < 2 for steps in seen[4:]), (
        "with the one that is made there are two"
    )
    assert [set(dict(saved.steps("x"))[1]) for saved in memories] == [{5, 6}] * 2


def test_a_state_that_is_lost_meanwhile_ends_the_attempt():
    def restore(rank, connections):
        states = States(SavedStates(), "x", 10, (0, 1, 2), lambda: None)
        Checkpoints(rank, "abc", connections, states).read_state()

    with Gang(3) as gang:
        for future in gang.begin(restore):
            assert isinstance(future.exception(BOUND_S), AttemptEndedError)


def test_no_state_goes_before_a_newer_one_is_whole():
    """One rank lags behind: the others keep the states that it has, too."""
    memories = [SavedStates() for _ in range(5)]

    def save(rank, connections):
        states = States(memories[rank], "x", None, (), lambda: None)
        checkpoints = Checkpoints(rank, "abcde", connections, states)
        for step in (5,) if rank == 4 else (5, 10, 15, 20):
            checkpoints.save(step, [np.zeros(3)])

    with Gang(5) as gang:
        futures = gang.begin(save)
        futures[4].result(BOUND_S)
        assert not wait(futures[:4], 0.3).done
    assert all(5 in dict(saved.steps("x"))[rank] for rank, saved in enumerate(memories))


@pytest.mark.parametrize("step_s", [0.001, 0.3, 4.0, 50.0])
def test_checkpoints_are_due_after_some_time(monkeypatch, step_s):
    """Not much later than asked for; and time is seldom compared."""
    clock = Clock(0.0)
    monkeypatch.setattr(module, "time", clock)
    looks = []
    period, due_s = Period("30 s"), []
    for step in range(1, 1 + int(200 / step_s)):
        clock.now_s += step_s
        if period.is_due(step, lambda value: looks.append(1) or value):
            due_s.append(clock.now_s)
    assert all(30 <= b - a <= 30 + 2 * step_s for a, b in zip([0.0, *due_s], due_s, strict=False))
    assert len(due_s) >= 200 // (30 + 2 * step_s)
    assert len(looks) <= 30


def arrays(start=0.0):
    """Arrays whose sizes would leave the next array unaligned."""
    return [
        np.arange(3, dtype="u1") + np.uint8(start),
        (np.arange(12.0) + start).reshape(3, 4)[:, ::2],
        np.full((), start, "c16"),
        np.zeros((0, 3)),
    ]


def refused(*_):
    raise TransferError("they run on different hosts", scope="region")


def none_left(_):
    raise OSError(12, "no memory")


@pytest.mark.parametrize(
    ("method", "instead"), [(None, None), ("open", refused), ("make", none_left)]
)
def test_states_come_back(method, instead, monkeypatch):
    """The second of three workers is lost. Its rank runs again on the first worker."""
    if method is not None:  # a worker that does not see the memory gets the bytes
        monkeypatch.setattr(Segment, method, instead)
    memories, notified, addresses = [SavedStates() for _ in range(3)], [], [set() for _ in range(3)]

    def save(rank, connections):
        def notify():
            assert memories[rank].gangs == ["x"], "or they might be dropped before they are there"
            notified.append(rank)

        states = States(memories[rank], "x", None, (), notify)
        checkpoints = Checkpoints(rank, "abc", connections, states)
        assert checkpoints.read_state() == (0, None)
        for step in range(1, 9):
            checkpoints.save(step, arrays(step + rank))
            addresses[rank].add(memories[rank].get("x", rank, step).obj.ctypes.data)
        checkpoints.save(9, [])
        checkpoints.save(10, [np.zeros(rank)])
        checkpoints.save(11, arrays(11 + rank))
        checkpoints.close()

    with Gang(3) as gang:
        gang.run(save)
    assert sorted(notified) == [0, 1, 2], "once each"
    assert all(len(of_rank) == 2 for of_rank in addresses), "memory is used again"
    assert [dict(saved.steps("x")) for saved in memories] == [
        {rank: [10, 11] for rank in ranks} for ranks in ((0, 2), (1, 0), (2, 1))
    ]
    memories[1] = memories[0]  # its own states are gone

    def restore(rank, connections):
        states = States(memories[rank], "x", 11, (0, 2, 2), lambda: None)
        checkpoints = Checkpoints(rank, "aac", connections, states)
        step, state = checkpoints.read_state()
        assert step == 11
        assert checkpoints.read_state() == (0, None), "once"
        specs = [(array.dtype, array.shape) for array in arrays()]
        for array, expected in zip(host_arrays(state, specs), arrays(11 + rank), strict=True):
            assert np.array_equal(array, expected)

    with Gang(3) as gang:
        gang.run(restore)
