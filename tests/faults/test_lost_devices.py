"""Workers whose GPU is lost while tasks run, as far as that can be tested without a GPU."""

import os
import time

import pytest
from distributed import get_worker

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import DeviceLostError
from tests.faults.support import BOUND_S, addresses, cluster_of, pid_of
from tests.transports.loopback import wait_until


def lose_device(dask_worker):
    """Find the GPU lost, as a thread does that serves other workers."""
    host = dask_worker.plugins[PLUGIN_NAME].context
    assert host.on_device_lost(DeviceLostError("the GPU of this process works no more"))


def break_device(gone_addresses=()):
    wait_until(lambda: all(map(os.path.exists, gone_addresses)))  # these run, too
    lose_device(get_worker())
    time.sleep(0.05)  # its own error comes later
    raise RuntimeError("illegal memory access")


def outlast_device(path):
    """Run for long on the first worker; return the process' number on the next one."""
    if not os.path.exists(path):
        with open(path, "x"):
            time.sleep(BOUND_S)
    return os.getpid()


def note_and_return(path):
    with open(path, "x"):
        return os.getpid()


def test_the_task_that_broke_it_reports_it():
    with cluster_of(2) as client:
        victim = addresses(client)[0]
        pid = pid_of(client, victim)
        broken = client.submit(break_device, workers=[victim], pure=False)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            broken.result(timeout=BOUND_S)
        wait_until(lambda: pid not in client.run(os.getpid, on_error="return").values(), BOUND_S)


def test_tasks_beside_it_run_again(tmp_path):
    """They do not wait for the end of these tasks, and do not fail with the task that broke it."""
    path = str(tmp_path / "began")
    with cluster_of(2, threads_per_worker=2) as client:
        victim = addresses(client)[0]
        pid = pid_of(client, victim)
        placement = {"workers": [victim], "allow_other_workers": True, "pure": False}
        neighbour = client.submit(outlast_device, path, **placement)
        broken = client.submit(break_device, [path], **placement)
        began_s = time.monotonic()
        assert neighbour.result(timeout=BOUND_S) != pid
        assert time.monotonic() - began_s < BOUND_S / 2
        with pytest.raises(RuntimeError, match="illegal memory access"):
            broken.result(timeout=BOUND_S)


@pytest.mark.slow
def test_nothing_begins_on_it(tmp_path):
    """A thread is free for it, while the task of another one may still report it."""
    path = str(tmp_path / "began")
    with cluster_of(1, threads_per_worker=2) as client:
        (victim,) = addresses(client)
        pid = pid_of(client, victim)
        first = client.submit(outlast_device, str(tmp_path / "first"), pure=False)
        wait_until(lambda: (tmp_path / "first").exists(), BOUND_S)
        client.run(lose_device, workers=[victim])
        second = client.submit(note_and_return, path, pure=False)
        assert pid not in client.gather([first, second]), "which fails where it runs again"
