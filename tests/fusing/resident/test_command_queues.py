"""The commands of a client, on their way to a rank's thread."""

from __future__ import annotations

import threading

import pytest

from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident import command_queues
from dask_p2p.fusing.resident.command_queues import CommandQueue
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.support import BOUND_S


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
    monkeypatch.setattr(command_queues, "_CLIENT_S", 0)
    with pytest.raises(SectionError, match="Run the client where it reaches the workers"):
        CommandQueue(lambda: False).get()


def test_one_stream_for_each_rank():
    queue = CommandQueue(lambda: False)
    assert queue.begin(object())
    assert not queue.begin(object())
    ended = CommandQueue(lambda: False)
    ended.close()
    assert not ended.begin(object())
