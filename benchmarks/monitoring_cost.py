"""What records, metrics and whoever looks at them cost a transpose.

``python benchmarks/monitoring_cost.py --size 8192`` transposes the same array again and again on
four workers, or with ``--gpus`` on as many GPUs as ``--workers`` says: in turn without any of it
(`bare`), with what a worker always does (`recorded`), and while somebody looks twice a second, as
an open page does (`watched`). A round has one run of each; the order turns from round to round. A
ratio is the median over the rounds of a way's time over that of `bare` in the same round, with the
95 % interval that resampling of the rounds gives. Beside the time that a user sees there is the
time of the workers' processors: it tells more where the machine has other work too.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

Row = dict[str, Any]

WAYS = ("bare", "recorded", "watched")
LOOK_S = 0.5
SETTLE_S = 0.01
SAMPLES = 2000
NOTHING = nullcontext()


def switch(on: bool, dask_worker: Any) -> None:
    """Have a worker do what it does for monitoring, or leave it all out."""
    from dask_p2p import task
    from dask_p2p.backends.device_queue import DeviceQueue
    from dask_p2p.backends.host_queue import HostQueue
    from dask_p2p.monitoring.counters import COUNTERS_METRIC
    from dask_p2p.monitoring.ranges import Ranges
    from dask_p2p.reads import OpenRead
    from dask_p2p.worker_context import DaskWorkerContext

    def untimed(queue: Any, timer: Any) -> Any:
        return NOTHING

    without = {
        (task, "_ended"): lambda key, *args, **kwargs: key,
        (DaskWorkerContext, "record"): lambda self, key: self.forget_attempts(key),
        (HostQueue, "timing"): untimed,
        (DeviceQueue, "timing"): untimed,
        (OpenRead, "timed"): lambda self, wait, *args: wait(*args),
        (Ranges, "__call__"): lambda self, *words: NOTHING,
    }
    kept = dask_worker.__dict__.setdefault("_monitoring", {})
    for (owner, name), replacement in without.items():
        kept.setdefault((owner, name), owner.__dict__[name])
        setattr(owner, name, kept[owner, name] if on else replacement)
    metric = kept.setdefault("metric", dask_worker.metrics.get(COUNTERS_METRIC))
    others = {key: of for key, of in dask_worker.metrics.items() if key != COUNTERS_METRIC}
    dask_worker.metrics = {**others, COUNTERS_METRIC: metric} if on else others


@contextmanager
def looking(client: Any) -> Iterator[None]:
    """Fetch new records twice a second, as the scheduler does for a page."""
    import dask_p2p

    ended = threading.Event()

    def look() -> None:
        ended.wait(random.uniform(0, LOOK_S))  # or each measurement would begin with a look
        while not ended.is_set():
            dask_p2p.last_runs(client, n=3)
            ended.wait(LOOK_S)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_once(client: Any, x: Any) -> float:
    """Transpose once; return the seconds until all blocks are there."""
    import dask_p2p
    from dask_p2p.measure import wait_for_blocks

    start_s = time.perf_counter()
    y = client.persist(dask_p2p.transpose(x))
    wait_for_blocks(y)
    stop_s, name = time.perf_counter(), y.name
    del y  # or the next run would find its blocks
    while client.run_on_scheduler(is_there, name):
        time.sleep(SETTLE_S)
    return stop_s - start_s


def is_there(name: str, dask_scheduler: Any) -> bool:
    """Tell whether a scheduler still has tasks of an array."""
    group = dask_scheduler.task_groups.get(name)
    return group is not None and any(count for state, count in group.states.items()
                                     if state != "forgotten")  # fmt: skip


def measured(client: Any, x: Any, rounds: int, runs: int) -> dict[str, Row]:
    """Return the seconds of each round, by way: the median run, and the processors' of all runs."""
    rows: dict[str, Row] = {way: {"times_s": [], "cpu_s": []} for way in WAYS}
    for number in range(-1, rounds):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            client.run(switch, way != "bare")
            before_s = sum(client.run(time.process_time).values())
            with looking(client) if way == "watched" else nullcontext():
                seconds = [run_once(client, x) for _ in range(runs)]
            spent_s = sum(client.run(time.process_time).values()) - before_s
            if number >= 0:  # the first round warms up
                rows[way]["times_s"].append(statistics.median(seconds))
                rows[way]["cpu_s"].append(spent_s)
    client.run(switch, True)
    return rows


def ratio(times_s: Sequence[float], bare_s: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of paired ratios, and the ends of its 95 % interval."""
    ratios = [time_s / other_s for time_s, other_s in zip(times_s, bare_s, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(SAMPLES))
    low, high = medians[int(0.025 * SAMPLES)], medians[int(0.975 * SAMPLES)]
    return statistics.median(ratios), low, high


@click.command()
@click.option("--size", default=4096, show_default=True, help="Rows, and columns.")
@click.option("--dtype", default="float64", show_default=True)
@click.option("--blocks", default=1, show_default=True, help="Slabs a worker.")
@click.option("--rounds", default=40, show_default=True)
@click.option("--runs", default=3, show_default=True, help="Of each way in a round.")
@click.option("--workers", type=int, help="[default: 4, or one for each GPU]")
@click.option("--gpus", is_flag=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False))
def main(size: int, dtype: str, blocks: int, rounds: int, runs: int, workers: int | None,
         gpus: bool, json_path: str | None) -> None:  # fmt: skip
    """Measure, and print the ratios."""
    import numpy as np
    from distributed import Client

    import dask_p2p
    from dask_p2p.indexed import indexed_array
    from dask_p2p.measure import place_blocks

    with dask_p2p.local_cluster(workers, gpus=gpus) as cluster, Client(cluster) as client:
        dask_p2p.register(client)
        count = blocks * len(client.nthreads())
        chunks = (-(-size // count), size)
        kind = "cupy" if gpus else "numpy"
        shape = (size, size)
        x = place_blocks(client, lambda: indexed_array(shape, chunks, np.dtype(dtype), kind))
        rows = measured(client, x, rounds, runs)
        last = dask_p2p.last_runs(client, n=1)[0]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{size} x {size} {dtype} in {count} slabs by {last.transports}, load {load:.1f}")
    print(f"{'':9}    wall ms   ratio to bare              processor ms   ratio to bare")
    for way, row in rows.items():
        text = f"{way:9}"
        for name in ("times_s", "cpu_s"):
            row[f"{name[:-2]}_ratio"] = middle, low, high = ratio(row[name], rows["bare"][name])
            median_ms = statistics.median(row[name]) * 1e3
            text += f"{median_ms:11.2f}   {middle:.4f} ({low:.4f} to {high:.4f})"
        print(text)
    if json_path is not None:
        Path(json_path).write_text(json.dumps({"size": size, "load": load, "ways": rows}, indent=1))


if __name__ == "__main__":
    main()
