"""Dask's fine performance metrics have transfers and kernels apart."""

from __future__ import annotations

import dask.array as da
import pytest
from distributed import performance_report
from distributed.metrics import context_meter

import dask_p2p
from dask_p2p.monitoring.metrics import meter
from dask_p2p.monitoring.records import TaskRecord
from tests.support import persisted, spread
from tests.transports.loopback import wait_until


def test_kernels_that_run_at_a_time_count_no_longer_than_their_thread():
    metrics = {}

    with context_meter.add_callback(lambda *metric: metrics.update({metric[::2]: metric[1]})):
        meter(TaskRecord(("x", 0), 10.0, 12.0, kernel_s=3.0))
    assert metrics["p2p-kernel", "seconds"] == 2.0


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


def test_the_scheduler_and_reports_have_them(client, tmp_path):
    pytest.importorskip("bokeh")
    x = spread(client, da.ones((64, 48), chunks=(16, 48)))
    name = "p2p-transpose"
    dask_p2p.register(client)
    wait_for_heartbeats(client, name)
    before = executed(client, name)
    with performance_report(tmp_path / "report.html"):
        y = persisted(client, dask_p2p.transpose(x))
    assert "transfer time: " in (tmp_path / "report.html").read_text("utf-8")
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
    durations_s = client.run_on_scheduler(
        lambda dask_scheduler: dict(dask_scheduler.task_prefixes[name].all_durations)
    )
    assert durations_s["transfer"] >= 0.9 * waited_s > 0
    spent_s = sum(record.stop_s - record.start_s for record in run.made)
    activities = ("p2p-kernel", "p2p-transfer", "thread-cpu", "thread-noncpu")
    assert sum(added(activity, "seconds") for activity in activities) >= 0.9 * spent_s
