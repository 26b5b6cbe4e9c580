"""`explain`: whether the option `p2p.fuse: auto` runs collections as one gang."""

from __future__ import annotations

from typing import Any

from dask.base import unpack_collections
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.fusing.graph import choice_of
from dask_p2p.fusing.optimizer import cluster_of, optimizer_for
from dask_p2p.plugins.registration import current_client, workers_of


def explain(*collections: Any) -> str:
    """Return how the option ``p2p.fuse: auto`` would compute collections, and why.

    Parameters
    ----------
    *collections : Dask collections
        Arrays, xarray objects, or other collections of arrays, that one call would compute.

    Returns
    -------
    str
        Either "by one gang", with the number of tasks, ranks and exchanges; or "by Dask's tasks",
        with the rule that the graph does not meet.

    Raises
    ------
    InputError
        If there is no collection, or its arrays are expressions of Dask's query planning.

    Notes
    -----
    The scheduler decides when the collections are computed. Then the sizes of arrays on workers
    count, too, and tasks that the scheduler has already stay with Dask.

    Examples
    --------
    >>> import dask.array as da
    >>> explain(da.ones(3)).split(":")[0]
    "by Dask's tasks"
    """
    found, _ = unpack_collections(*collections)
    if not found:
        raise InputError("expected at least one Dask collection, got none. Call explain(x).")
    if any(hasattr(each, "expr") for each in found):
        raise InputError(
            "expected arrays whose graphs have layers, got expressions of Dask's query planning: "
            "p2p.fuse has no effect on these. Call fused(x)."
        )
    try:
        of = [optimizer_for("auto", each if hasattr(each, "_meta") else None) for each in found]
    except InputError as exc:
        return f"by Dask's tasks: {exc}"
    for obstacle in of[0].obstacles:
        return f"by Dask's tasks: {obstacle}"
    graph = HighLevelGraph.merge(*(each.__dask_graph__() for each in found))
    keys = [each.__dask_keys__() for each in found]
    cluster = cluster_of(workers_of(current_client()).values())
    return str(choice_of(graph, keys, cluster, checked_options(), of[0].kinds))
