"""The coordinator in any order of events: joins, leaves, deaths, cancels, lost outputs.

The model is Dask's scheduler in the view of the coordinator's adapter. Each rank's task is absent,
in process on a worker, in memory there, or erred. The model reports each change to the coordinator,
and releases outputs that no longer count.
"""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dask_p2p.plugins.gangs.coordinator import Coordinator, Order

WORKERS = ("a", "b", "c")
SIZES = {"resident": 2, "x": 1, "y": 2, "z": 3}
MOST = 4
gangs = st.sampled_from(sorted(SIZES))
whiches = st.integers(0, 5)  # index among the ranks, modulo their number
workers = st.sampled_from(WORKERS)


class Task:
    """A rank's task on the scheduler, and its thread on a worker."""

    def __init__(self):
        self.state, self.worker, self.token = "waiting", None, None
        self.attempt = 0  # of the attempt that made the output


class Gangs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.coordinator = Coordinator(MOST)
        self.tokens = itertools.count()
        self.commits = {}  # attempts whose outputs were used, by gang, since the last loss
        self.tasks = {}
        for gang in SIZES:
            self.submit(gang)

    def submit(self, gang):
        self.tasks |= {(gang, rank): Task() for rank in range(SIZES[gang])}
        self.commits[gang] = set()

    def tasks_of(self, gang):
        return [self.tasks[gang, rank] for rank in range(SIZES[gang])]

    def order(self, gang, rank):
        return self.coordinator.order(gang, rank, self.tasks[gang, rank].token)

    # --- transitions of tasks

    def release(self, gang, rank, cause):
        task = self.tasks[gang, rank]
        was, task.state, task.token = task.state, "waiting", None
        if was == "processing":
            self.coordinator.drop(gang, rank, cause)

    def err(self, gang, rank):
        """Dask releases the siblings: all their dependents have failed as well."""
        self.release(gang, rank, "erred")
        self.tasks[gang, rank].state = "erred"
        for peer_rank in range(SIZES[gang]):
            if self.tasks[gang, peer_rank].state == "processing":
                self.release(gang, peer_rank, "a sibling failed")

    def run_again(self, gang, lost_ranks):
        self.commits[gang].clear()
        for rank in lost_ranks:
            if self.tasks[gang, rank].state == "memory":
                self.release(gang, rank, "does not count")

    def start(self, gang, rank, worker):
        task = self.tasks[gang, rank]
        if task.state != "waiting" or any(
            sibling.state == "erred" for sibling in self.tasks_of(gang)
        ):
            return
        task.state, task.worker, task.token = "processing", worker, str(next(self.tokens))
        self.run_again(gang, self.join(gang, rank))

    def join(self, gang, rank):
        task = self.tasks[gang, rank]
        where = {"worker": task.worker, "is_resident": gang == "resident"}
        return self.coordinator.join(gang, SIZES[gang], rank, task.token, **where)

    def follow(self, gang, rank):
        """Follow the order of a rank, as its thread does; return whether its attempt has ended."""
        task = self.tasks[gang, rank]
        if task.state != "processing":
            return False
        order = self.order(gang, rank)
        if order.state == "committed":
            task.state, task.attempt = "memory", order.attempt
            if not self.coordinator.is_committed(gang):
                self.release(gang, rank, "does not count")
            else:
                self.commits[gang].add(order.attempt)
        elif order.state == "stopped" and (order.error or order.reason):
            self.err(gang, rank)
        elif order.state == "stopped":
            self.release(gang, rank, "rescheduled")
        return order.state in ("committed", "stopped")

    # --- events

    def pick(self, position, *states):
        """Return one of the ranks whose tasks are in these states, in a list; empty if none is."""
        candidates = [key for key, task in self.tasks.items() if task.state in states]
        return [candidates[position % len(candidates)]] if candidates else []

    @rule(position=whiches, worker=workers)
    def a_task_starts(self, position, worker):
        for gang, rank in self.pick(position, "waiting"):
            self.start(gang, rank, worker)

    @rule(position=whiches)
    def a_request_is_repeated(self, position):
        for gang, rank in self.pick(position, "processing"):
            before = self.order(gang, rank)
            assert self.join(gang, rank) == []
            assert self.order(gang, rank) == before

    @rule(position=whiches)
    def a_rank_follows(self, position):
        for gang, rank in self.pick(position, "processing"):
            self.follow(gang, rank)

    @rule(position=whiches, how=st.sampled_from(["", "loses a peer", "raises"]))
    def a_function_ends(self, position, how):
        """It may end after its attempt: this changes nothing."""
        for gang, rank in self.pick(position, "processing"):
            before = self.order(gang, rank)
            if before.state != "waiting":
                error = b"error" if how == "raises" else None
                self.coordinator.leave(gang, rank, self.tasks[gang, rank].token, how, error)
                assert before.state == "running" or self.order(gang, rank) == before

    @rule(position=whiches, error=st.none() | st.just(b"error"))
    def an_old_attempt_leaves(self, position, error):
        for gang, rank in self.pick(position, "waiting", "processing", "memory", "erred"):
            before = self.order(gang, rank)
            self.coordinator.leave(gang, rank, "old", "it was stopped long ago", error)
            assert self.coordinator.order(gang, rank, "old") == Order("stopped")
            assert self.order(gang, rank) == before

    @rule(worker=workers)
    def a_worker_dies(self, worker):
        for (gang, rank), task in self.tasks.items():
            if task.worker == worker and task.state in ("processing", "memory"):
                self.release(gang, rank, "lost")

    @rule(position=whiches)
    def a_task_is_taken_back(self, position):
        for gang, rank in self.pick(position, "processing", "memory"):
            self.release(gang, rank, "moved")

    @rule(position=whiches)
    def an_input_fails(self, position):
        for gang, rank in self.pick(position, "waiting"):
            self.err(gang, rank)

    @rule(gang=gangs)
    def the_user_cancels(self, gang):
        for rank in range(SIZES[gang]):
            self.release(gang, rank, "cancelled")
        self.coordinator.forget(gang)
        self.submit(gang)

    # --- invariants

    @invariant()
    def attempts_are_whole_and_alone(self):
        busy = {}
        for gang in SIZES:
            orders = [self.order(gang, rank) for rank in range(SIZES[gang])]
            taking_part = [order for order in orders if order.state == "running"]
            assert len(taking_part) in (0, SIZES[gang]), "some ranks run, others do not"
            if gang == "resident":
                waiting = [order for order in orders if order.state == "waiting"]
                assert len(waiting) < SIZES[gang], "a resident gang waits for another one"
            elif taking_part:
                for worker in {task.worker for task in self.tasks_of(gang)}:
                    assert busy.setdefault(worker, gang) == gang, "two gangs on a worker"

    @invariant()
    def one_attempt_commits(self):
        for gang, attempts in self.commits.items():
            assert len(attempts) <= 1
            if attempts:
                assert all(
                    t.attempt in attempts for t in self.tasks_of(gang) if t.state == "memory"
                )

    @invariant()
    def nothing_is_kept(self):
        known_gangs = {gang for gang in SIZES if self.coordinator.size(gang) is not None}
        gangs, queue = self.coordinator_state()
        assert set(gangs) == known_gangs
        assert set(queue) <= known_gangs
        for gang in known_gangs:
            assert set(gangs[gang].ranks) <= set(range(SIZES[gang]))

    def coordinator_state(self):
        """Gangs by name, and the names of those that wait for workers."""
        return self.coordinator._gangs, self.coordinator._queue

    def teardown(self):
        """Without further failures everything ends, and nothing is left."""
        for _ in range(100):
            moved = False
            for gang, size in SIZES.items():
                for rank in range(size):
                    moved |= self.follow(gang, rank)
                    task = self.tasks[gang, rank]
                    # Dask runs a task again while an output is missing, unless one has failed.
                    failed = any(t.state == "erred" for t in self.tasks_of(gang))
                    if task.state == "waiting" and not failed:
                        self.start(gang, rank, WORKERS[rank])
                        moved = True
                    if task.state == "processing" and self.order(gang, rank).state == "running":
                        self.coordinator.leave(gang, rank, task.token)
                        moved = True
            if not moved:
                break
        for gang in SIZES:
            states = [task.state for task in self.tasks_of(gang)]
            assert "processing" not in states, "a rank waits for ever"
            assert "erred" in states or set(states) == {"memory"}
            self.coordinator.forget(gang)
        assert self.coordinator_state() == ({}, [])


TestGangs = Gangs.TestCase
TestGangs.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def joined(coordinator, gang, *on, size=None, **options):
    for rank, worker in enumerate(on):
        token = f"{gang}{rank}"
        coordinator.join(gang, size or len(on), rank, token, worker, f"of {token}", **options)


def states(coordinator, gang):
    size = coordinator.size(gang)
    return [coordinator.order(gang, rank, f"{gang}{rank}").state for rank in range(size)]


def test_a_gang_that_waits_is_not_overtaken():
    coordinator = Coordinator(MOST)
    joined(coordinator, "first", "a")
    joined(coordinator, "wide", "a", "b")
    joined(coordinator, "narrow", "b")
    joined(coordinator, "elsewhere", "c")
    assert states(coordinator, "wide") == ["waiting"] * 2
    assert states(coordinator, "narrow") == ["waiting"], "b is free, but reserved"
    assert states(coordinator, "elsewhere") == ["running"]
    coordinator.leave("first", 0, "first0")
    assert states(coordinator, "wide") == ["running"] * 2
    for rank in range(2):
        coordinator.leave("wide", rank, f"wide{rank}")
    assert states(coordinator, "narrow") == ["running"]


def test_a_resident_gang_shares_its_workers():
    coordinator = Coordinator(MOST)
    joined(coordinator, "resident", "a", "b", is_resident=True)
    joined(coordinator, "x", "a", "b")
    joined(coordinator, "other", "a", "b", is_resident=True)
    joined(coordinator, "y", "a", "b")
    assert states(coordinator, "resident") == states(coordinator, "x") == ["running"] * 2
    assert states(coordinator, "other") == ["running"] * 2
    assert states(coordinator, "y") == ["waiting"] * 2
    assert coordinator.wait("y").gangs == ["x"]


def test_a_failure_ends_the_attempt_for_all():
    coordinator = Coordinator(MOST)
    joined(coordinator, "x", "a", "b")
    coordinator.leave("x", 0, "x0")
    coordinator.leave("x", 1, "x1", "it raised", b"error")
    for rank in range(2):
        assert coordinator.order("x", rank, f"x{rank}") == Order("stopped", 1, error=b"error")


def test_a_lost_output_brings_all_again():
    coordinator = Coordinator(MOST)
    joined(coordinator, "x", "a", "b", "c")
    for rank in range(3):
        coordinator.leave("x", rank, f"x{rank}")
    assert coordinator.is_committed("x")
    assert coordinator.join("x", 3, 1, "again", "b") == [0, 2]
    assert not coordinator.is_committed("x")


def test_attempts_are_bounded():
    coordinator = Coordinator(2)
    for attempt in range(2):
        coordinator.join("x", 1, 0, f"{attempt}", "a")
        assert coordinator.order("x", 0, f"{attempt}").attempt == attempt + 1
        coordinator.leave("x", 0, f"{attempt}", "a connection broke")
    order = coordinator.order("x", 0, "1")
    assert order.state == "stopped"
    assert order.reason == "2 attempts ended early, the last one because a connection broke"


def test_a_rank_that_comes_again_ends_the_attempt():
    """Although the scheduler reports before that it took the task back."""
    coordinator = Coordinator(MOST)
    joined(coordinator, "x", "a", "b")
    coordinator.join("x", 2, 0, "again", "c")
    assert states(coordinator, "x") == ["stopped", "stopped"]
    assert coordinator.order("x", 0, "again").state == "waiting"


def resumed(coordinator, states, attempt):
    """Return the step at which a gang of three begins, with these states on its workers."""
    for rank, (worker, saved) in enumerate(zip("abc", states, strict=True)):
        coordinator.join("x", 3, rank, f"{attempt}{rank}", worker, "", saved)
    order = coordinator.order("x", 0, f"{attempt}0")
    coordinator.leave("x", 0, f"{attempt}0", "a connection broke")
    return order.resume, order.holders


def test_an_attempt_begins_at_the_newest_step_whose_states_are_all_there():
    coordinator = Coordinator(MOST)
    assert resumed(coordinator, [{}, {}, {}], 1) == (None, ())
    steps_by_rank = [{0: [5, 10], 2: [5]}, {1: [5, 10], 0: [5, 10]}, {2: [5], 1: [5, 10]}]
    assert resumed(coordinator, steps_by_rank, 2) == (5, (0, 1, 2))
    moved = [{}, {1: [10], 0: [5, 10]}, {2: [5, 10], 1: [5]}]
    assert resumed(coordinator, moved, 3) == (10, (1, 1, 2))
    assert resumed(coordinator, [{0: [10]}, {}, {1: [10]}], 4) == (None, ())
