"""``cma`` within one process, which reads itself as it would read another."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.errors import TransferError
from dask_p2p.transports import process_memory, same_host
from dask_p2p.transports.base import Request
from dask_p2p.transports.in_place import CmaTransport
from dask_p2p.transports.leases import OWNER
from tests.support import BOUND_S
from tests.transports.conformance import Conformance
from tests.transports.loopback import EventLoop, LoopbackHost, wait_until
from tests.usage import usage

TRANSPORT = CmaTransport
F8 = np.dtype("f8")


def hold(folder, array, connection):
    """Be a holder: a process with a block that it has published."""
    loop = EventLoop()
    host = LoopbackHost("holder", loop.loop, {}, folder)
    transport = CmaTransport(host, replace(options(), retain_blocks_s=60.0))
    host.blocks["key"] = array
    transport.publish(host.blocks)
    connection.send(loop.run(transport.handlers()["p2p_cma_peer"]()))
    signal.pause()


def test_the_holder_of_a_block_is_killed_while_it_is_read(loop, tmp_path):
    array = np.arange(60.0).reshape(6, 10)
    context = multiprocessing.get_context("forkserver")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path), array, child_end))
    process.start()
    try:
        assert parent_end.poll(BOUND_S)
        handlers = {"p2p_cma_peer": AsyncMock(return_value=parent_end.recv())}
        holder = SimpleNamespace(calls=[], delay_s=0, handlers=handlers)
        host = LoopbackHost("reader", loop.loop, {"holder": holder}, tmp_path)
        transport = CmaTransport(host, options())
        request = Request("key", "holder", (6, 10), F8, "numpy", 3 * [((0, 6), (0, 10))])
        with closing(transport.read([request], options())) as reading:
            first, second, _ = reading
            np.testing.assert_array_equal(first.result(), array)
            reading.confirm()
            process.kill()
            process.join()
            with pytest.raises(TransferError, match="holder ended while block 'key'"):
                reading.confirm()
            with pytest.raises(TransferError, match="holder ended while block 'key'"):
                second.result()
        loop.run(transport.close())
        host.close()
    finally:
        process.kill()


@pytest.fixture
def _one_process(monkeypatch):
    """The hosts may read each other's memory, though both are in this process."""
    monkeypatch.setattr(same_host, "separation", lambda local, remote: None)


@pytest.mark.usefixtures("_one_process")
class TestCma(Conformance):
    is_eager = True

    def test_what_is_no_numpy_block_is_not_published(self, setup, block, monkeypatch):
        monkeypatch.setattr(same_host, "backend_for", lambda block: SimpleNamespace(name="cupy"))
        setup.serving.publish(setup.host.blocks)
        assert usage(setup.serving) == {"published": 0}

    @pytest.mark.parametrize("is_spilled", [False, True])
    def test_a_released_block_is_dropped_after_the_last_reader(self, setup, block, is_spilled):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        if is_spilled:
            setup.serving.on_spilled(key)
        else:
            setup.drop(key)
        assert usage(setup.serving) == {"published": 1}, "it is being read"
        np.testing.assert_array_equal(remote.request().result(), array)
        setup.serving.directory.expire(60)
        assert usage(setup.serving) == {"published": 0}, "all of it has been read"
        remote.close()

    def test_of_blocks_on_disk_only_the_last_are_kept(self, setup, monkeypatch):
        monkeypatch.setattr(same_host, "EXPIRY_S", 3600.0)  # blocks would expire meanwhile
        array = np.arange(60.0).reshape(6, 10)
        for key in range(5):
            setup.put(key, array + key)
        setup.host.on_disk = set(range(4))
        setup.serving.publish(setup.host.blocks)
        assert usage(setup.serving) == {"published": 1}, "what is in memory"
        for key in (0, 1, 2, 3, 3, 0):
            region = self.read(setup, key, array, ((0, 6), (0, 10)))
            np.testing.assert_array_equal(region, array + key)
            wait_until(lambda: usage(setup.serving)["published"] <= 1 + 2)
        assert setup.host.calls.count("p2p_cma_publish") == 5

    def test_what_is_closed_is_not_read(self, setup, block):
        remote = self.open(setup, *block)
        pending = remote.request()
        remote.close()
        with pytest.raises(TransferError, match="was closed before it was read"):
            pending.result()

    def test_what_is_left_to_another_is_leased_no_longer(self, setup):
        array = np.zeros((20_000, 20))
        setup.put("rows", array)
        request_fields = setup.holder, array.shape, array.dtype, "numpy", [((0, 20_000), (0, 15))]
        with closing(
            setup.reader.read([Request("rows", *request_fields)], self.options)
        ) as reading:
            (region,) = reading
            with pytest.raises(TransferError, match="in runs of"):
                region.result()
            setup.drop("rows")
            assert usage(setup.serving) == {"published": 0}

    def test_systems_without_it(self, setup, monkeypatch):
        monkeypatch.setattr(process_memory, "is_supported", lambda: False)
        assert setup.reader.obstacle("holder", "numpy", F8).code == "unsupported"

    def test_a_kernel_that_refuses(self, setup, block, monkeypatch):
        refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))
        monkeypatch.setattr(process_memory, "read", refuse)
        obstacle = setup.reader.obstacle("holder", "numpy", F8)
        assert obstacle.code == "forbidden"
        assert "its memory may not be read" in obstacle.text
        assert "not permitted" in obstacle.text
        assert "SYS_PTRACE" in obstacle.remedy
        with pytest.raises(TransferError, match="cannot be read in place: its memory may not be"):
            self.open(setup, *block)

    @pytest.mark.parametrize(
        ("memory", "words"),
        [
            ("8 aa", "Bad address"),
            ("zz aa", "invalid literal"),
            ("", "not enough values"),
            (f"{2**70:x} aa", "may not be read"),
        ],
    )
    def test_a_holder_that_describes_itself_wrongly(self, setup, monkeypatch, memory, words):
        describe, change = CmaTransport.describe, {"memory_proof": memory}
        monkeypatch.setattr(CmaTransport, "describe", lambda own: replace(describe(own), **change))
        assert words in setup.reader.obstacle("holder", "numpy", F8).text

    def test_memory_that_cannot_be_read(self, setup, block, monkeypatch):
        monkeypatch.setattr(CmaTransport, "address_of", lambda transport, block: {"address": 8})
        self.refused(setup, block, r"block .* cannot be read: .*Bad address")

    def test_a_holder_that_ended_while_it_was_read(self, setup, block, monkeypatch):
        whole_box = ((0, 6), (0, 10))
        remote = self.open(setup, *block, whole_box, whole_box)
        remote.request().result()
        remote.confirm()
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        real = process_memory.read
        monkeypatch.setattr(process_memory, "read", lambda pid, *args: real(ended.pid, *args))
        with pytest.raises(TransferError, match=r"holder ended while block .* was read"):
            remote.request().result()
        setup.serving.directory.lock(OWNER, fcntl.F_UNLCK)  # as the kernel does for the dead
        with pytest.raises(TransferError, match=r"holder ended while block .* was read"):
            remote.confirm()
        remote.close()

    def test_block_that_is_read_survives_the_close_of_its_holder(self, setup, block, monkeypatch):
        """A reader may stand still for longer than a worker's plugin can wait for it."""
        monkeypatch.setattr("dask_p2p.transports.same_host.CLOSE_S", 0.0)
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        setup.close_holder()
        assert usage(setup.serving) == {"published": 1}
        np.testing.assert_array_equal(remote.request().result(), array)

    def test_a_reader_with_its_last_file_descriptor(self, setup, block, monkeypatch):
        key, array = block
        remote = self.open(setup, key, array, ((0, 6), (0, 10)))
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
            )
            with pytest.raises(TransferError, match="Too many open files"):
                self.open(setup, key, array, ((0, 6), (0, 10)))
            np.testing.assert_array_equal(remote.request().result(), array)
            remote.confirm()
            remote.close()
