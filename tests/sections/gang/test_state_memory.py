from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import TransferError
from dask_p2p.sections.gang.checkpoints import (
    Checkpoints,
    SavedStates,
    StateMemory,
    States,
    copied_into,
    host_arrays,
    size_of,
)
from dask_p2p.transports.buffers import Segment
from tests.sections.wire.support import Gang


def arrays(start=0.0):
    """Arrays whose sizes would leave the next array unaligned."""
    return [
        np.arange(3, dtype="u1") + np.uint8(start),
        (np.arange(12.0) + start).reshape(3, 4)[:, ::2],
        np.full((), start, "c16"),
        np.zeros((0, 3)),
    ]


def in_state(state):
    return host_arrays(state, [(array.dtype, array.shape) for array in arrays()])


def test_a_state_is_the_bytes_of_its_arrays():
    given = arrays(7)
    state = memoryview(bytearray(size_of(given)))
    copied_into(state, given)
    for a, b in zip(given, in_state(state), strict=True):
        assert np.array_equal(a, b)


def test_a_buddy_sees_what_is_written():
    mine, buddys = StateMemory(), StateMemory()
    mine.record_reply(buddys.take(4, mine.make(100, has_replica=True)))
    assert mine.is_seen
    assert buddys.receive_buffers() == {4: b""}
    mine.own[7:9] = b"ab"
    assert buddys.theirs[4][7:9] == b"ab"
    del mine
    assert buddys.theirs[4][7:9] == b"ab", "when the rank is gone, too"


def refused(*_):
    raise TransferError("they run on different hosts", scope="region")


def none_left(_):
    raise OSError(12, "no memory")


@pytest.mark.parametrize(("method", "instead"), [("open", refused), ("make", none_left)])
def test_a_buddy_that_does_not_see_it_gets_the_bytes(method, instead, monkeypatch):
    monkeypatch.setattr(Segment, method, instead)
    mine, buddys = StateMemory(), StateMemory()
    mine.record_reply(buddys.take(4, mine.make(100, has_replica=True)))
    assert not mine.is_seen
    assert len(buddys.receive_buffers()[4]) == len(mine.own) == 100


@pytest.mark.parametrize("is_seen", [True, False])
def test_states_come_back(is_seen, monkeypatch):
    """States of the other worker's rank, after states of other sizes and without arrays."""
    if not is_seen:
        monkeypatch.setattr(Segment, "open", refused)
    kept = [SavedStates() for _ in range(2)]
    owns = [set(), set()]

    def save(rank, connections):
        checkpoints = Checkpoints(rank, "ab", connections, States(kept[rank], "x", None, (), none))
        for step in range(1, 9):
            checkpoints.save(step, arrays(step + rank))
            owns[rank].add(kept[rank].get("x", rank, step).obj.ctypes.data)
        checkpoints.save(9, [])
        checkpoints.save(10, [np.zeros(rank)])
        checkpoints.save(11, arrays(11 + rank))
        checkpoints.close()

    def restore(rank, connections):
        states = States(kept[rank], "x", 11, (1, 0), none)  # each has the state of the other rank
        step, state = Checkpoints(rank, "ab", connections, states).found()
        assert step == 11
        for a, b in zip(in_state(state), arrays(11 + rank), strict=True):
            assert np.array_equal(a, b)

    with Gang(2) as gang:
        gang.run(save)
    assert all(len(of) == 2 for of in owns), "memory is used again"
    with Gang(2) as gang:
        gang.run(restore)


def none():
    pass
