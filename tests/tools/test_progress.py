"""The line that shows how far running arrays have come; reports of ranks that wait."""

import io
import os
import re
import threading
import time
from logging.handlers import BufferingHandler

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from dask.utils import format_bytes
from distributed import Client, futures_of

from dask_p2p import iterate, last_runs, map_overlap, progress, rechunk, spmd, stalled, transpose
from dask_p2p.errors import InputError
from dask_p2p.sections.wire import point_to_point as waits
from dask_p2p.tools import progress as progress_bar
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

X = np.arange(40.0).reshape(8, 5)


@pytest.fixture
def client(client):
    """A client, once no section of an earlier test runs: the line is of any that does."""
    wait_until(lambda: not any(run.under_way for run in last_runs(client)))
    return client


class Texts(io.StringIO):
    """The file of a line, which leaves a file for each of some texts that it has shown."""

    def __init__(self, folder, *texts):
        super().__init__()
        self.folder, self.texts = folder, texts

    def write(self, written):
        for text in self.texts:
            if text in written:
                (self.folder / text).touch()
        return super().write(written)


def shown(text):
    return [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) steps", text)]


def wait_for_line(u, at, folder):
    """A step that waits at some numbers of steps until the line has shown them."""
    if at.step in (50, 100):
        wait_until((folder / f"{at.step} of 150 steps").exists)
    return u + 1


def slow(u):
    time.sleep(0.02)
    return u + 1


def test_it_moves_until_the_result_is_there(client, monkeypatch, tmp_path):
    monkeypatch.setattr(progress_bar, "_LOOK_S", 0.1)
    file = Texts(tmp_path, "50 of 150 steps", "100 of 150 steps")
    fields = {"u": da.from_array(X, chunks=4)}
    y = iterate(wait_for_line, fields, 0, 150, ranks=2, folder=tmp_path)["u"].persist()
    progress(y, file=file)
    text = file.getvalue()
    assert y.__dask_graph__()
    numbers = shown(text)
    assert {total for _, total in numbers} == {150}
    steps = [number for number, _ in numbers]
    assert steps == sorted(steps)
    assert {*steps} >= {50, 100, 150}
    assert steps[-1] == 150
    assert re.search(
        r"p2p-iterate \[#+ +\] \d+ of 150 steps, now [\d.]+/s, mean [\d.]+/s, .+ left, \d+% waited",
        text,
    )
    assert text.endswith("\n")
    assert np.array_equal(y.compute(), X + 150)


def test_a_failure_ends_the_line(client, tmp_path):
    def fails(ctx, x, path):
        for step in ctx.steps(300):
            if step == 100:
                wait_until(path.exists)
                raise ValueError("at step 100")

    file, path = Texts(tmp_path, "100 of 300 steps"), tmp_path / "100 of 300 steps"
    future = client.compute(spmd(fails, da.from_array(X, chunks=4), ranks=2, path=path))
    progress(future, file=file)
    assert shown(file.getvalue())[-1][0] <= 100
    with pytest.raises(ValueError, match="at step 100"):
        future.result()


def test_other_tasks_are_counted(client):
    file = io.StringIO()
    progress(client.map(abs, range(-3, 0)), file=file)
    assert file.getvalue().endswith("\r[################] 3 of 3 tasks\n")


def gated(block, folder, text, block_info=None):
    """A block that waits, unless it is the first one, until the line has shown a text."""
    if block_info and block_info[0]["chunk-location"][0]:  # Dask first calls it without a block
        wait_until((folder / text).exists)
    return block


@pytest.mark.parametrize(
    ("move", "operation"),
    [
        (lambda x: rechunk(x, (2, -1)), "p2p-rechunk"),
        (lambda x: transpose(x, chunks=(-1, 2)), "p2p-transpose"),
        (lambda x: map_overlap(lambda block: block, x.rechunk((2, -1)), depth=1), "p2p-overlap"),
    ],
)
def test_blocks_and_bytes_are_shown_as_they_come(client, monkeypatch, tmp_path, move, operation):
    """Half of the blocks need inputs that wait until the first half is shown."""
    monkeypatch.setattr(progress_bar, "_LOOK_S", 0.1)
    first = "1 of 4 blocks" if operation == "p2p-overlap" else "2 of 4 blocks"
    x = da.from_array(X, chunks=(4, 5)).map_blocks(gated, folder=tmp_path, text=first)
    y = move(x).persist()
    file = Texts(tmp_path, first)
    progress(y, file=file)
    lines = file.getvalue().strip().split("\r")
    shown_first = next(line for line in lines if first in line)
    assert re.fullmatch(
        rf"{operation} \[#+ +\] {first}, [\d.]+ k?i?B moved, \d+ of \d+ tasks *", shown_first
    )
    names = {future.key[0] for future in futures_of(y)}
    run = next(run for run in last_runs(client) if run.name in names)
    moved = format_bytes(run.moved_bytes)
    assert lines[-1].startswith(f"{operation} [################] 4 of 4 blocks, {moved} moved")
    assert np.array_equal(y.compute(), move(da.from_array(X, chunks=(4, 5))).compute())


def test_a_write_is_shown_until_its_end(client, monkeypatch, tmp_path):
    monkeypatch.setattr(progress_bar, "_LOOK_S", 0.1)
    first = "tasks"
    x = da.from_array(X, chunks=(4, 5)).map_blocks(gated, folder=tmp_path, text=first)
    y = rechunk(x, (2, -1))
    file, target = Texts(tmp_path, first), zarr.create_array({}, shape=X.shape, dtype=X.dtype)
    written = client.compute(da.store(y, target, compute=False, lock=False))
    progress(written, file=file)
    lines = file.getvalue().strip().split("\r")
    assert "p2p-rechunk [################] 4 of 4 blocks, " in lines[-1]
    numbers = [tuple(map(int, re.search(r"(\d+) of (\d+) tasks", line).groups())) for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[0][0] < numbers[-1][0] == numbers[-1][1] > 8


def test_wrong_arguments_are_refused(client):
    with pytest.raises(InputError, match=r"Persist it, x = x\.persist\(\)"):
        progress(da.from_array(X, chunks=4))
    with pytest.raises(InputError, match="expected futures"):
        progress()
    with pytest.raises(InputError, match=r"distributed\.Client"):
        progress(client.submit(abs, -3), client=3)


@pytest.mark.parametrize(
    "call", [lambda client: progress(client.submit(abs, -3), client=client), stalled]
)
async def test_an_asynchronous_client_is_refused(cluster, call):
    async with Client(cluster.scheduler_address, asynchronous=True) as client:
        with pytest.raises(InputError, match="synchronous client"):
            call(client)


def test_it_ends_with_a_cancelled_run(client):
    file = io.StringIO()
    fields, options = {"u": da.from_array(X, chunks=4)}, {"boundary": "periodic", "ranks": 2}
    y = iterate(slow, fields, 1, 10_000, **options)["u"].persist()  # ranks end in an exchange
    line = threading.Thread(target=progress, args=(y,), kwargs={"client": client, "file": file})
    line.start()
    wait_until(lambda: shown(file.getvalue()))
    client.cancel(y)
    line.join(BOUND_S)
    assert not line.is_alive()
    assert file.getvalue().endswith(", cancelled\n")


CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
NUMBERS = np.arange(12.0)


def held_up(folder):
    """Rank 1 loops until a file is there."""
    while not os.path.exists(folder / "go"):
        time.sleep(0.01)


def function(ctx, x, folder):
    for step in ctx.steps(20):
        if ctx.rank == 1 and step == 4:
            held_up(folder)
        x = x + ctx.allreduce(x.sum())
    return x


def test_the_stacks_of_a_section_that_stalls(client, tmp_path):
    """Each wait is logged once, too."""
    assert stalled(client, after=0) == []
    client.run(_listen)
    x = da.from_array(NUMBERS, chunks=4)
    with dask.config.set({"p2p.timeouts.request": "200 ms"}):
        future = client.compute(spmd(function, x, ranks=3, folder=tmp_path))
    reports = wait_until(lambda: found_stalled(client))
    assert stalled(client, after="1 hour") == []
    assert {report.size for report in reports.values()} == {3}
    assert {(report.step, report.steps) for report in reports.values()} == {(4, 20)}
    assert reports[1].waits_for == ()
    assert "computes" in str(reports[1])
    waiting = reports[0], reports[2]
    assert all("allreduce" in report.call and report.exchanges > 4 for report in waiting)
    assert all(
        "waits for rank " in str(report) and 'allreduce("sum")' in str(report) for report in waiting
    )
    assert {report.worker for report in reports.values()} == {*client.scheduler_info()["workers"]}
    wait_until(lambda: {line[:11] for line in logged(client)} >= {"Rank 0 of 3", "Rank 2 of 3"})
    before = len(logged(client))
    time.sleep(0.5)  # the ranks look for messages many times
    assert len(logged(client)) <= before + 2, "both have logged the last wait"
    (tmp_path / "go").touch()
    future.result()
    wait_until(lambda: stalled(client, after=0) == [])
    assert all("dask_p2p.stalled(client)" in line for line in logged(client))


def logged(client):
    return [line for lines in client.run(_lines).values() for line in lines]


def found_stalled(client):
    """Return the reports by rank once two ranks have waited for the third one, which is held up.

    On a busy machine ranks wait for others in earlier steps, too.
    """
    reports = {report.rank: report for report in stalled(client, after="100 ms")}
    waiting = [report for rank, report in reports.items() if rank != 1]
    if all(report.waits_for == (1,) and report.waited_s > 0.1 for report in waiting):
        return reports if 1 in reports and "held_up" in reports[1].stack else {}
    return {}


def _listen():
    waits.logger.addHandler(_LOG)


def _lines():
    lines = [record.getMessage() for record in _LOG.buffer]
    return [line for line in lines if "has waited" in line and "for ranks [1]" in line]


_LOG = BufferingHandler(10_000)


def test_wrong_times_are_refused(client):
    with pytest.raises(InputError, match="after: expected a time like '10 s', got 'soon'"):
        stalled(client, after="soon")
