"""Reports of ranks that wait for each other: where each one is, and which ranks it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.config import duration_s
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_client
from dask_p2p.types import Client


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
        of = f" of {self.steps}" if self.steps else ""
        ranks = ", ".join(map(str, self.waits_for))
        now = f"waits for rank {ranks} in {self.call!r}" if self.waits_for else "computes"
        since = f" for {self.waited_s:.1f} s" if self.waits_for else ""
        return (
            f"{self.gang}, rank {self.rank} of {self.size} on {self.worker}: step {self.step}{of}, "
            f"{now}{since}\n{self.stack}"
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

    Notes
    -----
    When a rank has waited for `p2p.timeouts.request`, the scheduler writes these reports to a JSON
    file in Dask's temporary directory, once for each section, and logs a warning with its path.

    Raises
    ------
    InputError
        If `after` is no time, or the client is closed or asynchronous.
    ValueError
        If there is no client.
    """
    client = checked_client(client)
    if client.asynchronous:
        raise InputError("client: expected a synchronous client, got an asynchronous one.")
    try:
        least_s = duration_s(after)
    except (TypeError, ValueError):
        raise InputError(f"after: expected a time like '10 s', got {after!r}.") from None
    replies = client.run(_reports, on_error="ignore")
    return _chosen([RankReport(**each) for found in replies.values() for each in found], least_s)


def _chosen(reports: Sequence[RankReport], least_s: float) -> list[RankReport]:
    gangs = {each.gang for each in reports if each.waited_s >= least_s}
    chosen = [each for each in reports if each.gang in gangs]
    return sorted(chosen, key=lambda each: (each.gang, each.rank))


def _reports(dask_worker: Any) -> list[dict[str, Any]]:
    """Return the reports of a worker's ranks. On its event loop."""
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    if plugin is None:
        return []
    from dask_p2p.sections.gang.worker import WorkerRanks

    found: list[dict[str, Any]] = plugin.part(WorkerRanks).reports()
    return found
