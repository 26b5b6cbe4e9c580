import errno
import fcntl
import itertools
import multiprocessing
import os
import resource
import signal
import stat
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_p2p.errors import TransferError
from dask_p2p.transports import leases as module
from dask_p2p.transports.leases import DESCRIPTOR_BYTES, FILE, Leases, PublishedBlocks
from tests.support import BOUND_S


class Block:
    """Stands for memory; a weak reference tells when it is gone."""


def publish(directory, key, block, text):
    directory.publish(key, lambda: block, lambda block: text)


def take(folder, key):
    """Return a lease on one block, with an open file of its own; None if there is no block."""
    try:
        leases = Leases(folder)
    except FileNotFoundError:
        return None
    if (lease := leases.take(key)) is None:
        leases.close()
        return None
    entry, text = lease
    methods = {"holder_lives": leases.holder_lives, "close": leases.close}
    return SimpleNamespace(leases=leases, entry=entry, text=text, **methods)


@pytest.fixture
def directory(tmp_path):
    directory = PublishedBlocks(str(tmp_path))
    yield directory
    directory.close()


@pytest.fixture
def one_bucket(monkeypatch):
    """All keys may have the same entries."""
    monkeypatch.setattr(module, "bucket_of", lambda digest: 0)


@pytest.mark.usefixtures("one_bucket")
@pytest.mark.parametrize("second_key", ["key", "other"])
def test_an_entry_used_again_between_finding_and_locking(directory, monkeypatch, second_key):
    publish(directory, "key", Block(), b"text")
    before = directory.published["key"].entry

    real = Leases.lock

    def lock(leases, *args):
        monkeypatch.setattr(Leases, "lock", real)
        directory.withdraw("key")
        publish(directory, second_key, Block(), b"another text")
        assert directory.published[second_key].entry == before
        real(leases, *args)

    monkeypatch.setattr(Leases, "lock", lock)
    lease = take(directory.folder, "key")
    if second_key == "key":
        assert lease.text == b"another text", "it is read when it cannot change any more"
        directory.withdraw("key")
        assert len(directory) == 1
    else:
        assert lease is None
        directory.withdraw("other")
        assert len(directory) == 0, "a reader that found something else left its entry"


def publish_many(directory, count):
    for i in range(count):
        publish(directory, i, Block(), b"%d" % i)


@pytest.mark.usefixtures("one_bucket")
def test_a_block_for_which_no_entry_is_free(directory):
    """It is refused so that another transport brings it, this time; it hurts no other."""
    publish_many(directory, 64)
    for key in ("one more", 7):  # another block for a key that has an entry needs a second one
        with pytest.raises(TransferError, match="no entry is free"):
            publish(directory, key, Block(), b"text")
        assert take(directory.folder, key) is None
    for i in {*range(64)} - {7}:
        lease = take(directory.folder, i)
        assert lease.text == b"%d" % i
        lease.close()
    publish(directory, "one more", Block(), b"text")
    lease = take(directory.folder, "one more")
    assert lease.text == b"text"
    lease.close()


def test_a_descriptor_that_is_too_long(directory):
    publish(directory, "key", Block(), b"x" * DESCRIPTOR_BYTES)
    lease = take(directory.folder, "key")
    assert lease.text == b"x" * DESCRIPTOR_BYTES
    lease.close()
    with pytest.raises(
        TransferError, match=f"{DESCRIPTOR_BYTES + 1} bytes, more than {DESCRIPTOR_BYTES}"
    ):
        publish(directory, "key", Block(), b"x" * (DESCRIPTOR_BYTES + 1))
    assert take(directory.folder, "key") is None, "that was another block"
    assert len(directory) == 0


def content(directory):
    with open(os.path.join(directory.folder, FILE), "rb") as file:
        return file.read()


@pytest.mark.parametrize("when", ["it is looked for", "it is described"])
def test_a_block_released_while_it_is_being_published_is_not_published(directory, when):
    """Dask's event loop does not wait for the thread that publishes it."""
    block = Block()

    def release(at):
        if at == when:
            directory.withdraw("other")
            directory.withdraw("key")
        return {"it is looked for": block, "it is described": b"text"}[at]

    find, describe = (lambda: release("it is looked for")), (lambda _: release("it is described"))
    with pytest.raises(KeyError):
        directory.publish("key", find, describe)
    assert take(directory.folder, "key") is None
    assert directory.publications == {}
    publish(directory, "key", block, b"text")
    assert len(directory) == 1


def test_two_threads_that_publish_the_same_block(directory):
    """The second to be ready finds what the first has published, and readers may know that."""
    block = Block()

    def describe(_):
        publish(directory, "key", block, b"first")
        return b"second"

    directory.publish("key", lambda: block, describe)
    assert len(directory) == 1
    published_s = directory.published["key"].touched_s
    publish(directory, "key", block, b"third")
    assert directory.published["key"].touched_s > published_s, "it expires later"
    lease = take(directory.folder, "key")
    assert lease.text == b"first"
    lease.close()


def test_an_old_block_is_not_freed_under_the_lock(directory):
    """Freeing a GPU's memory may take long."""
    was_free = []

    class Old(Block):
        def __del__(self):
            thread = threading.Thread(target=directory.touch, args=("other", self), daemon=True)
            thread.start()
            thread.join(BOUND_S)
            was_free.append(not thread.is_alive())

    publish(directory, "key", Old(), b"old")
    publish(directory, "key", Old(), b"new")
    directory.withdraw("key")
    publish(directory, "key", Old(), b"newer")
    directory.expire(0)
    assert was_free == [True, True, True]


def test_only_this_user_can_look(directory):
    publish(directory, "key", Block(), b"text")
    assert stat.S_IMODE(os.stat(directory.folder).st_mode) == 0o700
    assert os.listdir(directory.folder) == [FILE]
    assert stat.S_IMODE(os.stat(os.path.join(directory.folder, FILE)).st_mode) == 0o600


def test_links_are_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "p2p-guessed"
    victim.write_text("whole")
    folder.mkdir()
    os.symlink(victim, folder / FILE)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(folder))
    directory = PublishedBlocks(str(tmp_path))
    with pytest.raises(ValueError, match="File exists"):
        publish(directory, "key", Block(), b"text")
    assert victim.read_text() == "whole"


def open_files(directory):
    """Count the open files of a directory; others of this process come and go."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += directory.folder in os.readlink(f"/proc/self/fd/{fd}")
    return count


def test_no_file_descriptor_is_left(directory):
    before = open_files(directory)
    publish_many(directory, 50)
    assert open_files(directory) == before
    assert take(directory.folder, "nothing") is None
    leases = Leases(directory.folder)
    entries = [leases.take(i)[0] for i in range(50)]
    assert leases.take("nothing") is None
    assert open_files(directory) == before + 1, "one for all leases"
    for entry in entries:
        leases.end(entry)
    leases.close()
    leases.close()
    assert open_files(directory) == before
    leases = Leases(directory.folder)
    del leases
    assert open_files(directory) == before, "nobody refers to it"


def test_a_lease_that_cannot_be_ended_ends_with_the_file(directory, monkeypatch):
    publish(directory, "key", Block(), b"text")
    lease = take(directory.folder, "key")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
        lease.leases.end(lease.entry)
    directory.withdraw("key")
    assert directory.expire(60) == 1
    lease.close()
    assert directory.expire(60) == 0


def test_what_is_closed_fails_whatever_is_open_under_its_number_now(directory):
    publish(directory, "key", Block(), b"text")
    leases = Leases(directory.folder)
    entry, _ = leases.take("key")
    leases.close()
    file_number = os.open(os.path.join(directory.folder, FILE), os.O_RDONLY)
    try:
        leases.end(entry)
        for use in (leases.holder_lives, lambda: leases.take("key"), lambda: leases.lock(entry)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                use()
    finally:
        os.close(file_number)


@pytest.mark.parametrize("full", ["disk", "limit"])
def test_a_disk_without_room_is_found_when_the_file_is_made(tmp_path, monkeypatch, full):
    if full == "disk":
        full_disk = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(os, "pwrite", full_disk)
        assert "No space left" in PublishedBlocks(str(tmp_path)).refusal
    else:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            assert "File too large" in PublishedBlocks(str(tmp_path)).refusal
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


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
def test_a_forked_child_does_not_write_the_parents_file(directory, tmp_path):
    """Nor the file that has the number by which the table was known."""
    publish(directory, "key", Block(), b"text")
    other_folder, block = tmp_path / "other", directory.published["key"].block

    def check_files():
        opened = [os.open(other_folder, os.O_RDWR | os.O_CREAT) for _ in range(50)]
        directory.withdraw("key")
        with suppress(OSError):
            publish(directory, "key", Block(), b"of the child")
        return opened and other_folder.stat().st_size == 0

    before = content(directory)
    _end(_in_child(check_files))
    assert content(directory) == before
    assert directory.touch("key", block)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_lease(directory):
    block = Block()
    alive = weakref.ref(block)
    publish(directory, "key", block, b"text")
    publish(directory, "other", Block(), b"more")
    del block
    lease, second_lease = take(directory.folder, "key"), take(directory.folder, "other")

    def check_files():
        lease.close()  # it is the parent's
        return not open_files(directory)

    child = _in_child(check_files)
    try:
        directory.withdraw("key")
        assert directory.expire(60) == 2, "the parent has both leases, whatever the child does"
        lease.close()
        assert directory.expire(60) == 1, "the parent's lease has ended, and the child has none"
        assert alive() is None
        second_lease.close()
        directory.withdraw("other")
        assert len(directory) == 0
    finally:
        _end(child)


def _publish_and_fork(parent, connection):
    directory = PublishedBlocks(parent)
    publish(directory, "key", Block(), b"text")
    connection.send((directory.folder, _in_child(lambda: True)))
    signal.pause()


def test_a_killed_holders_child_does_not_stand_in_for_it(tmp_path):
    context = multiprocessing.get_context("forkserver")
    parent_end, child_end = context.Pipe()
    holder = context.Process(target=_publish_and_fork, args=(str(tmp_path), child_end))
    holder.start()
    assert parent_end.poll(BOUND_S)
    folder, child = parent_end.recv()
    try:
        lease = take(folder, "key")
        assert lease.text == b"text"
        assert lease.holder_lives()
        holder.kill()
        holder.join()
        assert os.listdir(folder), "it could not clean up"
        assert not lease.holder_lives(), "who has a lease finds out"
        assert take(folder, "key") is None
        lease.close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(tempfile, "mkdtemp"), (os, "open"), (fcntl, "fcntl"), (os, "pwrite")],
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
        directory = PublishedBlocks(str(tmp_path))
    assert "Function not implemented" in directory.refusal
    assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="Function not implemented"):
        publish(directory, "key", Block(), b"text")
    directory.withdraw("key")
    assert directory.expire(0) == directory.close() == len(directory) == 0


def test_a_descriptor_that_cannot_be_withdrawn_is_tried_again(directory, monkeypatch):
    """As long as it is there readers may take it."""
    publish(directory, "key", Block(), b"text")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        directory.withdraw("key")
        assert len(directory) == 1
    lease = take(directory.folder, "key")
    assert directory.expire(60) == 1
    assert take(directory.folder, "key") is None
    lease.close()
    assert directory.expire(60) == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_full_disk_leaves_no_half_a_descriptor(directory, monkeypatch, number):
    publish(directory, "key", Block(), b"old")
    with monkeypatch.context() as patch:
        real, calls = os.pwrite, itertools.count(1)

        def pwrite(fd, data, start):
            return real(fd, data[:2] if next(calls) == number else data, start)

        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="as a whole"):
            publish(directory, "key", Block(), b"new")
    assert take(directory.folder, "key") is None
    assert len(directory) == 0
    assert module.hash_key("key")[:2] not in content(directory)


class _Freed:
    """A block that says when it is freed."""

    def __init__(self, freed, serial):
        self._freed, self._serial = freed, serial

    def __del__(self):
        self._freed[self._serial] = 1


def _read_for(seconds, folder, freed, connection):
    end_s, count, wrong_count = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end_s or count <= 100:  # on a busy machine it takes longer
        lease = take(folder, count % 3)
        count += 1
        if lease is not None:
            serial = int(lease.text[:9])
            wrong_count += lease.text != b"%09d" % serial * (1 + serial % 50)
            wrong_count += any(freed[serial] for _ in range(3))
            lease.close()
    connection.send((count, wrong_count))


def test_what_others_have_leased_is_never_freed(directory):
    """Slots are written, withdrawn and used again while two processes look for them."""
    context = multiprocessing.get_context("forkserver")
    freed = context.RawArray("b", 10**6)
    parent_end, child_end = context.Pipe()
    args = (0.5, directory.folder, freed, child_end)
    readers = [context.Process(target=_read_for, args=args) for _ in range(2)]
    for reader in readers:
        reader.start()
    serial = 0
    while any(reader.is_alive() for reader in readers):
        text = b"%09d" % serial * (1 + serial % 50)
        publish(directory, serial % 3, _Freed(freed, serial), text)
        if serial % 4 == 3:
            directory.withdraw(serial // 4 % 3)
        directory.expire(60)
        serial += 1
    results = [parent_end.recv() for _ in readers]
    assert all(count > 100 and not wrong_count for count, wrong_count in results), (serial, results)
    assert directory.expire(0) == 0
    assert sum(freed) == serial


class Protocol(RuleBasedStateMachine):
    """Any order of publishing, taking, withdrawing and letting go: what is leased is there."""

    def __init__(self):
        super().__init__()
        self.parent = tempfile.TemporaryDirectory()
        self.directory = PublishedBlocks(self.parent.name)
        self.alive = {}  # serial number -> weak reference
        self.published = {}  # key -> serial number
        self.leases = []  # (serial number, lease)
        self.serial = 0

    @rule(key=st.sampled_from("ab"))
    def publish(self, key):
        self.serial += 1
        block = Block()
        self.alive[self.serial] = weakref.ref(block)
        publish(self.directory, key, block, b"%d" % self.serial)
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
    def free_memory(self, data):
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
        needed_serials = {serial for serial, _ in self.leases} | set(self.published.values())
        assert {s for s, ref in self.alive.items() if ref() is not None} == needed_serials

    def teardown(self):
        for _, lease in self.leases:
            lease.close()
        assert self.directory.close() == 0
        self.parent.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
