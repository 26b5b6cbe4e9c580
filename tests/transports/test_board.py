from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import stat
import time
import weakref
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_p2p.transports.board import Board, is_tended, take
from tests.transports.loopback import wait_until


class Block:
    """Stands for memory; a weak reference tells when it is gone."""


@pytest.fixture
def board(tmp_path):
    board = Board(str(tmp_path))
    yield board
    board.close()


def test_a_notice_can_be_taken(board):
    board.post("key", Block(), b"text")
    lease = take(board.folder, "key")
    assert lease.text == b"text"
    lease.close()
    lease.close()
    assert take(board.folder, "other") is None


def test_several_readers_at_once(board):
    board.post("key", Block(), b"text")
    leases = [take(board.folder, "key") for _ in range(3)]
    assert all(leases)
    board.retract("key")
    for left, lease in zip((1, 1, 0), leases, strict=True):
        lease.close()
        assert board.sweep(60) == left


def test_a_block_is_kept_until_the_last_reader_lets_go(board):
    block = Block()
    alive = weakref.ref(block)
    board.post("key", block, b"text")
    del block
    lease = take(board.folder, "key")
    board.retract("key")
    gc.collect()
    assert alive() is not None
    assert take(board.folder, "key") is None, "nobody new may read it"
    lease.close()
    assert board.sweep(60) == 0
    gc.collect()
    assert alive() is None


def test_a_notice_retracted_between_opening_and_locking_is_not_taken(board, monkeypatch):
    board.post("key", Block(), b"text")
    real = fcntl.flock

    def flock(fd, how):
        if how == fcntl.LOCK_SH | fcntl.LOCK_NB and os.fstat(fd).st_size:  # the notice's
            monkeypatch.undo()
            board.retract("key")
            assert len(board) == 0, "nobody reads: the block is gone"
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert take(board.folder, "key") is None


def test_posting_again_replaces(board):
    board.post("key", Block(), b"old")
    old = take(board.folder, "key")
    board.post("key", Block(), b"new")
    new = take(board.folder, "key")
    assert (old.text, new.text) == (b"old", b"new")
    assert len(board) == 2
    old.close()
    assert board.sweep(60) == 1
    new.close()


def test_there_is_a_notice_at_any_time_while_one_replaces_another(board, monkeypatch):
    looks = []

    def looking(real):
        def look(*args):
            done = real(*args)
            lease = take(board.folder, "key")
            looks.append(lease.text)
            lease.close()
            return done

        return look

    board.post("key", Block(), b"old")
    for name in ("write", "rename", "unlink"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    board.post("key", Block(), b"new")
    assert looks == [b"old", b"new"]


def test_posting_the_same_block_again_leaves_the_notice_where_it_is(board):
    """Two readers that ask for it at a time have two threads post it."""
    block = Block()
    board.post("key", block, b"text")
    (old,) = (notice.posted_s for notice in board._notices.values())
    lease = take(board.folder, "key")
    time.sleep(0.001)
    board.post("key", block, b"text")
    assert os.fstat(lease._fd).st_nlink == 1
    assert len(board) == 1
    assert board._notices["key"].posted_s > old
    lease.close()


def test_renewing_is_for_the_same_block(board):
    block = Block()
    assert not board.renew("key", block)
    board.post("key", block, b"text")
    assert board.renew("key", block)
    assert not board.renew("key", Block())


def test_a_block_released_while_it_is_being_posted_is_not_posted(board):
    late, other, again = board.intend("key"), board.intend("other"), Block()
    board.retract("key")
    board.retract("nothing")
    with pytest.raises(KeyError):
        board.post("key", Block(), b"text", late)
    assert take(board.folder, "key") is None
    board.post("other", Block(), b"text", other)
    board.post("key", again, b"text", board.intend("key"))
    assert len(board) == 2


def test_notices_grow_old(board):
    board.post("key", Block(), b"text")
    assert board.sweep(60) == 1
    assert board.sweep(0) == 0
    assert take(board.folder, "key") is None


def test_closing(board):
    board.post("key", Block(), b"text")
    lease = take(board.folder, "key")
    assert board.close() == 1
    assert is_tended(board.folder), "the last reader must not think that the holder was killed"
    lease.close()
    assert board.close() == 0
    assert not os.path.exists(board.folder)
    assert not is_tended(board.folder)
    with pytest.raises(ValueError, match="closed"):
        board.post("key", Block(), b"text")
    assert take(board.folder, "key") is None


def test_only_this_user_can_look(board):
    board.post("key", Block(), b"text")
    assert stat.S_IMODE(os.stat(board.folder).st_mode) == 0o700
    names = os.listdir(board.folder)
    assert len(names) == 2
    for name in names:
        assert stat.S_IMODE(os.stat(os.path.join(board.folder, name)).st_mode) == 0o600


def test_nobody_can_guess_where_it_is(tmp_path):
    """Or another user could make the folder first, where a parent lets everybody in."""
    boards = [Board(str(tmp_path)) for _ in range(20)]
    names = [os.path.basename(board.folder).removeprefix("p2p-") for board in boards]
    assert all(len(name) >= 8 for name in names)
    for characters in zip(*names, strict=True):
        assert len({*characters}) > 5, "they are not drawn at random"
    for board in boards:
        board.close()


def test_links_are_not_followed(board, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    board.post("key", Block(), b"text")
    (name,) = {*os.listdir(board.folder)} - {"tended"}
    board.retract("key")
    os.symlink(victim, os.path.join(board.folder, f"{name}.draft"))
    with pytest.raises(FileExistsError):
        board.post("key", Block(), b"text")
    assert victim.read_text() == "whole"


def test_a_notice_that_somebody_else_removed(board):
    """What its readers still read is kept all the same."""
    block = Block()
    alive = weakref.ref(block)
    board.post("key", block, b"text")
    del block
    lease = take(board.folder, "key")
    for name in os.listdir(board.folder):
        if name != "tended":
            os.unlink(os.path.join(board.folder, name))
    board.retract("key")
    gc.collect()
    assert alive() is not None
    lease.close()
    assert board.sweep(60) == 0
    gc.collect()
    assert alive() is None


def open_files(board):
    """Count the open files of a board; others of this process come and go."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += board.folder in os.readlink(f"/proc/self/fd/{fd}")
    return count


def test_a_notice_that_cannot_be_written_can_be_later(board, monkeypatch):
    before = open_files(board)
    with monkeypatch.context() as patch:

        def write(fd, text):
            raise OSError("no space left on device")

        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="no space"):
            board.post("key", Block(), b"text")
    assert len(board) == 0
    assert open_files(board) == before
    board.post("key", Block(), b"text")
    lease = take(board.folder, "key")
    assert lease.text == b"text"
    lease.close()


def test_no_file_descriptor_is_left(board):
    before = open_files(board)
    for i in range(50):
        board.post("key", Block(), b"%d" % i)
        take(board.folder, "key").close()
        take(board.folder, "nothing")
    board.retract("key")
    assert open_files(board) == before


def _hold(folder, taken):
    lease = take(folder, "key")
    taken.set()
    signal.pause()
    lease.close()


def test_a_killed_readers_lease_ends(board):
    context = multiprocessing.get_context("spawn")
    taken = context.Event()
    board.post("key", Block(), b"text")
    reader = context.Process(target=_hold, args=(board.folder, taken))
    reader.start()
    assert taken.wait(30)
    board.retract("key")
    assert board.sweep(60) == 1, "it is being read"
    reader.kill()
    reader.join()
    wait_until(lambda: board.sweep(60) == 0)


def _post(parent, connection):
    board = Board(parent)
    board.post("key", Block(), b"text")
    connection.send(board.folder)
    signal.pause()


def test_a_killed_holders_notices_are_not_taken(tmp_path):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=_post, args=(str(tmp_path), there))
    holder.start()
    assert here.poll(30)
    folder = here.recv()
    lease = take(folder, "key")
    assert lease.text == b"text"
    assert is_tended(folder)
    holder.kill()
    holder.join()
    assert os.listdir(folder), "it could not clean up"
    assert not is_tended(folder), "who has a lease finds out"
    assert take(folder, "key") is None
    lease.close()


def _post_run(parent, run, connection):
    board = Board(parent)
    board.post("key", Block(), b"run %d" % run)
    connection.send(board.folder)
    signal.pause()


def test_a_worker_in_the_place_of_a_killed_one(tmp_path):
    """At the same address, in the same folder, with the same key: of another run."""
    context = multiprocessing.get_context("spawn")
    folders = []
    for run in (1, 2, 3):
        here, there = context.Pipe()
        holder = context.Process(target=_post_run, args=(str(tmp_path), run, there))
        holder.start()
        assert here.poll(30)
        folders.append(here.recv())
        left_behind = folders[:-1]
        assert all(len(os.listdir(folder)) == 2 for folder in left_behind)
        assert [take(folder, "key") for folder in left_behind] == [None] * (run - 1)
        lease = take(folders[-1], "key")
        assert lease.text == b"run %d" % run
        holder.kill()
        holder.join()
        assert not is_tended(folders[-1])
        lease.close()
    assert len(set(folders)) == 3


class Protocol(RuleBasedStateMachine):
    """Any order of posting, taking, retracting and letting go: what is leased is there."""

    def __init__(self):
        super().__init__()
        import tempfile

        self.parent = tempfile.TemporaryDirectory()
        self.board = Board(self.parent.name)
        self.alive = {}  # serial number -> weak reference
        self.posted = {}  # key -> serial number
        self.leases = []  # (serial number, lease)
        self.serial = 0

    @rule(key=st.sampled_from("ab"))
    def post(self, key):
        self.serial += 1
        block = Block()
        self.alive[self.serial] = weakref.ref(block)
        self.board.post(key, block, b"%d" % self.serial)
        self.posted[key] = self.serial

    @rule(key=st.sampled_from("ab"))
    def take(self, key):
        lease = take(self.board.folder, key)
        assert (lease is not None) == (key in self.posted)
        if lease is not None:
            assert int(lease.text) == self.posted[key]
            self.leases.append((self.posted[key], lease))

    @rule(key=st.sampled_from("ab"))
    def retract(self, key):
        self.board.retract(key)
        self.posted.pop(key, None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go(self, data):
        _, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.close()

    @rule()
    def sweep(self):
        self.board.sweep(60)

    @invariant()
    def what_is_leased_is_there(self):
        for serial, _ in self.leases:
            assert self.alive[serial]() is not None

    @invariant()
    def what_is_not_needed_is_gone_after_a_sweep(self):
        self.board.sweep(60)
        needed = {serial for serial, _ in self.leases} | set(self.posted.values())
        assert {s for s, ref in self.alive.items() if ref() is not None} == needed

    def teardown(self):
        for _, lease in self.leases:
            lease.close()
        assert self.board.close() == 0
        self.parent.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
