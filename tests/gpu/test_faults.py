"""Faults on GPUs: workers that die."""

import os
import signal
from contextlib import contextmanager

import dask
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from tests.faults.support import BOUND_S, addresses, count_resources, one_block_each, set_trap
from tests.gpu.support import assert_right, gpu_client
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.gpu(2)


SHAPE = (4000, 4000)
PARTS = {  # of 4 MiB: four of each region
    "p2p.transports.ipc.staging-bytes": "12 MiB",
    "p2p.transports.part-bytes": "4 MiB",
}
HOLDER = {
    "ipc": {"publishing": ("publishing", 1)},
    "ucx": {"sending the first part": ("sending", 1), "sending the last part": ("sending", 4)},
}
READER = {
    "before its first pull": ("started", 1),
    "with the first part": ("placed", 1),
    "with the third part": ("placed", 3),
    "with all parts": ("complete", 1),
}
MOMENTS = [
    pytest.param(transport, *moment, id=f"{transport}, {name}")
    for transport, of_holder in HOLDER.items()
    for name, moment in {**of_holder, **READER}.items()
]


@contextmanager
def three_workers(transport):
    """Two workers that hold and make a block each, on a GPU each, and a third worker."""
    settings = PARTS | {"p2p.transports.order": [transport]}
    settings |= {"distributed.scheduler.work-stealing": False}
    with dask.config.set(settings), gpu_client() as client:
        workers = addresses(client)
        # dask-cuda makes one worker for each device, of which this is another name.
        client.cluster.worker_spec["bystander"] = dict(min(client.cluster.worker_spec.items())[1])
        client.cluster.scale(3)
        client.wait_for_workers(3, timeout=BOUND_S)
        (bystander,) = set(addresses(client)) - set(workers)
        dask_p2p.register(client)
        x = indexed_array(SHAPE, (2000, 4000), "f4", kind="cupy")
        x = one_block_each(client, x, workers)
        wait(x)
        yield client, x, workers, bystander


def assert_flat(client):
    """Only mappings are kept, while their holders live."""
    mapped = len(addresses(client)) - 1
    wait_until(
        lambda: all(
            counts.pop("ipc.mapped") <= mapped and not any(counts.values())
            for counts in count_resources(client).values()
        ),
        BOUND_S,
    )


@pytest.mark.parametrize("how", ["kill", "close"])
@pytest.mark.parametrize(("transport", "moment", "number"), MOMENTS)
def test_a_holder_or_a_reader_ends(transport, moment, number, how):
    with three_workers(transport) as (client, x, workers, _):
        victim = workers[1]
        client.run(set_trap, moment, number, how, workers=[victim])
        y = client.persist(dask_p2p.transpose(x), workers=workers, allow_other_workers=True)
        assert_right(client, y, SHAPE)
        wait_until(lambda: victim not in addresses(client), BOUND_S)
        assert_right(client, y, SHAPE)  # also what was in memory when it was lost
        del x, y
        assert_flat(client)


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_a_bystander_is_killed(transport):
    with three_workers(transport) as (client, x, workers, bystander):
        (pid,) = client.run(os.getpid, workers=[bystander]).values()
        client.run(set_trap, "placed", 1, "kill", pid, workers=workers[:1])
        y = client.persist(dask_p2p.transpose(x), workers=workers, allow_other_workers=True)
        assert_right(client, y, SHAPE)
        wait_until(lambda: bystander not in addresses(client), BOUND_S)
        del x, y
        assert_flat(client)


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_killed_after_the_result_is_done(transport):
    with three_workers(transport) as (client, x, workers, _):
        y = client.persist(dask_p2p.transpose(x), workers=workers)
        wait(y)
        assert {worker for who in client.who_has(y).values() for worker in who} == set(workers)
        (pid,) = client.run(os.getpid, workers=workers[1:]).values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: workers[1] not in addresses(client), BOUND_S)
        assert_right(client, y, SHAPE)
        del x, y
        assert_flat(client)
