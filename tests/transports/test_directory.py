from __future__ import annotations

import errno
import fcntl
import gc
import itertools
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

from dask_p2p.transports.directory import DescriptorDirectory, leave, take
from dask_p2p.transports.table import FILE, TEXT_BYTES, Table, View, digest_of
from tests.transports.loopback import wait_until


class Block:
    """Stands for memory; a weak reference tells when it is gone."""


@pytest.fixture
def directory(tmp_path):
    directory = DescriptorDirectory(str(tmp_path))
    yield directory
    directory.close()


def test_a_notice_can_be_taken(directory):
    directory.publish("key", Block(), b"text")
    lease = take(directory.folder, "key")
    assert lease.text == b"text"
    lease.close()
    lease.close()
    assert take(directory.folder, "other") is None


def test_several_readers_at_once(directory):
    directory.publish("key", Block(), b"text")
    leases = [take(directory.folder, "key") for _ in range(3)]
    assert all(leases)
    directory.withdraw("key")
    for left, lease in zip((1, 1, 0), leases, strict=True):
        lease.close()
        assert directory.expire(60) == left


def test_a_block_is_kept_until_the_last_reader_lets_go(directory):
    block = Block()
    alive = weakref.ref(block)
    directory.publish("key", block, b"text")
    del block
    lease = take(directory.folder, "key")
    directory.withdraw("key")
    gc.collect()
    assert alive() is not None
    assert take(directory.folder, "key") is None, "nobody new may read it"
    lease.close()
    assert directory.expire(60) == 0
    gc.collect()
    assert alive() is None


def before_locking(monkeypatch, do):
    """Have something done when a reader has found a slot, and not locked it."""
    real = View.begin

    def begin(view, slot):
        monkeypatch.undo()
        do()
        real(view, slot)

    monkeypatch.setattr(View, "begin", begin)


def test_a_descriptor_withdrawn_between_finding_and_locking_is_not_taken(directory, monkeypatch):
    directory.publish("key", Block(), b"text")

    def do():
        directory.withdraw("key")
        assert len(directory) == 0, "nobody reads: the block is gone"

    before_locking(monkeypatch, do)
    assert take(directory.folder, "key") is None


def test_a_slot_replaced_between_finding_and_locking_is_not_taken(directory, monkeypatch):
    directory.publish("key", Block(), b"text")

    def do():
        directory.publish("key", Block(), b"more")
        assert len(directory) == 1, "nobody reads: the block is gone"

    before_locking(monkeypatch, do)
    assert take(directory.folder, "key") is None, "what it is now is found the next time"
    assert take(directory.folder, "key").text == b"more"


@pytest.mark.parametrize("other", ["key", "other"])
def test_a_slot_used_again_between_finding_and_locking(directory, monkeypatch, other):
    directory.publish("key", Block(), b"text")
    before = directory.published["key"].byte

    def do():
        directory.withdraw("key")
        directory.publish(other, Block(), b"another text")
        assert directory.published[other].byte == before

    before_locking(monkeypatch, do)
    lease = take(directory.folder, "key")
    if other == "key":
        assert lease.text == b"another text", "it is read when it cannot change any more"
        directory.withdraw("key")
        assert len(directory) == 1
    else:
        assert lease is None
        directory.withdraw("other")
        assert len(directory) == 0, "a reader that found something else left its slot"


def test_a_slot_is_not_used_again_before_the_last_reader_lets_go(directory):
    directory.publish("key", Block(), b"text")
    lease = take(directory.folder, "key")
    directory.withdraw("key")
    for i in range(200):
        directory.publish(i, Block(), b"%d" % i)
        assert directory.published[i].byte != lease.byte
        assert directory.expire(0) == 1
    lease.close()
    directory.expire(60)
    directory.publish("key", Block(), b"text")
    assert directory.published["key"].byte == lease.byte


def test_slots_are_used_again(directory):
    sizes = set()
    for i in range(1000):
        directory.publish(i, Block(), b"%d" % i)
        directory.withdraw(i)
        sizes.add(os.stat(os.path.join(directory.folder, FILE)).st_size)
    assert len(sizes) == 1


def test_a_table_that_grows(directory):
    """Readers find what was there before and what comes then; nothing moves."""
    directory.publish("first", Block(), b"first")
    first = take(directory.folder, "first")
    sizes = set()
    for i in range(1000):
        directory.publish(i, Block(), b"%d" % i)
        lease = take(directory.folder, i)
        assert lease.text == b"%d" % i
        lease.close()
        sizes.add(os.stat(os.path.join(directory.folder, FILE)).st_size)
    assert len(sizes) > 4
    assert max(sizes) < 8 * 2**10 * 1000
    again = take(directory.folder, "first")
    assert (again.byte, again.text) == (first.byte, b"first")
    again.close()
    directory.withdraw("first")
    assert directory.expire(60) == 1001
    first.close()
    assert directory.expire(60) == 1000


def post_many(directory, count):
    for i in range(count):
        directory.publish(i, Block(), b"%d" % i)


def test_a_table_that_cannot_grow(directory, monkeypatch):
    with monkeypatch.context() as patch:

        def posix_fallocate(fd, start, size_bytes):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", posix_fallocate)
        with pytest.raises(OSError, match="No space left"):
            post_many(directory, 10_000)
    published = len(directory)
    assert published > 10
    for i in range(published):
        lease = take(directory.folder, i)
        assert lease.text == b"%d" % i
        lease.close()
    assert take(directory.folder, published) is None
    directory.publish(published, Block(), b"text")
    lease = take(directory.folder, published)
    assert lease.text == b"text"
    lease.close()


def test_a_notice_that_is_too_long(directory):
    directory.publish("key", Block(), b"x" * TEXT_BYTES)
    lease = take(directory.folder, "key")
    assert lease.text == b"x" * TEXT_BYTES
    lease.close()
    with pytest.raises(ValueError, match=f"at most {TEXT_BYTES} bytes, and this {TEXT_BYTES + 1}"):
        directory.publish("key", Block(), b"x" * (TEXT_BYTES + 1))
    assert take(directory.folder, "key") is None, "that was another block"
    assert len(directory) == 0


def test_texts_do_not_touch_each_other(directory):
    texts = [bytes([i]) * (TEXT_BYTES if i % 2 else i) for i in range(100)]
    for i, text in enumerate(texts):
        directory.publish(i, Block(), text)
    for i, text in enumerate(texts):
        lease = take(directory.folder, i)
        assert lease.text == text
        lease.close()


def test_a_digest_across_two_slots_is_not_found(tmp_path):
    table = Table(str(tmp_path))
    for digest in (b"0123456789abcdef", b"ghijklmnopqrstuv"):
        table.publish(table.reserve(digest), digest, b"text")
    view = View(str(tmp_path))
    assert view.find(b"ghijklmnopqrstuv") is not None
    assert view.find(b"89abcdefghijklmn") is None


def test_posting_again_replaces(directory):
    directory.publish("key", Block(), b"old")
    old = take(directory.folder, "key")
    directory.publish("key", Block(), b"new")
    new = take(directory.folder, "key")
    assert (old.text, new.text) == (b"old", b"new")
    assert len(directory) == 2
    old.close()
    assert directory.expire(60) == 1
    new.close()


def test_there_is_a_notice_at_any_time_while_one_replaces_another(directory, monkeypatch):
    looks = []

    def looking(real):
        def look(*args):
            done = real(*args)
            lease = take(directory.folder, "key")
            looks.append(lease.text)
            lease.close()
            return done

        return look

    directory.publish("key", Block(), b"old")
    monkeypatch.setattr(os, "pwrite", looking(os.pwrite))
    directory.publish("key", Block(), b"new")
    assert looks == [b"old", b"old", b"new"], "written, entered, the old one withdrawn"


def content(directory):
    with open(os.path.join(directory.folder, FILE), "rb") as file:
        return file.read()


def test_posting_the_same_block_again_leaves_the_notice_where_it_is(directory):
    """Two readers that ask for it at a time have two threads publish it."""
    block = Block()
    directory.publish("key", block, b"text")
    (old,) = (entry.touched_s for entry in directory.published.values())
    before = content(directory)
    lease = take(directory.folder, "key")
    time.sleep(0.001)
    directory.publish("key", block, b"text")
    assert content(directory) == before
    assert len(directory) == 1
    assert directory.published["key"].touched_s > old
    lease.close()


def test_renewing_is_for_the_same_block(directory):
    block = Block()
    assert not directory.touch("key", block)
    directory.publish("key", block, b"text")
    assert directory.touch("key", block)
    assert not directory.touch("key", Block())


def test_a_block_released_while_it_is_being_posted_is_not_posted(directory):
    late, other, again = directory.token("key"), directory.token("other"), Block()
    directory.withdraw("key")
    directory.withdraw("nothing")
    with pytest.raises(KeyError):
        directory.publish("key", Block(), b"text", late)
    assert take(directory.folder, "key") is None
    directory.publish("other", Block(), b"text", other)
    directory.publish("key", again, b"text", directory.token("key"))
    assert len(directory) == 2


def test_notices_grow_old(directory):
    directory.publish("key", Block(), b"text")
    assert directory.expire(60) == 1
    assert directory.expire(0) == 0
    assert take(directory.folder, "key") is None


def test_closing(directory):
    directory.publish("key", Block(), b"text")
    lease = take(directory.folder, "key")
    assert directory.close() == 1
    assert lease.holder_lives(), "the last reader must not think that the holder was killed"
    lease.close()
    assert directory.close() == 0
    assert not os.path.exists(directory.folder)
    with pytest.raises(ValueError, match="closed"):
        directory.publish("key", Block(), b"text")
    assert take(directory.folder, "key") is None


def test_only_this_user_can_look(directory):
    directory.publish("key", Block(), b"text")
    assert stat.S_IMODE(os.stat(directory.folder).st_mode) == 0o700
    assert os.listdir(directory.folder) == [FILE]
    assert stat.S_IMODE(os.stat(os.path.join(directory.folder, FILE)).st_mode) == 0o600


def test_nobody_can_guess_where_it_is(tmp_path):
    """Or another user could make the folder first, where a parent lets everybody in."""
    directories = [DescriptorDirectory(str(tmp_path)) for _ in range(20)]
    names = [os.path.basename(directory.folder).removeprefix("p2p-") for directory in directories]
    assert all(len(name) >= 8 for name in names)
    for characters in zip(*names, strict=True):
        assert len({*characters}) > 5, "they are not drawn at random"
    for directory in directories:
        directory.close()


def test_links_are_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "p2p-guessed"
    victim.write_text("whole")
    folder.mkdir()
    os.symlink(victim, folder / FILE)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(folder))
    directory = DescriptorDirectory(str(tmp_path))
    with pytest.raises(ValueError, match="File exists"):
        directory.publish("key", Block(), b"text")
    assert victim.read_text() == "whole"


def test_a_table_that_somebody_else_removed(directory):
    """What its readers still read is kept all the same."""
    block = Block()
    alive = weakref.ref(block)
    directory.publish("key", block, b"text")
    del block
    lease = take(directory.folder, "key")
    os.unlink(os.path.join(directory.folder, FILE))
    directory.withdraw("key")
    gc.collect()
    assert alive() is not None
    assert take(directory.folder, "key") is None
    lease.close()
    assert directory.expire(60) == 0
    gc.collect()
    assert alive() is None
    leave(directory.folder)
    assert take(directory.folder, "key") is None


def open_files(directory):
    """Count the open files of a directory; others of this process come and go."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += directory.folder in os.readlink(f"/proc/self/fd/{fd}")
    return count


def fail(patch, function, numbers, error):
    """Have some calls fail, counted from 1."""
    real, calls = getattr(os, function), itertools.count(1)

    def failing(*args):
        if next(calls) in numbers:
            raise error
        return real(*args)

    patch.setattr(os, function, failing)


@pytest.mark.parametrize("number", [1, 2])
def test_a_notice_that_cannot_be_written_can_be_later(directory, monkeypatch, number):
    before = open_files(directory)
    with monkeypatch.context() as patch:
        fail(patch, "pwrite", {number}, OSError("no space left on device"))
        with pytest.raises(OSError, match="no space"):
            directory.publish("key", Block(), b"text")
    assert len(directory) == 0
    assert open_files(directory) == before
    directory.publish("key", Block(), b"text")
    lease = take(directory.folder, "key")
    assert lease.text == b"text"
    lease.close()


def test_a_notice_that_cannot_be_taken_back_is_kept(directory, monkeypatch):
    """Readers may find it."""
    with monkeypatch.context() as patch:
        fail(patch, "pwrite", {3}, OSError("Input/output error"))
        real = Table.publish

        def publish(*args):
            real(*args)
            raise MemoryError("nothing left")

        patch.setattr(Table, "publish", publish)
        with pytest.raises(MemoryError):
            directory.publish("key", Block(), b"text")
    assert len(directory) == 1
    assert directory.expire(60) == 0
    assert take(directory.folder, "key") is None


def test_no_file_descriptor_is_left(directory):
    before = open_files(directory)
    post_many(directory, 50)
    assert open_files(directory) == before
    leases = [take(directory.folder, i) for i in range(50)]
    assert take(directory.folder, "nothing") is None
    opened = open_files(directory)
    assert opened == before + 2, "with the locks, and that of the map"
    leave(directory.folder)
    for lease in leases:
        assert open_files(directory) == opened, "what is leased is locked"
        lease.close()
    assert open_files(directory) == before
    take(directory.folder, 0).close()
    assert open_files(directory) == opened, "kept for the next one"
    leave(directory.folder)
    leave(directory.folder)
    assert open_files(directory) == before


def test_a_reader_that_may_open_no_more_files(directory, monkeypatch):
    directory.publish("key", Block(), b"text")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in (0, 1):  # than are open
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                take(directory.folder, "key")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    take(directory.folder, "key").close()
    leave(directory.folder)
    assert open_files(directory) == 1


@pytest.mark.parametrize("size_bytes", [0, 1, 17, 2**16, 2**17, 2**17 + 1])
def test_a_file_that_is_no_table(tmp_path, size_bytes):
    (tmp_path / FILE).write_bytes(b"\xff" * size_bytes)
    for _ in range(2):
        assert take(str(tmp_path), "key") is None
    leave(str(tmp_path))


def _post_and_lease_many(parent, count, connection):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    directory = DescriptorDirectory(parent)
    for key in range(count):
        directory.publish(key, Block(), b"%d" % key)
    texts = set()
    for key in range(count):
        lease = take(directory.folder, key)
        texts.add(int(lease.text))
        lease.close()
    assert texts == {*range(count)}
    leases = [take(directory.folder, key) for key in range(0, count, 30)]
    assert directory.expire(0) == len(leases)
    for lease in leases:
        lease.close()
    connection.send((directory.close(), len(os.listdir("/proc/self/fd"))))


def test_open_files_do_not_grow_with_the_blocks(tmp_path):
    context = multiprocessing.get_context("forkserver")
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
def test_a_forked_child_does_not_write_the_parents_table(directory, tmp_path):
    """Nor the file that has the number by which the table was known."""
    directory.publish("key", Block(), b"text")
    other, block = tmp_path / "other", directory.published["key"].owner

    def look():
        opened = [os.open(other, os.O_RDWR | os.O_CREAT) for _ in range(50)]
        directory.withdraw("key")
        with suppress(OSError):
            directory.publish("key", Block(), b"of the child")
        return opened and other.stat().st_size == 0

    before = content(directory)
    _end(_in_child(look))
    assert content(directory) == before
    assert directory.touch("key", block)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_lease(directory):
    block = Block()
    alive = weakref.ref(block)
    directory.publish("key", block, b"text")
    directory.publish("other", Block(), b"more")
    del block
    lease, other = take(directory.folder, "key"), take(directory.folder, "other")

    def look():
        lease.close()  # it is the parent's
        return not open_files(directory)

    child = _in_child(look)
    try:
        directory.withdraw("key")
        assert directory.expire(60) == 2, "the parent has both leases, whatever the child does"
        lease.close()
        assert directory.expire(60) == 1, "the parent's lease has ended, and the child has none"
        assert alive() is None
        other.close()
        leave(directory.folder)
        directory.withdraw("other")
        assert len(directory) == 0
    finally:
        _end(child)


def _started(function, *args):
    """A process that runs a function, and what it sends first; it gets a connection to send by."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(*args, there))
    process.start()
    assert here.poll(30)
    return process, here.recv()


def _post_and_fork(parent, connection):
    directory = DescriptorDirectory(parent)
    directory.publish("key", Block(), b"text")
    connection.send((directory.folder, _in_child(lambda: True)))
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
    [
        *((tempfile, "mkdtemp"), (os, "open"), (fcntl, "fcntl")),
        *((os, "posix_fallocate"), (os, "pwrite")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_directory_that_cannot_be_made_refuses_blocks(tmp_path, monkeypatch, owner, name):
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        if name == "open" and not str(args[0]).endswith(FILE):
            return real(*args, **kwargs)
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        directory = DescriptorDirectory(str(tmp_path))
    assert "Function not implemented" in directory.refusal
    assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="Function not implemented"):
        directory.publish("key", Block(), b"text")
    directory.withdraw("key")
    assert directory.expire(0) == directory.close() == len(directory) == 0


def test_a_directory_lingers_until_the_last_reader_is_done(directory):
    block = Block()
    alive = weakref.ref(block)
    directory.publish("key", block, b"text")
    del block
    lease = take(directory.folder, "key")
    assert directory.close() == 1
    directory.linger()
    time.sleep(0.01)
    assert lease.holder_lives()
    assert alive() is not None
    lease.close()
    wait_until(lambda: alive() is None and not os.path.exists(directory.folder))


def test_a_notice_that_cannot_be_withdrawn_is_tried_again(directory, monkeypatch):
    """As long as it is there readers may take it."""
    directory.publish("key", Block(), b"text")
    with monkeypatch.context() as patch:
        fail(patch, "pwrite", {1}, OSError(errno.EIO, "Input/output error"))
        directory.withdraw("key")
        assert len(directory) == 1
    lease = take(directory.folder, "key")
    assert directory.expire(60) == 1
    assert take(directory.folder, "key") is None
    lease.close()
    assert directory.expire(60) == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_full_disk_leaves_no_half_a_notice(directory, monkeypatch, number):
    directory.publish("key", Block(), b"old")
    with monkeypatch.context() as patch:
        real, calls = os.pwrite, itertools.count(1)

        def pwrite(fd, data, start):
            return real(fd, data[:2] if next(calls) == number else data, start)

        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="as a whole"):
            directory.publish("key", Block(), b"new")
    assert take(directory.folder, "key") is None
    assert len(directory) == 0
    assert digest_of("key")[:2] not in content(directory)


def _hold(folder, taken):
    lease = take(folder, "key")
    taken.set()
    signal.pause()
    lease.close()


def test_a_killed_readers_lease_ends(directory):
    context = multiprocessing.get_context("forkserver")
    taken = context.Event()
    directory.publish("key", Block(), b"text")
    reader = context.Process(target=_hold, args=(directory.folder, taken))
    reader.start()
    assert taken.wait(30)
    directory.withdraw("key")
    assert directory.expire(60) == 1, "it is being read"
    reader.kill()
    reader.join()
    wait_until(lambda: directory.expire(60) == 0)


class _Freed:
    """A block that says when it is freed."""

    def __init__(self, freed, serial):
        self._freed, self._serial = freed, serial

    def __del__(self):
        self._freed[self._serial] = 1


def _read_for(seconds, folder, freed, connection):
    end_s, count, wrong = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end_s:
        lease = take(folder, count % 3)
        count += 1
        if lease is not None:
            serial = int(lease.text[:9])
            wrong += lease.text != b"%09d" % serial * (1 + serial % 50)
            wrong += any(freed[serial] for _ in range(3))
            lease.close()
    connection.send((count, wrong))


def test_what_others_have_leased_is_never_freed(directory):
    """Slots are written, withdrawn and used again while two processes look for them."""
    context = multiprocessing.get_context("forkserver")
    freed = context.RawArray("b", 10**6)
    here, there = context.Pipe()
    args = (1.0, directory.folder, freed, there)
    readers = [context.Process(target=_read_for, args=args) for _ in range(2)]
    for reader in readers:
        reader.start()
    serial = 0
    while any(reader.is_alive() for reader in readers):
        text = b"%09d" % serial * (1 + serial % 50)
        directory.publish(serial % 3, _Freed(freed, serial), text)
        if serial % 4 == 3:
            directory.withdraw(serial // 4 % 3)
        directory.expire(60)
        serial += 1
    results = [here.recv() for _ in readers]
    assert all(count > 100 and not wrong for count, wrong in results), (serial, results)
    assert directory.expire(0) == 0
    assert sum(freed) == serial


def _publish(parent, text, connection):
    directory = DescriptorDirectory(parent)
    directory.publish("key", Block(), text)
    connection.send(directory.folder)
    signal.pause()


def test_a_killed_holders_notices_are_not_taken(tmp_path):
    holder, folder = _started(_publish, str(tmp_path), b"text")
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
        holder, folder = _started(_publish, str(tmp_path), b"run %d" % run)
        folders.append(folder)
        left_behind = folders[:-1]
        assert all(os.listdir(folder) == [FILE] for folder in left_behind)
        assert [take(folder, "key") for folder in left_behind] == [None] * (run - 1)
        lease = take(folders[-1], "key")
        assert lease.text == b"run %d" % run
        holder.kill()
        holder.join()
        assert not lease.holder_lives()
        lease.close()
    assert len(set(folders)) == 3


class Protocol(RuleBasedStateMachine):
    """Any order of publishing, taking, withdrawing and letting go: what is leased is there."""

    def __init__(self):
        super().__init__()
        import tempfile

        self.parent = tempfile.TemporaryDirectory()
        self.directory = DescriptorDirectory(self.parent.name)
        self.alive = {}  # serial number -> weak reference
        self.published = {}  # key -> serial number
        self.leases = []  # (serial number, lease)
        self.serial = 0

    @rule(key=st.sampled_from("ab"))
    def publish(self, key):
        self.serial += 1
        block = Block()
        self.alive[self.serial] = weakref.ref(block)
        self.directory.publish(key, block, b"%d" % self.serial)
        self.published[key] = self.serial

    @rule(key=st.sampled_from("ab"))
    def take(self, key):
        lease = take(self.directory.folder, key)
        assert (lease is not None) == (key in self.published)
        if lease is not None:
            assert int(lease.text) == self.published[key]
            self.leases.append((self.published[key], lease))

    @rule(key=st.sampled_from("ab"))
    def withdraw(self, key):
        self.directory.withdraw(key)
        self.published.pop(key, None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go(self, data):
        _, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.close()

    @rule()
    def expire(self):
        self.directory.expire(60)

    @invariant()
    def what_is_leased_is_there(self):
        for serial, _ in self.leases:
            assert self.alive[serial]() is not None

    @invariant()
    def what_is_not_needed_is_gone_after_a_sweep(self):
        self.directory.expire(60)
        needed = {serial for serial, _ in self.leases} | set(self.published.values())
        assert {s for s, ref in self.alive.items() if ref() is not None} == needed

    def teardown(self):
        for _, lease in self.leases:
            lease.close()
        assert self.directory.close() == 0
        self.parent.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
