import signal

import dask
import pytest
from distributed import Client, LocalCluster

from dask_p2p.cli import own_cluster, wait_for_worker
from dask_p2p.cli.files import stoppable
from dask_p2p.errors import P2PError


def fail_when_closed(dask_worker):
    async def close(**kwargs):
        closed = await original(**kwargs)
        dask_worker.loop.add_callback(fail)
        return closed

    original, dask_worker.close = dask_worker.close, close


def fail():
    raise RuntimeError("ConnectionPool is closed")


@pytest.mark.cluster
def test_processes_of_an_own_cluster_log_nothing(capfd):
    """A heartbeat that the cluster's end cuts off fails so, when the worker is silent no more."""
    # What is forked off a server of other tests writes where that server writes.
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
        own_cluster(1, gpus=False) as client,
    ):
        client.run(fail_when_closed)
    assert capfd.readouterr() == ("", "")


def test_a_scheduler_without_workers(monkeypatch):
    monkeypatch.setattr("dask_p2p.cli.WORKERS_S", 0.2)
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(P2PError, match="has no workers"),
    ):
        wait_for_worker(client)


def test_the_second_ctrl_c_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def unhandled():
    """SIGHUP that does not end the tests: counts those that nothing else has handled."""
    count = []
    before = signal.signal(signal.SIGHUP, lambda *_: count.append(1))
    yield count
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_more_than_once(unhandled):
    with stoppable() as stopped:
        signal.raise_signal(signal.SIGHUP)
        assert stopped()
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert unhandled == []
    signal.raise_signal(signal.SIGHUP)
    assert unhandled == [1], "the handler of before is back"
