"""`last_runs`: the last runs of a cluster, as its scheduler fetches them from the workers."""

from __future__ import annotations

import warnings
from operator import index
from typing import Any

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.monitoring.records import RECORDS_OP, Record, unpacked
from dask_p2p.monitoring.runs import Runs, runs_of

__all__ = ["fetch_records", "last_runs"]


def last_runs(client: Any = None, n: int = 10) -> Any:
    """Tell of the last runs what they moved, by which transports, and in what time.

    A run is one call of `transpose`, `rechunk` or `map_overlap`, computed once. Workers keep what
    they noted of about their last thousand tasks, the scheduler of about ten thousand, as far as it
    was asked for it while their workers were there.

    Parameters
    ----------
    client : distributed.Client, optional
        By default the current one.
    n : int, optional
        How many runs, at most.

    Returns
    -------
    Runs or awaitable
        The newest first; something to await if the client is asynchronous. Empty for a cluster
        that lacks the plugins. Each `Run` has ``operation``, ``shape``, ``dtype``, ``blocks``,
        ``axes``, ``moved_bytes``, ``least_bytes``, ``exchange_s``, ``wall_s``, ``gbs``, ``pairs``,
        ``transports``, ``attempts``, ``failures`` and ``fallbacks``. All together have
        ``to_pandas()`` and ``to_trace(file)``.

    Raises
    ------
    InputError
        If `n` is no positive number.
    ValueError
        If there is no client.
    """
    from distributed import default_client

    try:
        number = index(n)
    except TypeError:
        number = 0
    if number < 1:
        raise InputError(f"expected a number of runs, at least 1, got n={n!r}.")
    client = default_client(client)
    return client.sync(_last_runs, client, number)


async def _last_runs(client: Any, n: int) -> Runs:
    return runs_of(await fetch_records(client, n=n))


async def fetch_records(client: Any, **wanted: Any) -> list[Record]:
    """Return records of a cluster, none where the scheduler lacks its plugin.

    Parameters
    ----------
    client : distributed.Client
    **wanted
        Which ones: parameters of the scheduler plugin's ``records``.
    """
    answer = await getattr(client.scheduler, RECORDS_OP)(**wanted)
    if answer is None:  # Dask's answer to what it does not know
        return []
    if answer["silent"]:
        text = (
            f"no answer of {', '.join(sorted(answer['silent']))} in time: what these workers did "
            f"lately is missing. Ask again when they answer, or close them."
        )
        warnings.warn(text, P2PWarning, stacklevel=2)
    return unpacked(answer["records"])
