"""A line of text that shows how far running arrays have come."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, TextIO

from dask.utils import format_bytes
from distributed import Future, futures_of, wait

from dask_p2p.config import parse_duration
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_client
from dask_p2p.monitoring.records import PROGRESS_OP
from dask_p2p.monitoring.runs import pace_text
from dask_p2p.types import Client

_WIDTH = 16  # characters of the bar
_LOOK_S = 0.8  # time between two requests for records: each of them takes milliseconds from ranks
_RECENT = 10  # points in time that the speed now is computed from


def progress(*results: Any, client: Client | None = None, file: TextIO | None = None) -> None:
    """Show how far arrays or other results have come, until they are there.

    The line is that of the run under way, the newest one of several. For `transpose`, `rechunk` and
    other exchanges it has the finished blocks and the bytes that have moved. For `iterate` and
    `spmd` it has the steps, steps per second (now and on average), the time left, and the largest
    fraction of its time that a rank waited for others. Where other tasks are computed as well, such
    as those that write a store, it ends with their number. It moves at least once a second, in
    terminals and in notebooks.

    Parameters
    ----------
    *results : future or collection
        Futures, or collections that were persisted. The function returns when all of them are
        finished or have failed.
    client : distributed.Client, optional
        The client. By default the current one.
    file : file, optional
        Text file for the line. By default the standard output.

    Raises
    ------
    InputError
        If no result is given that runs on the cluster, or the client is closed or asynchronous.
    ValueError
        If there is no client.

    See Also
    --------
    last_runs : The figures of runs.
    stalled : The states of ranks that wait.

    Examples
    --------
    >>> y = dask_p2p.transpose(x).persist()  # doctest: +SKIP
    >>> dask_p2p.progress(y)  # doctest: +SKIP
    """
    client = checked_client(client)
    futures, out = futures_of(list(results)), sys.stdout if file is None else file
    if client.asynchronous:
        raise InputError(
            "client: expected a synchronous client, got an asynchronous one. Await "
            "dask_p2p.last_runs(client), which lists runs under way."
        )
    if not futures:
        raise InputError(
            "expected futures or a persisted collection, got none: a lazy one does not run yet. "
            "Persist it, x = x.persist(), or compute it, client.compute(x)."
        )
    line, shown = _Line(futures), ""
    while True:
        is_over = all(future.done() for future in futures)
        text = line.text(client.sync(line.fetch, client))
        out.write("\r" + text.ljust(len(shown)))
        out.flush()
        shown = text
        if is_over:
            break
        with suppress(TimeoutError, CancelledError):
            wait(futures, timeout=_LOOK_S)
    out.write("\n")


class _Line:
    """The line for some futures, from one answer of the scheduler to the next."""

    def __init__(self, futures: Sequence[Future]) -> None:
        self._futures = futures
        keys = [future.key for future in futures]
        # One of each array, as all of them depend on the same arrays.
        self._keys = [*{key[0] if isinstance(key, tuple) else key: key for key in keys}.values()]
        self._names: Sequence[str] = ()  # of the arrays that the futures depend on
        self._ended: set[str] | None = None  # arrays that were complete before the first line
        self._shown = ""  # name of the array of the last line
        self._points: list[tuple[float, int]] = []  # its times and steps

    async def fetch(self, client: Client) -> Mapping[str, Any]:
        """Return the scheduler's answer: see `P2PSchedulerPlugin.progress`."""
        request = {"keys": self._keys, "names": self._names}
        reply = await getattr(client.scheduler, PROGRESS_OP)(**request)
        if reply is None:  # Dask's reply to an unknown operation
            return {"tasks": (0, 0), "runs": (), "names": ()}
        if reply.get("status", "ok") != "ok":
            raise InputError(f"the scheduler rejected the request: {reply.get('message')}")
        self._names = reply["names"]
        return dict(reply)

    def text(self, reply: Mapping[str, Any]) -> str:
        finished, total = reply["tasks"]
        if not total:  # of futures without arrays, or whose tasks are forgotten
            total, finished = len(self._futures), sum(future.done() for future in self._futures)
        run = self._choose_run(reply["runs"], is_all_ended=finished == total)
        tasks = f"{finished} of {total} tasks"
        if run is None:
            return f"{_bar(finished, total)} {tasks}"
        if run["name"] != self._shown:
            self._shown, self._points = run["name"], []
        ending = f", {run['state']}" if run["state"] in ("failed", "cancelled") else ""
        if run["is_section"]:
            steps, all_steps = run["steps"], run["all_steps"]
            pace = pace_text(steps, all_steps, self._steps_per_s(run), run["steps_per_s"])
            bar = _bar(steps, all_steps) if all_steps else _bar(finished, total)
            waited = f"{run['waited_share']:.0%} waited"
            return f"{run['operation']} {bar} {pace}, {waited}{ending}"
        blocks = max(prod(run["blocks"]), 1)
        if run["left"]:  # a part of the array has fewer
            blocks = min(blocks, run["made"] + run["left"])
        elif run["state"] == "done":
            blocks = run["made"]
        moved = f"{run['made']} of {blocks} blocks, {format_bytes(run['moved_bytes'])} moved"
        in_all = f", {tasks}" if total > blocks else ""
        return f"{run['operation']} {_bar(finished, total)} {moved}{in_all}{ending}"

    def _choose_run(
        self, runs: Sequence[Mapping[str, Any]], is_all_ended: bool
    ) -> Mapping[str, Any] | None:
        """Return the run to show: under way, else the last one shown, else the newest."""
        if self._ended is None:
            ended = {run["name"] for run in runs if not run["left"] and run["state"] != "running"}
            self._ended = set() if is_all_ended else ended
        runs = [run for run in runs if run["name"] not in self._ended]
        under_way = [run for run in runs if run["left"] or run["state"] == "running"]
        last = [run for run in runs if run["name"] == self._shown]
        return next(iter([*under_way, *last, *runs]), None)

    def _steps_per_s(self, run: Mapping[str, Any]) -> float:
        """Return the speed of a section over the last lines; 0 if it has ended."""
        point = run["start_s"] + run["wall_s"], run["steps"]
        if self._points and point[1] < self._points[-1][1]:  # another attempt
            self._points.clear()
        self._points = [*self._points[-_RECENT:], point]
        (before_s, before), (now_s, now) = self._points[0], point
        is_moving = run["state"] == "running" and now_s > before_s
        return (now - before) / (now_s - before_s) if is_moving else 0.0


def _bar(finished: int, total: int) -> str:
    filled = _WIDTH * finished // total if total else 0
    return f"[{'#' * filled}{' ' * (_WIDTH - filled)}]"


@dataclass(frozen=True)
class RankReport:
    """The state of one rank.

    Attributes
    ----------
    gang : str
        Name of the section, as in its tasks.
    rank, size : int
        The rank, and the number of ranks.
    worker : str
        Address of its worker.
    step, steps : int
        Steps done, and the total number; 0 if the function counts none.
    call : str
        The exchange that it waits in, or the last one.
    exchanges : int
        Number of exchanges that it has begun.
    waits_for : tuple of int
        Ranks whose data have not arrived, or have not taken its own.
    waited_s : float
        Seconds that it has waited in this exchange; 0 if it computes.
    stack : str
        Its Python stack, the innermost call last.
    """

    gang: str
    rank: int
    size: int
    worker: str
    step: int
    steps: int
    call: str
    exchanges: int
    waits_for: tuple[int, ...]
    waited_s: float
    stack: str

    def __str__(self) -> str:
        total = f" of {self.steps}" if self.steps else ""
        ranks = ", ".join(map(str, self.waits_for))
        now = f"waits for rank {ranks} in {self.call!r}" if self.waits_for else "computes"
        since = f" for {self.waited_s:.1f} s" if self.waits_for else ""
        return (
            f"{self.gang}, rank {self.rank} of {self.size} on {self.worker}: step {self.step}"
            f"{total}, {now}{since}\n{self.stack}"
        )


def stalled(client: Client | None = None, after: str | float = "10 s") -> list[RankReport]:
    """Return the state of all ranks of stalled sections: a rank waits for others for long.

    Parameters
    ----------
    client : distributed.Client, optional
        The client. By default the current one.
    after : str or float, optional
        Least time that a rank has waited in one exchange, by default 10 seconds. With 0 the ranks
        of all running sections are returned.

    Returns
    -------
    list of RankReport
        By section and rank. `print` shows a report with the rank's stack. A rank that computes
        while others wait for it is a rank to look at first.

    Raises
    ------
    InputError
        If `after` is no time, or the client is closed or asynchronous.
    ValueError
        If there is no client.

    See Also
    --------
    progress : The steps of a section.

    Examples
    --------
    >>> for report in dask_p2p.stalled():  # doctest: +SKIP
    ...     print(report)
    """
    client = checked_client(client)
    if client.asynchronous:
        raise InputError("client: expected a synchronous client, got an asynchronous one.")
    try:
        least_s = parse_duration(after)
    except (TypeError, ValueError):
        raise InputError(f"after: expected a time like '10 s', got {after!r}.") from None
    replies = client.run(_rank_reports, on_error="ignore")
    reports = [RankReport(**report) for of_worker in replies.values() for report in of_worker]
    gangs = {report.gang for report in reports if report.waited_s >= least_s}
    stalled_reports = [report for report in reports if report.gang in gangs]
    return sorted(stalled_reports, key=lambda report: (report.gang, report.rank))


def _rank_reports(dask_worker: Any) -> list[dict[str, Any]]:  # on the event loop
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    if plugin is None:
        return []
    from dask_p2p.sections.gang.worker import WorkerRanks

    reports: list[dict[str, Any]] = plugin.part(WorkerRanks).reports()
    return reports
