"""Workers that cannot publish descriptors, or have few file descriptors of the system's left."""

from __future__ import annotations

import pickle
import resource
import warnings

import dask.array as da
import numpy as np

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from tests.support import BOUND_S, indexed, own_client, spread, used
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}
NO_FOLDERS = """
import errno, tempfile

def mkdtemp(*args, real=tempfile.mkdtemp, prefix=None, **kwargs):
    if prefix == "p2p-":
        raise OSError(errno.ENOSPC, "No space left on device", kwargs["dir"])
    return real(*args, prefix=prefix, **kwargs)

tempfile.mkdtemp = mkdtemp
"""


def transposed(client, shape, chunks):
    """Transpose an array whose blocks are on all workers, to all of them; return transports."""
    x = indexed(shape, float)
    a = spread(client, da.from_array(x, chunks))
    y = spread(client, dask_p2p.transpose(a, chunks=(shape[1] // 4, -1)))
    np.testing.assert_array_equal(y.compute(), x.T)
    return used(client, y)


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
        assert transposed(client, (40, 12), (10, 12)) == {"cma"}
        assert not warned(client)
        client.cluster.new_spec["options"]["preload"] = [NO_FOLDERS]
        client.cluster.scale(3)
        client.wait_for_workers(3, timeout=BOUND_S)
        assert all(client.run(setup_is_whole).values())
        assert transposed(client, (120, 12), (10, 12)) == {"cma", "comm"}
        (text,) = warned(client)
        assert "cannot be set up: No space left on device" in text
        assert "--local-directory" in text
        wait_until(lambda: texts() == [text])


def test_more_blocks_than_a_worker_may_open_files(client):
    limits = client.run(resource.getrlimit, resource.RLIMIT_NOFILE)
    client.run(resource.setrlimit, resource.RLIMIT_NOFILE, (128, max(limits.values())[1]))
    assert transposed(client, (300, 8), (1, 8)) == {"cma"}
    assert not warned(client)
    client.run(resource.setrlimit, resource.RLIMIT_NOFILE, max(limits.values()))
