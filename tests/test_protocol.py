"""The protocol of leases and references, in any order of events, on several workers.

Modelled is everything around the package: Dask's scheduler and workers, the network, the GPUs, and
when each thread goes on (`tests/simulation`). What runs is the package itself: tasks, assemblies,
links, `ipc` with its directory, `comm`, and the plugin. Whatever happens to them, in any order:

* nobody reads memory that was freed, or is another block's by now; nobody takes an entry of a block
  that was released or moved, of an earlier run, or of a dead process;
* no lease outlives its reader, and nothing is kept that nobody has a lease on;
* every task ends: with the right bits, or with an error that has a name, within its attempts.
"""

import gc
import tempfile
from dataclasses import replace

import numpy as np
import pytest
from distributed import Reschedule
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_p2p.config import options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.task import AssembleTask, Blocks, assemble_block
from dask_p2p.errors import P2PError, TransferError
from dask_p2p.plans import redistribution
from tests.simulation.actors import PLACES, GaveUpError, KilledError
from tests.simulation.gpu import CELLS
from tests.simulation.workers import World
from tests.usage import usage_of_worker

ADDRESSES = ("a", "b", "c")
KEYS = (("x", 0, 0), ("x", 1, 0))  # two blocks of 2 x 4
PLAN = redistribution(((2, 2), (4,)), (1, 0), ((2, 2), (4,)))
ATTEMPTS = 3
RETAIN_S = 2.0
OPTIONS = replace(
    options(), transports=("ipc", "comm"), attempts=ATTEMPTS, retain_blocks_s=RETAIN_S
)

numbers = st.integers(0, 5)  # of those that there are
keys = st.sampled_from(KEYS)
# When something happens: when a task, or what it waits for, halts somewhere for the n-th time.
moments = st.none() | st.tuples(numbers, st.sampled_from(PLACES), st.integers(1, 2))


def values(key, run):
    """What a block holds: each cell says which block it is of, in which run, and where."""
    return (run * 64 + key[1] * CELLS + np.arange(CELLS, dtype="u8")).reshape(2, 4)


class Running:
    """A task that runs: what it may return, as far as is known."""

    def __init__(self, actor, index, runs):
        self.actor, self.index = actor, index
        self.runs = runs  # by key: all that there were since it was started
        self.cancelled = False


class Protocol(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(self.folder.name, OPTIONS)
        self.tasks = []
        self.runs = {}  # the current one of each key that somebody holds
        self.run = 0
        self.rescheduled = []  # columns
        self.attempts = {}  # by worker and task: those that failed one after the other

    def worker(self, number):
        """One of those that live."""
        alive = sorted(self.world.alive)
        return self.world.alive[alive[number % len(alive)]]

    def reach(self, moment):
        """Bring a task on to some moment of its work."""
        if moment is not None:
            number, *place = moment
            if not self.tasks:
                self.send(self.worker(number), number % 2, set(), OPTIONS.transports)
            for task in self.task(number):
                self.bring_on(task, *place)
        self.settle()

    # --- blocks ---

    @initialize(columns=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def begin(self, columns):
        for address in ADDRESSES:
            self.world.join(address)
        for number, key in enumerate(KEYS):
            self.make(number, key)
        for number, column in enumerate(columns):
            self.send(self.worker(number), column, set(), OPTIONS.transports)

    @rule(number=numbers, key=keys, at=moments)
    def make(self, number, key, at=None):
        """Make a block: anew, if there was one."""
        self.reach(at)
        for worker in self.world.alive.values():
            worker.release(key)
        self.run += 1
        self.runs[key] = self.run
        self.worker(number).put(key, values(key, self.run))
        for task in self.tasks:
            task.runs[key].add(self.run)

    @rule(key=keys, number=numbers, moved=st.booleans(), at=moments)
    def copy(self, key, number, moved, at):
        self.reach(at)
        if key not in self.runs:
            return
        to = self.worker(number)
        if key not in to.data:
            to.put(key, values(key, self.runs[key]))
        for worker in self.holders(key) if moved else ():
            if worker is not to:
                worker.release(key)

    @rule(key=keys, number=numbers, at=moments)
    def release(self, key, number, at):
        self.reach(at)
        holders = self.holders(key)
        if holders:
            holders[number % len(holders)].release(key)
            self.look_who_holds()

    def holders(self, key):
        return [worker for worker in self.world.alive.values() if key in worker.data]

    def look_who_holds(self):
        self.runs = {key: run for key, run in self.runs.items() if self.holders(key)}

    # --- workers ---

    @precondition(lambda self: len(self.world.alive) > 1)
    @rule(number=numbers, at=moments)
    def kill(self, number, at):
        self.reach(at)
        self.worker(number).kill()
        self.look_who_holds()
        self.settle()

    @precondition(lambda self: len(self.world.alive) < len(ADDRESSES))
    @rule()
    def join(self):
        """A new worker, at the address and in the folder of one that was killed."""
        self.world.join(min(set(ADDRESSES) - set(self.world.alive)))

    @precondition(lambda self: any(worker.news for worker in self.world.alive.values()))
    @rule(number=numbers)
    def hear_of_the_dead(self, number):
        if self.worker(number).news:
            self.worker(number).hear()

    # --- tasks ---

    @precondition(lambda self: len(self.tasks) < 4)
    @rule(
        number=numbers,
        column=st.integers(0, 1),
        stale=st.sets(st.sampled_from(ADDRESSES)),
        transports=st.sampled_from([("ipc", "comm"), ("ipc", "comm"), ("comm",)]),
    )
    def start(self, number, column, stale, transports):
        """Send a worker a task. That others run it does not matter, nor that some hold nothing."""
        for key in [key for key in KEYS if key not in self.runs]:  # Dask would compute it first
            self.make(number + 1, key)
        if self.rescheduled:
            column = self.rescheduled.pop(0)
        self.send(self.worker(number), column, stale, transports)

    def send(self, worker, column, stale, transports):
        while worker.news:  # comes before what the scheduler sends after it
            worker.hear()
        index = (column, 0)
        if (worker, index) in [(task.actor.worker, task.index) for task in self.tasks]:
            return  # no worker runs a task twice at a time
        output = OutputSpec(("x",), np.dtype("u8"), "cupy", replace(OPTIONS, transports=transports))
        spec = AssembleTask(
            ("y", *index), assemble_block, ("y", *index), PLAN, index, output, Blocks(*KEYS)
        )
        who_has = {key: sorted({w.address for w in self.holders(key)} | stale) for key in KEYS}
        worker.compute(spec, who_has)
        if worker.started is not None:
            runs = {key: {self.runs[key]} if key in self.runs else set() for key in KEYS}
            self.tasks.append(Running(worker.started, index, runs))

    def task(self, number):
        """One of those that run, if there is any."""
        return self.tasks[number % len(self.tasks) :][:1] if self.tasks else []

    @precondition(lambda self: self.world.ready())
    @rule(number=numbers, steps=st.integers(1, 6))
    def go_on(self, number, steps):
        """Let a thread run to one of its next halts, or a message arrive."""
        ready = self.world.ready()
        one = ready[number % len(ready)]
        for _ in range(steps):
            if one.ready:
                one.go_on()
        self.settle()

    @precondition(lambda self: self.tasks)
    @rule(number=numbers, raises=st.booleans(), at=moments)
    def cancel(self, number, raises, at):
        """Cancel a task. Its thread goes on for a while, or gives up in the middle."""
        self.reach(at)
        for task in self.task(number):
            task.cancelled = True
            task.actor.trouble = GaveUpError() if raises else None

    @precondition(lambda self: self.tasks)
    @rule(number=numbers, at=moments)
    def break_off(self, number, at):
        """Have a transport fail a task, wherever that is."""
        self.reach(at)
        for task in self.task(number):
            task.actor.trouble = TransferError("broke off")

    @precondition(lambda self: self.world.messages)
    @rule(number=numbers)
    def duplicate(self, number):
        self.world.messages[number % len(self.world.messages)].serve()
        self.world.settle()

    @rule(seconds=st.sampled_from([0.2, 3.0, 40.0]), at=moments)
    def pass_time(self, seconds, at):
        self.reach(at)
        self.world.pass_time(seconds)
        self.settle()

    # --- what must hold ---

    def bring_on(self, task, place=None, count=1):
        """Let a task go on, or else what it waits for, until it ends, or one halts there again."""
        if task.actor.done:
            return
        for _ in range(1000):
            actors = [peer.actor for peer in self.tasks if peer is not task]
            ready = self.world.ready()
            helpful = [one for one in ready if one not in actors]
            for one in [task.actor] if task.actor in ready else helpful:
                if one.ready:
                    one.go_on()
                    count -= place is not None and one.place == place
                if task.actor.done or not count:
                    return
        raise AssertionError("it does not end")

    def run_to_the_end(self, task):
        self.bring_on(task)
        self.settle()

    def settle(self):
        """See how tasks have ended."""
        self.nobody_does_wrong()
        for task in [task for task in self.tasks if task.actor.done]:
            self.tasks.remove(task)
            self.check_end(task)

    def check_end(self, task):
        actor, error = task.actor, task.actor.error
        assert not actor.open_leases, "a lease outlives its reader"
        actor.leases.clear()
        if isinstance(error, KilledError):
            assert actor.worker.dead
            return
        failed = (actor.worker, task.index)
        if isinstance(error, Reschedule):
            self.attempts[failed] = self.attempts.get(failed, 0) + 1
            assert self.attempts[failed] < ATTEMPTS
            self.rescheduled.append(task.index[0])
            return
        if isinstance(error, GaveUpError):
            return
        if error is not None:
            assert isinstance(error, P2PError), repr(error)
            assert self.attempts[failed] == ATTEMPTS - 1
        elif not task.cancelled:
            self.check_result(task)
        self.attempts[failed] = 0

    def check_result(self, task):
        for key in KEYS:
            block = task.actor.result[:, 2 * key[1] : 2 * key[1] + 2].T
            columns = slice(2 * task.index[0], 2 * task.index[0] + 2)
            fits = [block == values(key, run)[:, columns] for run in task.runs[key]]
            # Messages are for a part each; a lease is for all of a block.
            assert fits, (key, block, task.runs)
            assert np.any(fits, axis=0).all(), (key, block, task.runs)

    def nobody_does_wrong(self):
        assert self.world.violations == []

    @invariant()
    def what_is_leased_is_kept_and_nothing_else(self):
        self.nobody_does_wrong()
        for task in self.tasks:
            for lease in task.actor.open_leases:
                if not lease.holder.dead:
                    directory = lease.holder.directory
                    assert lease.published in [*directory.published.values(), *directory.withdrawn]
        leases = [lease for task in self.tasks for lease in task.actor.open_leases]
        # A block that is published again has the same description, and so the same leases.
        blocks = [lease.published for lease in leases if lease.published]
        leased = [(published.entry, id(published.block)) for published in blocks]
        for worker in self.world.alive.values():
            worker.directory.expire(RETAIN_S)
            for published in worker.directory.withdrawn:
                assert (published.entry, id(published.block)) in leased

    def teardown(self):
        try:
            if not self.world.violations:
                self.end_well()
        finally:
            self.tasks.clear()
            self.world.close()
            self.folder.cleanup()

    def end_well(self):
        """Without further trouble all tasks end, and those that are started now end well."""
        for task in self.tasks:
            task.actor.trouble = None
        while self.tasks or self.rescheduled:
            if not self.tasks:  # and with all that ever were holders
                self.send(self.worker(0), self.rescheduled.pop(0), {*ADDRESSES}, OPTIONS.transports)
            for task in self.tasks[:1]:
                self.run_to_the_end(task)
        for key in KEYS:
            if key not in self.runs:
                self.make(0, key)
        for worker in self.world.alive.values():
            task = self.send(worker, 0, set(), OPTIONS.transports)
            if task is not None:
                self.run_to_the_end(task)
                error = task.actor.error
                assert error is None, f"{error!r}: {error.__cause__!r}"
                self.nobody_does_wrong()
        while ready := self.world.ready():
            ready[0].go_on()
        self.world.pass_time(10.0)
        self.world.pass_time(10.0)
        for worker in self.world.alive.values():
            usage = usage_of_worker(worker.plugin.context)
            assert {resource for resource, count in usage.items() if count} <= {"ipc.mapped"}, usage
        if any(worker.memory.used > len(worker.data) for worker in self.world.alive.values()):
            gc.collect()
        for worker in self.world.alive.values():
            assert worker.memory.used == len(worker.data), "memory is kept that nobody needs"


def test_blocks_of_other_workers_come_by_ipc():
    """Or the rules would look at no lease."""
    protocol = Protocol()
    try:
        protocol.begin(columns=[0, 1, 0])
        for task in [*protocol.tasks]:
            protocol.run_to_the_end(task)
        contexts = [worker.plugin.context for worker in protocol.world.alive.values()]
        records = [record for context in contexts for record in context.records]
        assert {stage.transport for record in records for stage in record.stages} == {"ipc"}
    finally:
        protocol.teardown()


TestProtocol = Protocol.TestCase
TestProtocol.pytestmark = [pytest.mark.timeout(600)]  # a failure is made smaller before it is told
TestProtocol.settings = settings(stateful_step_count=40)
