"""Transports that read in place, between worker processes of a cluster."""

import os
import pickle
import resource
import signal
import warnings
from unittest.mock import Mock

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.plugins.registration import workers_of
from tests.faults.support import assert_nothing_is_held, expected, source
from tests.support import (
    BOUND_S,
    own_client,
    persisted,
    result_of,
    spread,
    tls_client,
    used,
)
from tests.transports.clusters import transposed
from tests.transports.loopback import wait_until
from tests.usage import usage

DTYPES = ["f8", "?", "longdouble", "c16", "f2", "M8[ns]", "U3", "V7", [("a", "i1"), ("b", ">f8")]]


@pytest.mark.parametrize("transport", ["cma", "comm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_any_dtype(client, dtype, transport):
    x = np.zeros((300, 200), dtype)
    x.view("u1")[...] = np.random.default_rng(0).integers(0, 2, x.view("u1").shape)
    options = {"p2p.transports.order": [transport], "p2p.transports.part-bytes": "5 kB"}
    with dask.config.set(options):
        assert transposed(client, x, (70, 150)) == {transport}


def test_objects_go_another_way_without_a_warning(client):
    x = np.array([[1, "two"], [None, (4,)]] * 8, dtype=object)
    a = spread(client, da.from_array(x, chunks=(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = persisted(client, dask_p2p.transpose(a))
    assert y.compute().tolist() == x.T.tolist()
    assert used(client, y) == {"comm"}


def test_elements_that_lie_far_apart_go_another_way_without_a_warning(client):
    x = np.arange(100_000 * 8.0).reshape(100_000, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transposed(client, x, (25_000, 8), (2, -1)) == {"comm"}
    assert transposed(client, np.ones((400, 400)), (100, 400)) == {"cma"}, "it is still preferred"


def test_nothing_is_kept(client):
    a = spread(client, da.random.random((400, 300), chunks=(100, 300)))
    y = persisted(client, dask_p2p.transpose(a))
    assert used(client, y) == {"cma"}
    del a, y
    assert_nothing_is_held(client)


def forbid_reading(dask_worker):
    """Have the kernel refuse, as a security module may."""
    from dask_p2p.transports import process_memory

    process_memory.read = Mock(side_effect=PermissionError(1, "Operation not permitted"))


@pytest.mark.slow
def test_where_the_kernel_refuses_blocks_come_by_messages_and_check_says_so():
    x = np.arange(480.0).reshape(40, 12)
    with own_client() as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        client.run(forbid_reading)
        assert transposed(client, x, (10, 12)) == {"comm"}
        (problem,) = dask_p2p.check(client).problems
    assert "cma is not used: its memory may not be read" in problem.fault
    assert "SYS_PTRACE" in problem.cure


def test_a_tls_cluster():
    """Nothing leaves the host, as with `ipc`."""
    x = np.arange(480.0).reshape(40, 12)
    with tls_client() as client:
        assert transposed(client, x, (10, 12)) == {"cma"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_holder_that_ends_or_stands_still_while_it_is_read(how):
    """Reading needs nothing of a holder but that it is there: one that hangs does not matter."""
    shape = (60, 40)
    with own_client(3) as client:
        dask_p2p.register(client)
        a = spread(client, source(shape, (20, 40)))
        y = persisted(client, dask_p2p.transpose(a))  # all have met, and published their blocks
        del y
        reader, holder, _ = sorted(workers_of(client))
        (pid,) = client.run(os.getpid, workers=[holder]).values()

        def stop_it(pid, how, dask_worker):
            from dask_p2p.transports import process_memory

            real = process_memory.read

            def read(*args):
                os.kill(pid, how)
                process_memory.read = real
                return real(*args)

            process_memory.read = read

        client.run(stop_it, pid, how, workers=[reader])
        whole_block = dask_p2p.transpose(a, chunks=-1)
        z = client.compute(
            whole_block, workers=[reader], allow_other_workers=how == signal.SIGKILL, retries=0
        )
        try:
            np.testing.assert_array_equal(result_of(client, z), expected(shape).T)
        finally:
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)


def test_no_holder_is_asked_to_publish_what_another_task_will_read(client):
    """A worker's first task publishes all blocks that it has of the array, not its own sources."""
    a = np.arange(64 * 48.0).reshape(64, 48)
    x = spread(client, da.from_array(a, chunks=(4, 6)))

    def count(dask_worker):
        transport = dask_worker.plugins[PLUGIN_NAME].context.router.transports["cma"]
        held_count = sum(key[0] == x.name for key in dask_worker.data)
        return held_count, usage(transport)["published"] if held_count else 0

    y = spread(client, dask_p2p.rechunk(x, (16, 48)))  # a task on each worker
    for held_count, published in client.run(count).values():
        assert published >= held_count
    assert used(client, y) == {"cma"}
    np.testing.assert_array_equal(y.compute(), a)


def test_regions_are_copied_to_where_they_belong(client):
    """Where no axes are permuted and rows are long: no buffer is taken for them."""
    a = np.arange(80 * 200.0).reshape(80, 200)
    x = spread(client, da.from_array(a, chunks=(20, 100)))

    def buffer_bytes(dask_worker):
        return dask_worker.plugins[PLUGIN_NAME].context.router.transports["cma"].kept_bytes

    before = client.run(buffer_bytes)
    y = persisted(client, dask_p2p.rechunk(x, (40, 200)))
    assert used(client, y) == {"cma"}
    assert client.run(buffer_bytes) == before
    np.testing.assert_array_equal(y.compute(), a)
    np.testing.assert_array_equal(dask_p2p.rechunk(x, (40, 9)).compute(), a)  # short rows


CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
NO_FOLDERS = """
import errno, tempfile

def mkdtemp(*args, real=tempfile.mkdtemp, prefix=None, **kwargs):
    if prefix == "p2p-":
        raise OSError(errno.ENOSPC, "No space left on device", kwargs["dir"])
    return real(*args, prefix=prefix, **kwargs)

tempfile.mkdtemp = mkdtemp
"""


def warned(client):
    events = client.get_events("warn")
    return [pickle.loads(event["message"]) for _, event in events]


def setup_is_whole(dask_worker):
    plugin = dask_worker.plugins[PLUGIN_NAME]
    return plugin.context is not None and dask_worker.handlers.keys() >= {"p2p_comm_read"}


def test_workers_that_cannot_publish_are_read_by_messages():
    def texts():
        """Others come at any time, such as of workers that answer late on a busy machine."""
        every = [str(warning.message) for warning in caught]
        return [text for text in every if "cannot be set up" in text]

    with own_client() as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert transposed(client, expected((40, 12)), (10, 12), (3, -1)) == {"cma"}
        assert not warned(client)
        client.cluster.new_spec["options"]["preload"] = [NO_FOLDERS]
        client.cluster.scale(3)
        client.wait_for_workers(3, timeout=BOUND_S)
        assert all(client.run(setup_is_whole).values())
        assert transposed(client, expected((120, 12)), (10, 12), (3, -1)) == {"cma", "comm"}
        (text,) = warned(client)
        assert "cannot be set up: No space left on device" in text
        assert "--local-directory" in text
        wait_until(lambda: texts() == [text])


def test_more_blocks_than_a_worker_may_open_files(client):
    limits = client.run(resource.getrlimit, resource.RLIMIT_NOFILE)
    client.run(resource.setrlimit, resource.RLIMIT_NOFILE, (128, max(limits.values())[1]))
    assert transposed(client, expected((300, 8)), (1, 8), (2, -1)) == {"cma"}
    assert not warned(client)
    client.run(resource.setrlimit, resource.RLIMIT_NOFILE, max(limits.values()))
