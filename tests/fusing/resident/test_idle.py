"""Resident gangs between two calls: other work of Dask, and clients that never end."""

import subprocess
import sys
from operator import neg

import dask
import pytest
from distributed import wait

import dask_p2p
from tests.fusing.programs import array, same_bits
from tests.fusing.resident.test_client import queues_on
from tests.fusing.support import smoothed
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "resources": {"GPU": 1}}


def available(dask_worker):
    return dask_worker.state.available_resources["GPU"]


def are_back(client, number):
    """Wait until each worker has a number of units that no task holds."""
    wait_until(lambda: {*client.run(available).values()} == {number})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_resources_are_lent_between_two_calls(client, ranks):
    x = array()
    step = dask_p2p.compile(smoothed, x, ranks=ranks)
    with dask.config.set({"p2p.sections.resident-idle": "200 ms"}):
        with dask.annotate(resources={"GPU": 1}):
            gang = step.resident(x)
        with gang as run:
            u = run(x)
            for number in range(2, 5):
                assert same_bits(run.fetch(u), smoothed(x, number - 1).compute())
                futures = [
                    client.submit(neg, k, pure=False, resources={"GPU": 1}) for k in range(4)
                ]
                wait(futures, timeout=BOUND_S)
                assert client.gather(futures) == [0, -1, -2, -3]
                warm = smoothed(x)
                with dask.annotate(resources={"GPU": 1}):
                    warm = dask_p2p.fused(warm)
                assert same_bits(warm.compute(optimize_graph=False), smoothed(x).compute())
                u = run(u)
            assert same_bits(run.fetch(u), smoothed(x, 4).compute())
    del u, warm, futures
    nothing_is_left(client)
    are_back(client, 1)


def test_a_gang_that_is_busy_keeps_its_resources(client):
    x = array()
    step = dask_p2p.compile(smoothed, x)
    with dask.annotate(resources={"GPU": 1}):
        gang = step.resident(x)
    with gang as run:
        run.fetch(run(x))
        are_back(client, 0)
        task = client.submit(neg, 1, resources={"GPU": 1})
        assert same_bits(run.fetch(run(x)), smoothed(x).compute())
        assert task.status == "pending"
    assert task.result(BOUND_S) == -1
    del task


NOTEBOOK = """
import sys
import dask
import dask.array as da
import dask_p2p
from distributed import Client

client = Client(sys.argv[1])
x = da.ones((16, 16), chunks=(4, 16))
step = dask_p2p.compile(lambda u: u[::-1] + 1, x)
dask.config.set({"p2p.sections.resident-idle": "0.2 s"})
with dask.annotate(resources={"GPU": 1}):
    run = step.resident(x)
run.__enter__()
u = run(x)
print(run.fetch(u).sum(), flush=True)
for line in sys.stdin:
    u = run(u)
    print(run.fetch(u).sum(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_notebook_that_never_leaves_the_context(client, tmp_path, end):
    path = tmp_path / "notebook.py"
    path.write_text(NOTEBOOK)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, path, client.scheduler.address], **pipes) as notebook:
        assert float(notebook.stdout.readline()) == 2 * 256
        for number in (3, 4):  # others have the workers in between
            tasks = [client.submit(neg, k, pure=False, resources={"GPU": 1}) for k in range(4)]
            wait(tasks, timeout=BOUND_S)
            y = smoothed(array())
            assert same_bits(y.compute(), y.compute(scheduler="sync"))
            notebook.stdin.write("again\n")
            notebook.stdin.flush()
            assert float(notebook.stdout.readline()) == number * 256
        notebook.kill() if end == "kill" else notebook.stdin.close()
    wait_until(lambda: not any(client.run(queues_on).values()))
    del tasks
    nothing_is_left(client)
    are_back(client, 1)
