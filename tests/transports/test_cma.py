"""``cma`` within one process, which reads itself as it would read another."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.errors import BlockUnavailableError, TransferError, UnsuitableError
from dask_p2p.transports import process_memory, same_host, same_host_reading
from dask_p2p.transports.cma import CmaTransport
from dask_p2p.transports.directory import DirectoryOptions, leave
from dask_p2p.transports.probe import PROBE_BYTES
from dask_p2p.transports.table import OWNER
from tests.support import with_section
from tests.transports.conformance import Conformance
from tests.transports.loopback import linked, wait_until

F8 = np.dtype("f8")


@pytest.fixture
def setup(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(same_host, "apart", lambda here, there: None)
    chosen = with_section(options(), DirectoryOptions, retain_s=60.0)
    with linked(CmaTransport, loop, tmp_path, chosen) as setup:
        yield setup


def described(setup, monkeypatch, **changes):
    """Have the holder describe itself otherwise."""
    describe = CmaTransport._describe
    monkeypatch.setattr(
        CmaTransport, "_describe", lambda transport: replace(describe(transport), **changes)
    )


class TestCma(Conformance):
    is_eager = True

    def test_a_probe_comes_unharmed(self, setup):
        setup.reader.probe(setup.holder, "numpy")
        assert setup.reader.buffers.idle_bytes == PROBE_BYTES

    def test_a_block_whose_descriptor_is_too_long_is_left_to_another(self, setup):
        key, array = ("x" * 3000, 0), np.arange(60.0).reshape(6, 10)
        setup.put(key, array)
        with pytest.raises(UnsuitableError, match=r"its descriptor has .* bytes, more than"):
            self.read(setup, key, array, ((0, 6), (0, 10)))
        setup.put("short", array)
        self.read(setup, "short", array, ((0, 6), (0, 10)))

    def test_what_is_posted_need_not_be_asked_for(self, setup, block):
        key, array = block
        setup.serving.publish(setup.host.blocks)
        self.read(setup, key, array, ((0, 6), (0, 10)))
        assert "p2p_cma_post" not in setup.host.calls

    def test_a_block_that_is_gone_again_is_asked_for_again(self, setup, block, monkeypatch):
        key, array = block
        real = same_host_reading.take

        def take(folder, key):
            asked = setup.host.calls.count("p2p_cma_post")
            return real(folder, key) if asked == 2 else None

        monkeypatch.setattr(same_host_reading, "take", take)
        self.read(setup, key, array, ((0, 6), (0, 10)))
        assert setup.host.calls.count("p2p_cma_post") == 2

    def test_two_readers_that_ask_at_a_time_find_the_same_notice(self, setup, block, monkeypatch):
        key, array = block
        real = CmaTransport.place_of

        def place_of(transport, array):
            monkeypatch.setattr(CmaTransport, "place_of", real)
            transport._find_and_publish(key, array.shape)  # another thread, for another reader
            return real(transport, array)

        monkeypatch.setattr(CmaTransport, "place_of", place_of)
        setup.serving._find_and_publish(key, array.shape)
        assert setup.serving.usage() == {"published": 1}

    def test_what_is_no_numpy_block_is_not_posted(self, setup, block, monkeypatch):
        monkeypatch.setattr(same_host, "backend_for", lambda block: SimpleNamespace(name="cupy"))
        setup.serving.publish(setup.host.blocks)
        assert setup.serving.usage() == {"published": 0}

    def test_a_released_block_is_dropped_after_the_last_reader(self, setup, block):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        setup.drop(key)
        assert setup.serving.usage() == {"published": 1}, "it is being read"
        np.testing.assert_array_equal(remote.request().result(), array)
        remote.close()
        setup.serving.directory.expire(60)
        assert setup.serving.usage() == {"published": 0}

    def test_a_block_is_let_go_of_with_its_last_region(self, setup, block):
        key, array = block
        remote = self.open(setup, key, array, ((0, 3), (0, 10)), ((3, 6), (0, 10)))
        np.testing.assert_array_equal(remote.request().result(), array[:3])
        setup.drop(key)
        assert setup.serving.usage() == {"published": 1}
        np.testing.assert_array_equal(remote.request().result(), array[3:])
        setup.serving.directory.expire(60)
        assert setup.serving.usage() == {"published": 0}
        remote.confirm()
        remote.close()

    def test_of_blocks_on_disk_only_the_last_are_kept(self, setup):
        array = np.arange(60.0).reshape(6, 10)
        for key in range(5):
            setup.put(key, array + key)
        setup.host.on_disk = set(range(4))
        setup.serving.publish(setup.host.blocks)
        assert setup.serving.usage() == {"published": 1}, "what is in memory"
        for key in (0, 1, 2, 3, 3, 0):
            got = self.read(setup, key, array, ((0, 6), (0, 10)))
            np.testing.assert_array_equal(got, array + key)
            assert setup.serving.usage()["published"] <= 1 + 2
        assert setup.host.calls.count("p2p_cma_post") == 5

    def test_a_block_on_disk_is_kept_while_it_is_read(self, setup):
        array = np.arange(60.0).reshape(6, 10)
        for key in range(4):
            setup.put(key, array + key)
        setup.host.on_disk = set(range(4))
        whole = ((0, 6), (0, 10))
        opened = [self.open(setup, key, array, whole) for key in range(4)]
        assert setup.serving.usage() == {"published": 4}
        for key, remote in enumerate(opened):
            np.testing.assert_array_equal(remote.request().result(), array + key)
        setup.serving.directory.expire(60)
        assert setup.serving.usage() == {"published": 2}

    def test_what_is_closed_is_not_read(self, setup, block):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        pending = remote.request()
        remote.close()
        with pytest.raises(TransferError, match="was closed before it was read"):
            pending.result()

    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a[::2, ::-1],
            lambda a: np.broadcast_to(a[:1], (5, 10)),
            lambda a: a.T[3:],
            lambda a: a[:, 4:5],
        ],
    )
    def test_blocks_of_any_memory_layout(self, setup, view):
        array = view(np.arange(60.0).reshape(6, 10))
        setup.put("view", array)
        box = tuple((n // 3, n) for n in array.shape)
        expected = array[tuple(slice(*ends) for ends in box)]
        np.testing.assert_array_equal(self.read(setup, "view", array, box), expected)

    @pytest.mark.parametrize(
        ("width", "rows", "comes"), [(15, 20_000, False), (16, 20_000, True), (1, 10_000, True)]
    )
    def test_short_runs_are_left_to_another(self, setup, width, rows, comes):
        array = np.arange(rows * 20.0).reshape(rows, 20)
        setup.put("rows", array)
        box = ((0, rows), (0, width))
        if comes:
            np.testing.assert_array_equal(self.read(setup, "rows", array, box), array[:, :width])
            return
        with pytest.raises(UnsuitableError, match="in runs of 120 bytes"):
            self.read(setup, "rows", array, box)
        setup.drop("rows")
        assert setup.serving.usage() == {"published": 0}

    def test_other_blocks_are_not_for_cma(self, setup):
        obstacle = setup.reader.obstacle("holder", "cupy", F8)
        assert obstacle.code == "other-kind"
        assert obstacle.text == "cma moves NumPy blocks, not cupy"
        assert setup.reader.obstacle("holder", "numpy", np.dtype(object)).code == "objects"

    def test_systems_without_it(self, setup, monkeypatch):
        monkeypatch.setattr(process_memory, "is_there", lambda: False)
        assert setup.reader.obstacle("holder", "numpy", F8).code == "unsupported"

    def test_a_kernel_that_refuses(self, setup, block, monkeypatch):
        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        key, array = block
        monkeypatch.setattr(process_memory, "read", refuse)
        said = setup.reader.obstacle("holder", "numpy", F8)
        assert said.code == "forbidden"
        assert "its memory may not be read" in said.text
        assert "not permitted" in said.text
        assert "SYS_PTRACE" in said.remedy
        with pytest.raises(TransferError, match="cannot be read in place: its memory may not be"):
            self.open(setup, key, array)

    @pytest.mark.parametrize(
        ("memory", "words"),
        [
            ("8 aa", "Bad address"),
            ("zz aa", "invalid literal"),
            ("", "not enough values"),
            (f"{2**70:x} aa", "may not be read"),
            (7, "does not say where it runs"),
        ],
    )
    def test_a_holder_that_describes_itself_wrongly(self, setup, monkeypatch, memory, words):
        described(setup, monkeypatch, memory=memory)
        assert words in setup.reader.obstacle("holder", "numpy", F8).text

    def test_another_process_under_the_holders_number(self, setup, monkeypatch):
        address = process_memory.address_of(np.zeros(16, "u1"))
        described(setup, monkeypatch, memory=f"{address:x} {'ab' * 16}")
        assert setup.reader.obstacle("holder", "numpy", F8).code == "other-process"

    @pytest.mark.parametrize(
        "place", [{}, {"address": "1"}, {"address": True}, {"address": -1}, 1, None], ids=str
    )
    def test_a_notice_without_an_address(self, setup, block, monkeypatch, place):
        key, array = block
        monkeypatch.setattr(CmaTransport, "place_of", lambda transport, block: place)
        with pytest.raises(TransferError, match="has no address"):
            self.open(setup, key, array)
        setup.drop(key)
        assert setup.serving.usage() == {"published": 0}

    def test_memory_that_cannot_be_read(self, setup, block, monkeypatch):
        key, array = block
        monkeypatch.setattr(CmaTransport, "place_of", lambda transport, block: {"address": 8})
        with pytest.raises(TransferError, match=r"cma: block .* cannot be read: .*Bad address"):
            self.read(setup, key, array, ((0, 6), (0, 10)))

    def test_a_holder_that_ended_while_it_was_read(self, setup, block):
        key, array = block
        whole = ((0, 6), (0, 10))
        remote = self.open(setup, key, array, whole, whole)
        remote.request().result()
        remote.confirm()
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        remote.reading._opened[0]._pid = ended.pid
        with pytest.raises(BlockUnavailableError, match=r"holder ended while block .* was read"):
            remote.request().result()
        setup.serving.directory._file.lock(OWNER, fcntl.F_UNLCK)  # as the kernel does for the dead
        with pytest.raises(BlockUnavailableError, match=r"holder ended while block .* was read"):
            remote.confirm()
        remote.close()

    def test_what_is_read_still_when_the_holder_closes_is_let_go_of_later(
        self, setup, block, monkeypatch
    ):
        """A reader may stand still for longer than a worker's plugin can wait for it."""
        monkeypatch.setattr(same_host, "_CLOSE_S", 0.0)
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        setup.close_holder()
        assert setup.serving.usage() == {"published": 1}
        np.testing.assert_array_equal(remote.request().result(), array)
        wait_until(lambda: setup.serving.usage() == {"published": 0})
        assert not os.path.exists(setup.serving.directory.folder)

    def test_a_reader_with_its_last_file_descriptor(self, setup, block, monkeypatch):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))

        def no_more(*args, **kwargs):
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_more)
            self.read(setup, key, array, ((0, 6), (0, 10)))  # the holder's table is open
            leave(setup.serving.directory.folder)
            with pytest.raises(TransferError, match="Too many open files"):
                self.open(setup, key, array, ((0, 6), (0, 10)))
            np.testing.assert_array_equal(remote.request().result(), array)
            remote.confirm()
            remote.close()

    def test_what_nobody_reads_is_not_kept_for_long(self, setup, block):
        setup.serving.options = with_section(options(), DirectoryOptions, retain_s=0.05)
        setup.serving.publish(setup.host.blocks)
        assert setup.serving.usage() == {"published": 1}
        wait_until(lambda: setup.serving.usage() == {"published": 0})
