from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import resource
import signal
import stat
import tempfile
import time
import weakref
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_p2p.transports.board import Board, leave, take
from dask_p2p.transports.locks import LockFile
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


def test_a_notice_retracted_between_reading_and_locking_is_not_taken(board, monkeypatch):
    board.post("key", Block(), b"text")
    real = LockFile.lock

    def lock(file, byte):
        monkeypatch.undo()
        board.retract("key")
        assert len(board) == 0, "nobody reads: the block is gone"
        real(file, byte)

    monkeypatch.setattr(LockFile, "lock", lock)
    assert take(board.folder, "key") is None


@pytest.mark.parametrize("what", ["retracted", "replaced", "removed by somebody else"])
def test_where_open_files_do_not_say_that_they_were_unlinked(board, monkeypatch, what):
    """So it is with NFS and FUSE."""
    board.post("key", Block(), b"text")
    real_lock, real_fstat = LockFile.lock, os.fstat

    def fstat(fd):
        names = list(real_fstat(fd))
        names[stat.ST_NLINK] = 1
        return os.stat_result(names)

    def lock(file, byte):
        monkeypatch.setattr(LockFile, "lock", real_lock)
        if what == "removed by somebody else":
            for name in set(os.listdir(board.folder)) - {"locks"}:
                os.unlink(os.path.join(board.folder, name))
        if what == "replaced":
            board.post("key", Block(), b"more")
        else:
            board.retract("key")
        assert len(board) == (what == "replaced"), "nobody reads: the block is gone"
        real_lock(file, byte)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(LockFile, "lock", lock)
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
    (name,) = {*os.listdir(board.folder)} - {"locks"}
    before = os.stat(os.path.join(board.folder, name))
    lease = take(board.folder, "key")
    time.sleep(0.001)
    board.post("key", block, b"text")
    assert os.path.samestat(os.stat(os.path.join(board.folder, name)), before)
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
    assert lease.holder_lives(), "the last reader must not think that the holder was killed"
    lease.close()
    assert board.close() == 0
    assert not os.path.exists(board.folder)
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
    (name,) = {*os.listdir(board.folder)} - {"locks"}
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
        if name != "locks":
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
        board.post(i, Block(), b"%d" % i)
    assert open_files(board) == before
    leases = [take(board.folder, i) for i in range(50)]
    assert take(board.folder, "nothing") is None
    assert open_files(board) == before + 1
    leave(board.folder)
    for lease in leases:
        assert open_files(board) == before + 1, "what is leased is locked"
        lease.close()
    assert open_files(board) == before
    take(board.folder, 0).close()
    assert open_files(board) == before + 1, "kept for the next one"
    leave(board.folder)
    leave(board.folder)
    assert open_files(board) == before


def _post_and_lease_many(parent, count, connection):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    board = Board(parent)
    for key in range(count):
        board.post(key, Block(), b"%d" % key)
    texts = set()
    for key in range(count):
        lease = take(board.folder, key)
        texts.add(int(lease.text))
        lease.close()
    assert texts == {*range(count)}
    leases = [take(board.folder, key) for key in range(0, count, 30)]
    assert board.sweep(0) == len(leases)
    for lease in leases:
        lease.close()
    connection.send((board.close(), len(os.listdir("/proc/self/fd"))))


def test_open_files_do_not_grow_with_the_blocks(tmp_path):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # which is quicker
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        process = context.Process(target=_post_and_lease_many, args=(folder, 10_000, there))
        process.start()
        there.close()
        left, open_files = here.recv()
        process.join()
    assert left == 0
    assert open_files < 30


def _in_child(function):
    """Fork, and have the child do something and live on; give its process id."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)  # whatever becomes of the test
            os.write(writing, b"1" if function() else b"0")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    went_well = os.read(reading, 1) == b"1"
    os.close(reading)
    if not went_well:
        _end(child)
    assert went_well
    return child


def _end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_lease(board):
    block = Block()
    alive = weakref.ref(block)
    board.post("key", block, b"text")
    board.post("other", Block(), b"more")
    del block
    lease, other = take(board.folder, "key"), take(board.folder, "other")

    def look():
        lease.close()  # it is the parent's
        return not open_files(board)

    child = _in_child(look)
    try:
        board.retract("key")
        assert board.sweep(60) == 2, "the parent has both leases, whatever the child does"
        lease.close()
        assert board.sweep(60) == 1, "the parent's lease has ended, and the child has none"
        assert alive() is None
        other.close()
        leave(board.folder)
        board.retract("other")
        assert len(board) == 0
    finally:
        _end(child)


def _started(function, *args):
    """A process that runs a function, and what it sends first; it gets a connection to send by."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(*args, there))
    process.start()
    assert here.poll(30)
    return process, here.recv()


def _post_and_fork(parent, connection):
    board = Board(parent)
    board.post("key", Block(), b"text")
    connection.send((board.folder, _in_child(lambda: True)))
    signal.pause()


def test_a_killed_holders_child_does_not_stand_in_for_it(tmp_path):
    holder, (folder, child) = _started(_post_and_fork, str(tmp_path))
    try:
        lease = take(folder, "key")
        assert lease.holder_lives()
        holder.kill()
        holder.join()
        assert not lease.holder_lives()
        assert take(folder, "key") is None
        lease.close()
        leave(folder)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(tempfile, "mkdtemp"), (os, "open"), (fcntl, "fcntl")],
    ids=["mkdtemp", "open", "fcntl"],
)
def test_a_board_that_cannot_be_made_refuses_posts(tmp_path, monkeypatch, owner, name):
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        if name == "open" and not str(args[0]).endswith("locks"):
            return real(*args, **kwargs)
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        board = Board(str(tmp_path))
    assert "Function not implemented" in board.refusal
    assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="Function not implemented"):
        board.post("key", Block(), b"text")
    board.retract("key")
    assert board.sweep(0) == board.close() == len(board) == 0


def test_a_board_lingers_until_the_last_reader_is_done(board):
    block = Block()
    alive = weakref.ref(block)
    board.post("key", block, b"text")
    del block
    lease = take(board.folder, "key")
    assert board.close() == 1
    board.linger()
    time.sleep(0.01)
    assert lease.holder_lives()
    assert alive() is not None
    lease.close()
    wait_until(lambda: alive() is None and not os.path.exists(board.folder))


def test_a_notice_that_cannot_be_unlinked_is_tried_again(board, monkeypatch):
    """As long as it is there readers may take it."""
    board.post("key", Block(), b"text")
    with monkeypatch.context() as patch:

        def unlink(path):
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "unlink", unlink)
        board.retract("key")
        assert len(board) == 1
    lease = take(board.folder, "key")
    assert board.sweep(60) == 1
    assert take(board.folder, "key") is None
    lease.close()
    assert board.sweep(60) == 0


def test_a_full_disk_leaves_no_half_a_notice(board, monkeypatch):
    board.post("key", Block(), b"old")
    with monkeypatch.context() as patch:
        real = os.write
        patch.setattr(os, "write", lambda fd, text: real(fd, text[:2]))
        with pytest.raises(OSError, match="as a whole"):
            board.post("key", Block(), b"new")
    assert take(board.folder, "key") is None
    assert os.listdir(board.folder) == ["locks"]


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


def _post(parent, text, connection):
    board = Board(parent)
    board.post("key", Block(), text)
    connection.send(board.folder)
    signal.pause()


def test_a_killed_holders_notices_are_not_taken(tmp_path):
    holder, folder = _started(_post, str(tmp_path), b"text")
    lease = take(folder, "key")
    assert lease.text == b"text"
    assert lease.holder_lives()
    holder.kill()
    holder.join()
    assert os.listdir(folder), "it could not clean up"
    assert not lease.holder_lives(), "who has a lease finds out"
    assert take(folder, "key") is None
    lease.close()


def test_a_worker_in_the_place_of_a_killed_one(tmp_path):
    """At the same address, in the same folder, with the same key: of another run."""
    folders = []
    for run in (1, 2, 3):
        holder, folder = _started(_post, str(tmp_path), b"run %d" % run)
        folders.append(folder)
        left_behind = folders[:-1]
        assert all(len(os.listdir(folder)) == 2 for folder in left_behind)
        assert [take(folder, "key") for folder in left_behind] == [None] * (run - 1)
        lease = take(folders[-1], "key")
        assert lease.text == b"run %d" % run
        holder.kill()
        holder.join()
        assert not lease.holder_lives()
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
