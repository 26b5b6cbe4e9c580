"""`explain`: whether the option `p2p.fuse: auto` runs collections as one gang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
from dask.array.optimization import optimize
from dask.base import collections_to_expr, unpack_collections
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.fusing.optimizer import cluster_of, optimizer_for
from dask_p2p.fusing.option import arrays_of
from dask_p2p.fusing.planning.sizes import DeclaredBlocks, blocks_of_expression
from dask_p2p.fusing.suitability import choice_of
from dask_p2p.graph.arrays import is_expression
from dask_p2p.graph.libraries import is_dask_array
from dask_p2p.plugins.registration import current_client, workers_of


def explain(*collections: Any) -> str:
    """Return how the option ``p2p.fuse: auto`` would compute collections, and why.

    Parameters
    ----------
    *collections : Dask collections
        Arrays, xarray objects, or other collections of arrays, that one call would compute. Others
        among them, such as delayed values, are computed by Dask's tasks in any case.

    Returns
    -------
    str
        Either "by one gang", with the number of tasks, ranks and exchanges; or "by Dask's tasks",
        with the rule that the graph does not meet.

    Raises
    ------
    InputError
        If there is no collection, or expressions of arrays and other collections are mixed.

    See Also
    --------
    fused : Compute arrays by one gang in any case.

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
    explained, _ = unpack_collections(*collections)
    if not explained:
        raise InputError("expected at least one Dask collection, got none. Call explain(x).")
    expr = collections_to_expr(explained)
    parts = arrays_of(expr)
    # Delayed values have any attribute.
    if not parts and any(is_dask_array(x) and is_expression(x) for x in explained):
        raise InputError(
            "expected collections of one library, got expressions and others. Explain them one by "
            "one."
        )
    if not parts:
        with dask.config.set({"p2p.fuse": "off"}):  # those that Dask optimises as arrays
            explained = [x for x in explained if x.__dask_optimize__ is optimize]
        parts = [x if hasattr(x, "_meta") else None for x in explained]
    if not parts:
        return "by Dask's tasks: expected Dask arrays, or collections of them, got none"
    try:
        optimizers = [optimizer_for("auto", part) for part in parts]
        for obstacle in optimizers[0].obstacles:
            raise UnsupportedArrayError(obstacle)
        cluster = cluster_of(workers_of(current_client()).values())
        options, kinds = checked_options(), optimizers[0].kinds
        graph, keys, declared = _graph_of(explained, expr)
        return str(choice_of(graph, keys, cluster, options, kinds, declared=declared))
    except UnsupportedArrayError as exc:
        return f"by Dask's tasks: {exc}"


def _graph_of(collections: Sequence[Any], expr: Any) -> tuple[Any, Any, dict[str, DeclaredBlocks]]:
    """Return the graph that the scheduler gets, before it is fused, and the keys of its outputs.

    The third value has the declared blocks of expressions, by name.
    """
    if arrays_of(expr):
        planned = expr.optimize()
        keys = list(flatten(planned.__dask_keys__()))
        return planned.__dask_graph__(), keys, blocks_of_expression(planned)
    graph = HighLevelGraph.merge(*(collection.__dask_graph__() for collection in collections))
    return graph, [collection.__dask_keys__() for collection in collections], {}
