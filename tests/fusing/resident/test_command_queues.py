"""The commands of a client, on their way to a rank's thread."""

from __future__ import annotations

import threading

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident.commands import CommandQueue
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.support import BOUND_S, tune
from tests.transports.loopback import wait_until


def waiting(queue):
    """Return a thread that waits for a command, and the list that gets the command or its error."""
    found = []

    def get():
        try:
            found.append(queue.get())
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=get)
    thread.start()
    return thread, found


def test_commands_come_in_their_order():
    queue = CommandQueue(lambda: False)
    thread, found = waiting(queue)
    queue.put([(1, "call"), (2, "end")])
    thread.join(BOUND_S)
    assert [*found, queue.get()] == [(1, "call"), (2, "end")]


def test_commands_that_are_here_are_done_before_the_end():
    queue = CommandQueue(lambda: False)
    queue.put([(1, "end")])
    queue.close()
    assert queue.get() == (1, "end")
    with pytest.raises(AttemptEndedError):
        queue.get()


@pytest.mark.parametrize("by", ["the stream", "the attempt"])
def test_a_wait_ends_with_the_stream_and_with_the_attempt(by):
    ended = threading.Event()
    queue = CommandQueue(ended.is_set)
    thread, found = waiting(queue)
    queue.close() if by == "the stream" else ended.set()
    thread.join(BOUND_S)
    assert isinstance(found[0], AttemptEndedError)


def test_a_client_that_does_not_reach_the_worker(monkeypatch):
    tune(monkeypatch, client_wait_s=0)
    with pytest.raises(SectionError, match="Run the client where it reaches the workers"):
        CommandQueue(lambda: False).get()


def test_one_stream_for_each_rank():
    queue = CommandQueue(lambda: False)
    assert queue.begin(object())
    assert not queue.begin(object())
    ended = CommandQueue(lambda: False)
    ended.close()
    assert not ended.begin(object())


class Units:
    """Records the states of the units of a rank."""

    def __init__(self):
        self.states = []

    def lend_while_idle(self):
        self.states.append("lent")

    def take(self, wait):
        assert not wait()
        self.states.append("taken")


def test_an_idle_rank_lends_its_resources_until_the_next_command():
    units = Units()
    queue = CommandQueue(lambda: False, units, 0)
    thread, found = waiting(queue)
    wait_until(lambda: units.states)
    queue.put([(1, "call"), (2, "call")])
    thread.join(BOUND_S)
    assert found == [(1, "call")]
    assert units.states[0] == "lent"
    assert units.states[-1] == "taken"
    units.states.clear()
    assert queue.get() == (2, "call")
    assert units.states == ["taken"]


def test_a_rank_is_not_idle_at_once():
    units = Units()
    queue = CommandQueue(lambda: False, units, 3600)
    thread, _ = waiting(queue)
    queue.close()
    thread.join(BOUND_S)
    assert not units.states
