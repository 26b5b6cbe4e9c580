"""Gangs with ranks on several hosts: kills, and interrupted networks between hosts."""

import os
import signal
import socket
import time
from contextlib import contextmanager, suppress

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from distributed import Security, wait

from dask_p2p import iterate, spmd
from dask_p2p.errors import SectionError
from dask_p2p.plugins.registration import register
from tests.faults.support import addresses, one_block_each
from tests.hosts.cluster import BOUND_S, HostsCluster
from tests.hosts.network import Network, obstacle
from tests.sections.support import endpoints_of_ucx, messenger_of, nothing_is_left, ranks_of
from tests.support import restart, result_of
from tests.transports.loopback import wait_until

WORKERS = 4
ATTEMPTS = 3
REQUEST_S = 1.0
X = np.arange(4000.0).reshape(4, 1000)
WIDE = np.arange(200_000.0) + np.arange(4.0)[:, None]  # so that messages are large

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(obstacle() is not None, reason=f"no hosts can be made: {obstacle()}"),
]


@contextmanager
def connected(folder, security=None):
    """A cluster over two hosts with two workers each, and its client."""
    with Network(3) as network:
        cluster = HostsCluster(network, folder, security, DASK_P2P__ATTEMPTS=str(ATTEMPTS))
        for host in cluster.worker_hosts:
            cluster.start_workers(host, "--nworkers", "2")
        with cluster.client() as client:
            client.wait_for_workers(WORKERS, timeout=BOUND_S)
            yield cluster, client


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    with connected(tmp_path_factory.mktemp("hosts")) as connection:
        yield connection


@pytest.fixture
def cluster(connection):
    return connection[0]


@pytest.fixture
def client(connection):
    _, client = connection
    client.wait_for_workers(WORKERS, timeout=BOUND_S)
    yield client
    nothing_is_left(client)


def laid_out(client, values=X):
    """An array with a row on each worker, so that ranks are there, too."""
    x = one_block_each(client, da.from_array(values, chunks=(1, -1)), addresses(client))
    wait(x)
    return x


def smooth(u, out):
    out[:] = (u[:-2] + u[2:]) / 2


def smoothed(steps, u=X):
    for _ in range(steps):
        u = (np.roll(u, 1, 0) + np.roll(u, -1, 0)) / 2
    return u


def stepping(ctx, x, path, steps=100):
    """Record each attempt, and continue until the test has done its step."""
    note_attempt(ctx, path)
    for _ in range(steps):
        x += ctx.allreduce(x.sum()) / 1e9
    while not is_done(ctx, path):
        time.sleep(0.02)
    return x


def note_attempt(ctx, path):
    if ctx.rank == 0:
        with open(path, "a") as file:
            file.write("attempt\n")


def is_done(ctx, path):
    """Return whether all ranks have noticed that the test called `done`."""
    return ctx.allreduce(int(os.path.exists(f"{path}.done")), "min") == 1


def let_end(path):
    path.with_name(f"{path.name}.done").touch()


def stepped(steps=100):
    x = X.copy()
    for _ in range(steps):
        x += sum(row.sum() for row in x.copy()) / 1e9
    return x


def attempts(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_ranks_on_two_hosts(client, cluster):
    before = [host.sent_bytes() for host in cluster.worker_hosts]
    y = iterate(smooth, laid_out(client), {0: 1}, 50)
    assert np.array_equal(y.compute(), smoothed(50))
    for host, sent in zip(cluster.worker_hosts, before, strict=True):
        assert host.sent_bytes() - sent > 50 * X[0].nbytes


def test_a_scheduler_that_stands_still_for_a_while(client, cluster, tmp_path):
    future = client.compute(spmd(stepping, laid_out(client), path=tmp_path / "runs"))
    wait_until(lambda: attempts(tmp_path / "runs") == 1)
    nsenter = psutil.Process(cluster.scheduler.pids[0])  # stops with its child processes
    for process in nsenter.children(recursive=True):
        process.suspend()
    let_end(tmp_path / "runs")
    time.sleep(3)
    for process in (*nsenter.children(recursive=True), nsenter):
        process.resume()
    assert np.array_equal(result_of(client, future), stepped())
    assert attempts(tmp_path / "runs") == 1
    future.release()


@pytest.mark.parametrize("is_mended", [True, False])
def test_hosts_that_cannot_reach_each_other(client, cluster, tmp_path, is_mended):
    """The scheduler still reaches both."""
    x, path = laid_out(client), tmp_path / "runs"
    # Time enough to mend it before the attempts are over, on a busy machine too.
    request_s = 5 * REQUEST_S if is_mended else REQUEST_S
    with dask.config.set({"p2p.timeouts.request": f"{request_s} s"}):
        y = spmd(stepping, x, path=path)
    future = client.compute(y)
    wait_until(lambda: attempts(path) == 1)
    time.sleep(0.2)
    began_s = time.monotonic()
    with cluster.network.parted(cluster.worker_hosts):
        let_end(path)
        if is_mended:
            wait_until(lambda: attempts(path) == 2, timeout_s=BOUND_S)
        else:
            with pytest.raises(
                SectionError, match=rf"{ATTEMPTS} attempts .* the connection to rank"
            ):
                result_of(client, future)
            assert time.monotonic() - began_s < 20 * ATTEMPTS * REQUEST_S
    if is_mended:
        assert np.array_equal(result_of(client, future), stepped())
    future.release()
    del x, y


def turned_and_back(ctx, x, times):
    """Exchange all with all, as a solver that alternates does."""
    for _ in range(times):
        columns = ctx.redistribute(x, [1])
        x = ctx.redistribute(columns + 1, [0], from_partition=[1])
    return x


def sent_by_both_networks(host):
    """UCX uses both at a time."""
    return sum(map(host.sent_bytes, (0, 1)))


@pytest.mark.parametrize("transport", ["comm", "ucx"])
def test_large_messages_by_ucx_if_that_is_enabled(client, cluster, transport):
    restart(client)
    wide = laid_out(client, WIDE)
    before = [sent_by_both_networks(host) for host in cluster.worker_hosts]
    with dask.config.set({"p2p.transports.order": [transport]}):
        smoothed_wide = iterate(smooth, wide, {0: 1}, 5)
        turned = spmd(turned_and_back, wide, times=3)
    np.testing.assert_array_equal(smoothed_wide.compute(), smoothed(5, WIDE))
    np.testing.assert_array_equal(turned.compute(), WIDE + 3)
    for host, sent in zip(cluster.worker_hosts, before, strict=True):
        assert sent_by_both_networks(host) - sent > (2 * 5 + 6) * WIDE[0].nbytes
    # To both workers of the other host, and none of the own one.
    expected = 2 if transport == "ucx" else 0
    assert [*client.run(endpoints_of_ucx).values()] == [expected] * WORKERS
    del wide, smoothed_wide, turned


def turning(ctx, x, path):
    """As `stepping`, with large messages."""
    note_attempt(ctx, path)
    x = turned_and_back(ctx, x, 100)
    while not is_done(ctx, path):
        turned_and_back(ctx, x, 1)
    return x


@pytest.mark.parametrize(
    ("function", "values", "expected", "transport"),
    [
        (stepping, X, stepped(), "auto"),
        (turning, WIDE, WIDE + 100, ["comm"]),
        (turning, WIDE, WIDE + 100, ["ucx"]),
    ],
    ids=["little", "much by comm", "much by ucx"],
)
def test_a_worker_on_another_host_dies(client, tmp_path, function, values, expected, transport):
    x, path = laid_out(client, values), tmp_path / "runs"
    with dask.config.set({"p2p.transports.order": transport}):
        future = client.compute(spmd(function, x, path=path))
    wait_until(lambda: attempts(path) == 1)
    time.sleep(0.2)
    victims = addresses(client)[-1:]
    client.run(signal.raise_signal, signal.SIGKILL, workers=victims, on_error="ignore")
    let_end(path)
    np.testing.assert_array_equal(result_of(client, future), expected)
    assert attempts(path) > 1
    future.release()
    del x


def test_ucx_connects_to_a_lost_host_without_blocking_other_messages(client, cluster):
    """The default of UCX connects in the thread that drives all messages of the process."""
    near, far = (addresses(client)[number] for number in (0, -1))
    hosts = [cluster.worker_hosts[1].address(network) for network in (0, 1)]

    async def address(dask_worker):
        return (await messenger_of(dask_worker)).address

    def meet(host):  # so that packets get lost, instead of no way to the host at all
        with suppress(ConnectionRefusedError):
            socket.create_connection((host, 9)).close()

    async def send(dask_worker, to):
        messenger = await messenger_of(dask_worker)
        lost = messenger.send(to, np.zeros(1 << 20, np.uint8), 1 << 61, other_host=True)
        received = np.zeros(8, np.uint8)
        message = messenger.receive(received, tag=1 << 60)
        messenger.send(messenger.address, np.arange(8, dtype=np.uint8), 1 << 60)
        message.result(BOUND_S)
        is_lost = not lost.is_complete
        messenger.forget(to)
        return is_lost, received

    register(client)
    to = client.run(address, workers=[far])[far]
    for host in hosts:
        client.run(meet, host, workers=[near])
    with cluster.network.parted(cluster.worker_hosts):
        is_lost, received = client.run(send, to=to, workers=[near])[near]
    assert is_lost
    assert received.tolist() == [*range(8)]
    restart(client)  # processes that have not sent messages by UCX


def test_the_network_fails_while_ranks_compute_between_large_messages(client, cluster, tmp_path):
    """No further header arrives, and UCX waits for messages that never come."""
    wide, path = laid_out(client, WIDE), tmp_path / "exchanged"

    def function(ctx, x):
        columns = ctx.redistribute(x, [1])
        path.touch()
        wait_until(lambda: os.path.exists(f"{path}.done"))
        return ctx.redistribute(columns, [0], from_partition=[1])

    options = {"p2p.timeouts.request": f"{REQUEST_S} s", "p2p.transports.order": ["ucx"]}
    with dask.config.set(options):
        future = client.compute(spmd(function, wide))
    wait_until(path.exists)
    began_s = time.monotonic()
    with cluster.network.parted(cluster.worker_hosts):
        let_end(path)
        with pytest.raises(SectionError, match=rf"{ATTEMPTS} attempts .* the connection to rank"):
            result_of(client, future)
        assert time.monotonic() - began_s < 20 * ATTEMPTS * REQUEST_S
    future.release()
    del wide


def test_encrypted_connections(tmp_path):
    def protocol(dask_worker):
        return ranks_of(dask_worker).reach.protocol

    with connected(tmp_path, Security.temporary()) as (_, client):
        y = iterate(smooth, laid_out(client), {0: 1}, 50)
        assert np.array_equal(y.compute(), smoothed(50))
        assert {*client.run(protocol).values()} == {"tls"}
        del y
        nothing_is_left(client)
