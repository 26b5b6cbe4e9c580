"""The commands of a resident gang in any order of events: calls, requests, answers, losses.

The model has ranks that do commands one after the other, each at its own time. A loss ends the
attempt of all ranks. The next attempt begins with the newest checkpoint that all ranks have.
"""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident.commands import CALL, DROP, FETCH, KEEP, CommandLog, CommandQueue
from tests.support import tune

SIZE, MOST = 3, 12
ranks = st.integers(0, SIZE - 1)
whiches = st.integers(0, 30)


class Rank:
    """A rank of one attempt: its handles, the commands that it has received, and its answers."""

    def __init__(self, handles):
        self.handles, self.commands, self.messages = dict(handles), [], []

    def work(self, saved):
        """Do one command; `saved` has the rank's checkpoints by number."""
        number, kind, *arguments = self.commands.pop(0)
        if kind == CALL:
            read, first = arguments
            self.handles[first] = (first, *(self.handles[handle] for handle in read))
            self.messages.append(("done", number, None))
        elif kind == DROP:
            for handle in arguments[0]:
                del self.handles[handle]
        elif kind == FETCH:
            self.messages.append(("answer", number, self.handles[arguments[0]]))
        elif kind == KEEP:
            saved[number] = dict(self.handles)
            self.messages.append(("answer", number, None))


class Residents(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.log = CommandLog(SIZE, MOST)
        self.saved = [{} for _ in range(SIZE)]
        self.values = {-1: "argument"}  # of the handles that the user has
        self.numbers = itertools.count()  # of handles
        self.pending = {}  # handle and value by unanswered request
        self.checkpoint = None  # the number of the one under way
        self.begin(0)

    def begin(self, resume):
        handles = [saved_states.get(resume, {}) for saved_states in self.saved]
        self.ranks = [Rank({-1: "argument", **saved_state}) for saved_state in handles]

    def pick(self, choice):
        return sorted(self.values)[choice % len(self.values)]

    @rule(first=whiches, second=whiches)
    def the_user_calls(self, first, second):
        read = [self.pick(first), self.pick(second)]
        call_number = next(self.numbers)
        self.values[call_number] = (call_number, *(self.values[handle] for handle in read))
        self.log.add(CALL, read, call_number)
        assert self.log.calls_ahead

    @rule(choice=whiches)
    def the_user_drops_a_handle(self, choice):
        handle = self.pick(choice)
        if handle >= 0 and handle not in {handle for handle, _ in self.pending.values()}:
            del self.values[handle]
            self.log.add(DROP, [handle])

    @rule(choice=whiches)
    def the_user_fetches(self, choice):
        handle = self.pick(choice)
        self.pending[self.log.add(FETCH, handle)] = handle, self.values[handle]

    @rule()
    def a_checkpoint_is_due(self):
        if not self.log.is_keeping:
            self.checkpoint = self.log.add(KEEP)

    @rule()
    def commands_are_sent(self):
        commands = self.log.take_unsent()
        for rank in self.ranks:
            rank.commands += commands

    @rule(rank=ranks, count=st.integers(1, 9))
    def a_rank_works(self, rank, count):
        for _ in range(count):
            if self.ranks[rank].commands:
                self.ranks[rank].work(self.saved[rank])

    @rule()
    def all_ranks_work(self):
        self.commands_are_sent()
        for rank in range(SIZE):
            self.a_rank_works(rank, 1_000)

    @rule(rank=ranks)
    def messages_arrive(self, rank):
        for kind, number, reply in self.ranks[rank].messages:
            if kind == "done":
                if rank == 0:
                    self.log.record_done(number)
                continue
            replies = self.log.record_answer(rank, number, reply)
            if replies is not None and number in self.pending:
                _, value = self.pending.pop(number)
                assert replies == dict.fromkeys(range(SIZE), value)
            elif replies is not None:
                self.checkpoint = None
        self.ranks[rank].messages = []

    @rule()
    def a_rank_is_lost(self):
        """Its checkpoints are not: its replica rank has them."""
        complete_states = set.intersection(*(set(states) for states in self.saved))
        resume = max(complete_states, default=0)
        self.saved = [{resume: states[resume]} if resume else {} for states in self.saved]
        self.begin(resume)
        self.log.restart(resume)
        if resume == self.checkpoint:  # complete before its last answer
            self.checkpoint = None

    @rule()
    def all_checkpoints_are_lost(self):
        if self.log._forgotten:
            with pytest.raises(SectionError, match="handles are lost"):
                self.log.restart(0)
            return
        self.saved = [{} for _ in range(SIZE)]
        self.begin(0)
        self.log.restart(0)

    @invariant()
    def one_checkpoint_is_under_way(self):
        assert self.log.is_keeping == (self.checkpoint is not None)

    @invariant()
    def the_log_is_bounded(self):
        """Commands from before a checkpoint are few, or are requests without an answer."""
        old = {number for number in self.log._commands if number <= self.log.last_checkpoint}
        assert len(old) <= MOST or old <= set(self.pending)

    def teardown(self):
        for _ in range(3):
            self.commands_are_sent()
            for rank in range(SIZE):
                self.a_rank_works(rank, 10_000)
                self.messages_arrive(rank)
        assert self.pending == {}
        assert self.log.calls_ahead == 0
        assert not self.log.is_keeping
        for last_rank in self.ranks:
            assert last_rank.handles == self.values


TestResidents = Residents.TestCase
TestResidents.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_answers_of_an_attempt_that_has_ended_do_not_count():
    """Otherwise a checkpoint would seem complete that a rank of this attempt has not saved."""
    log = CommandLog(2, MOST)
    number = log.add(KEEP)
    log.record_answer(0, number, None)
    log.restart(0)
    assert log.record_answer(1, number, None) is None


# --- the commands of a client, on their way to a rank's thread


def test_a_client_that_does_not_reach_the_worker(monkeypatch):
    tune(monkeypatch, client_wait_s=0)
    with pytest.raises(SectionError, match="Run the client where it reaches the workers"):
        CommandQueue(lambda: False, None, 60.0).get()
