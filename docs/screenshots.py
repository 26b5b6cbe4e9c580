"""Make the pictures of the dashboard page from real runs.

Run the first command on the machine of the runs, and the second on a machine with Chromium and its
driver, both from the root of the repository::

    PYTHONPATH=. python docs/screenshots.py record RECORDS [--gpus]
    PYTHONPATH=. python docs/screenshots.py draw RECORDS p2p-page

The second command writes ``docs/images/p2p-page.png``, and ``p2p-page-dark.png`` for dark pages.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.records import packed, unpacked
from dask_p2p.monitoring.runs import fetch_records, runs_of
from tests.browser import chromium, until, visit

RUNS = 5  # in a picture: the last four of `compute`, and the running `iterate`
IMAGES = Path(__file__).parent / "images"
SIZE = (1700, 860)


@click.group()
def main() -> None:
    """Make the pictures of the dashboard page."""


@main.command()
@click.argument("records", type=click.Path(path_type=Path))
@click.option("--gpus", is_flag=True, help="On GPUs, and larger.")
@click.option("--side", type=int, help="Rows and columns of the array.")
@click.option("--steps", type=int, help="Steps of the last run.")
def record(
    records: Path, gpus: bool, side: int | None, steps: int | None
) -> None:
    """Run the operations, and write their records while the last one runs."""
    side = side or (32_768 if gpus else 8_000)
    steps = steps or (1_000 if gpus else 50)
    with (
        dask_p2p.local_cluster(gpus=gpus) as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        field = compute(client, side, len(client.nthreads()), gpus)
        running = client.persist(
            dask_p2p.iterate(heat, field, {0: 1}, steps=steps)
        )
        while True:
            task_records = client.sync(fetch_records, client, RUNS)
            if runs_of(task_records)[0].steps > 0.6 * steps:
                break
            time.sleep(0.02)
        records.write_bytes(packed(task_records))
        wait(running)


def compute(
    client: Client, side: int, workers: int, gpus: bool
) -> da.Array:
    """Run time steps, a rechunk and three transposes, one by messages. Return the field."""
    with dask.config.set(
        {"array.backend": "cupy" if gpus else "numpy"}
    ):
        x = da.random.random((side, side), chunks=(side // workers, -1))
    for _ in range(2):  # the first time is a warm-up
        x = client.persist(x + 1)
        wait(x)
        field = client.persist(x[:, : side // 8])
        runs = [dask_p2p.iterate(heat, field, {0: 1}, steps=20)]
        runs += [dask_p2p.rechunk(x, (-1, side // workers))]
        with dask.config.set({"p2p.transports.order": ["comm"]}):
            runs += [dask_p2p.transpose(x)]
        runs += [
            dask_p2p.transpose(x),
            dask_p2p.transpose(x, chunks=(side // workers // 2, -1)),
        ]
        for y in runs:
            wait(client.persist(y))
    return field


def heat(u, out):
    """Diffuse along the rows."""
    out[...] = 0.5 * u[1:-1] + 0.25 * (u[2:] + u[:-2])


@main.command()
@click.argument("records", type=click.Path(exists=True, path_type=Path))
@click.argument("name")
def draw(records: Path, name: str) -> None:
    """Show the records on a dashboard, and save the page in both themes."""
    IMAGES.mkdir(exist_ok=True)
    no_workers = {
        "n_workers": 0,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
    }
    with (
        LocalCluster(**no_workers) as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as profile,
        chromium(profile, SIZE) as driver,
    ):
        dask_p2p.register(client)
        store = cluster.scheduler.plugins[PLUGIN_NAME]._records
        store.add("recorded", 0, unpacked(records.read_bytes()))
        page = (
            f"http://127.0.0.1:{cluster.scheduler.http_server.port}/p2p"
        )
        for theme, suffix in (("light", ""), ("dark", "-dark")):
            visit(driver, f"{page}?theme={theme}")
            until(
                driver,
                "return Bokeh.documents[0].get_model_by_name('p2p-runs').data.name.length",
            )
            driver.execute_script(
                "Bokeh.documents[0].get_model_by_name('p2p-tabs').active = 0"
            )
            time.sleep(1)  # until the page is complete
            driver.save_screenshot(str(IMAGES / f"{name}{suffix}.png"))


if __name__ == "__main__":
    main()
