"""Dask's fine performance metrics have transfers and kernels apart."""

from __future__ import annotations

from types import SimpleNamespace

import dask.array as da
import pytest
from distributed import performance_report
from distributed.metrics import context_meter

import dask_p2p
from dask_p2p.monitoring.metrics import meter, record_transfer
from dask_p2p.monitoring.records import Stage, TaskRecord
from tests.support import persisted, spread
from tests.transports.loopback import wait_until


def test_reports_have_the_time_of_transfers(client, tmp_path):
    pytest.importorskip("bokeh")
    x = spread(client, da.ones((64, 48), chunks=(16, 48)))
    dask_p2p.register(client)
    group = "p2p-transpose"

    def counted_s():
        return client.run_on_scheduler(
            lambda dask_scheduler: dict(dask_scheduler.task_prefixes[group].all_durations)
        )

    with performance_report(tmp_path / "report.html"):
        y = persisted(client, dask_p2p.transpose(x))
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "transfer time: " in text
    (run,) = dask_p2p.last_runs(client, n=1)
    assert run.name == y.name
    waited_s = sum(stage.waited_s for record in run.made for stage in record.stages)
    assert counted_s()["transfer"] >= 0.9 * waited_s > 0


def test_kernels_that_run_at_a_time_count_no_longer_than_their_thread():
    metrics = {}

    def note(label, value, unit):
        metrics[label, unit] = value

    with context_meter.add_callback(note):
        meter(TaskRecord(("x", 0), 10.0, 12.0, kernel_s=3.0))
    assert metrics["p2p-kernel", "seconds"] == 2.0


def test_a_transfer_has_the_time_of_the_scheduler():
    key, task = ("x", 0), SimpleNamespace(startstops=[])
    worker = SimpleNamespace(state=SimpleNamespace(tasks={key: task}), scheduler_delay=5.0)
    stage = Stage("b", "comm", 8, waited_s=1.0, begun_s=0.5)
    record_transfer(worker, TaskRecord(key, 10.0, 12.0, (stage,)))
    assert task.startstops == [{"action": "transfer", "start": 15.5, "stop": 16.5}]


MOVED = ("p2p-transfer", "bytes")


def executed(client, name):
    """Dask's sums of the metrics of tasks, by activity and unit."""
    metrics = client.run_on_scheduler(
        lambda dask_scheduler: dict(dask_scheduler.cumulative_worker_metrics)
    )
    return {key[2:]: value for key, value in metrics.items() if key[:2] == ("execute", name)}


def moved_bytes(name, dask_worker):
    """Bytes in the metrics of a worker's tasks, whether the scheduler has them or not."""
    totals = dask_worker.digests_total.items()
    return sum(value for metric, value in totals if metric[2:] == (name, *MOVED))


def wait_for_heartbeats(client, name):
    """Wait until the scheduler has all metrics: a heartbeat may be on its way for some time."""

    def has_all():
        return executed(client, name).get(MOVED, 0) == sum(client.run(moved_bytes, name).values())

    wait_until(has_all)


def test_the_scheduler_has_them(client):
    x = spread(client, da.ones((64, 48), chunks=(16, 48)))
    name = "p2p-transpose"
    dask_p2p.register(client)
    wait_for_heartbeats(client, name)
    before = executed(client, name)
    y = persisted(client, dask_p2p.transpose(x))
    (run,) = dask_p2p.last_runs(client, n=1)
    assert run.name == y.name

    def added(*labels):
        return executed(client, name).get(labels, 0) - before.get(labels, 0)

    wait_for_heartbeats(client, name)
    wait_until(lambda: added(*MOVED) == run.least_bytes)
    stages = [stage for record in run.made for stage in record.stages]
    kernel_s = sum(r.kernel_s for r in run.made) + sum(stage.kernel_s for stage in stages)
    waited_s = sum(stage.waited_s for stage in stages)
    assert added("p2p-kernel", "seconds") == pytest.approx(kernel_s)
    assert added("p2p-transfer", "seconds") == pytest.approx(waited_s)
    spent_s = sum(record.stop_s - record.start_s for record in run.made)
    activities = ("p2p-kernel", "p2p-transfer", "thread-cpu", "thread-noncpu")
    assert sum(added(activity, "seconds") for activity in activities) >= 0.9 * spent_s
