"""The functions that optimise graphs where `p2p.fuse` is set, and `explain`, their choice in words.

The client sends such a function with the graph. The scheduler calls it, in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pickle import PicklingError
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import dask
from dask.array.optimization import optimize
from dask.base import collections_to_expr, unpack_collections
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.utils import ensure_dict
from distributed import Scheduler

from dask_p2p.backends import backend_for
from dask_p2p.config import Options, checked_options
from dask_p2p.engine.task import PLUGIN_NAME, current_worker
from dask_p2p.errors import InputError, P2PError, RegistrationError, UnsupportedArrayError
from dask_p2p.fusing.option import arrays_of
from dask_p2p.fusing.planning.owners import Locations
from dask_p2p.fusing.planning.sizes import Declared, blocks_of_expression
from dask_p2p.fusing.planning.tasks import ANNOTATIONS, name_of
from dask_p2p.fusing.suitability import (
    Cluster,
    Known,
    choice_of,
    failing,
    optimized,
    substitute_tasks,
)
from dask_p2p.graph import is_dask_array, is_expression
from dask_p2p.monitoring.metrics import DEVICE_METRIC
from dask_p2p.plugins.registration import (
    connection_of,
    current_client,
    register_if_possible,
    workers_of,
)
from dask_p2p.types import Key, Kind

logger = logging.getLogger(__name__)

#: By thread and options: the function of the present call, as long as its collections have it.
_present: WeakValueDictionary[Any, Optimizer] = WeakValueDictionary()
_lacking: WeakSet[Any] = WeakSet()  # connections to clusters that lack the package
_BY_DASK = "computes by Dask's tasks: %s"  # in the log
_NO_PICKLE = "expected functions that can be pickled. Compute the graph without p2p.fuse"
_NO_PLUGIN = (
    "expected the plugin of dask_p2p on the scheduler, got none: it was removed. Call "
    "dask_p2p.register(client)."
)
_LEFT_TO_DASK = (
    "expected arrays whose gangs have not ended for lack of memory, with their worker, or for "
    "blocks unlike their declaration, got one. Declare blocks, map_blocks(dtype=..., chunks=...)."
)
_NO_ANNOTATIONS = "expected expressions without annotations"
_ANNOTATE = "Build the array outside of dask.annotate. Annotate only the call of fused."
_GONE = ("released", "forgotten")  # states of tasks without a result, now or soon


@dataclass(frozen=True)
class Optimizer:
    """The function on the client, one for all arrays of a call.

    Dask returns results in another order than that of the call if its collections differ in this
    function. So arrays that no gang can run do not get another one: they are recorded here.
    """

    is_auto: bool
    options: Options
    scheduler: str  # its identity
    obstacles: list[str] = field(default_factory=list, compare=False)  # filled: arrays for Dask
    kinds: set[Kind] = field(default_factory=set, compare=False)  # filled: of the arrays' blocks

    def __call__(self, graph: Any, keys: Any, **_: Any) -> Any:
        return optimize(graph, keys)

    def __reduce__(self) -> tuple[Any, ...]:
        obstacle = self.obstacles[0] if self.obstacles else ""
        kinds = frozenset(self.kinds)
        return AtScheduler, (self.is_auto, self.options, self.scheduler, kinds, obstacle)


@dataclass(frozen=True)
class AtScheduler:
    """The function in the scheduler's process."""

    is_auto: bool
    options: Options
    scheduler: str  # its identity
    kinds: frozenset[Kind]  # of the arrays' blocks
    obstacle: str  # the reason why Dask computes the graph; empty: none

    def __call__(self, graph: Any, keys: Any, **_: Any) -> Any:
        """Return the graph for the cluster. Its tasks fail if it has to be fused, and cannot.

        Runs in another thread than the scheduler.
        """
        fused_graph = self._fuse_or_fail(graph, keys)
        if fused_graph is not None:
            return fused_graph
        return self._with_known(ensure_dict(optimize(graph, keys)), keys)

    def of_expression(self, expr: Any, keys: Sequence[Key]) -> Any:
        """Return the graph of an expression, which Dask has optimised, in the same way."""
        annotations = expr.__dask_annotations__()
        names = [name for name in annotations if name in ANNOTATIONS and annotations[name]]
        graph = expr.__dask_graph__()
        fused_graph = self._fuse_or_fail(graph, keys, names, blocks_of_expression(expr))
        return self._with_known(graph, keys) if fused_graph is None else fused_graph

    def _with_known(self, graph: dict[Key, Any], keys: Any) -> dict[Key, Any]:
        """Return a graph with the tasks that the scheduler has, such as those of gangs."""
        scheduler, outputs = _scheduler(self.scheduler), {*flatten([keys])}
        known_tasks = {} if scheduler is None else _read_known(graph, outputs, scheduler).tasks
        return {**graph, **known_tasks}

    def _fuse_or_fail(
        self,
        graph: Any,
        keys: Any,
        annotations: Sequence[str] = (),
        declared: Mapping[str, Declared] = {},
    ) -> Any:
        try:
            if annotations:
                raise UnsupportedArrayError(
                    f"{_NO_ANNOTATIONS}, got {', '.join(annotations)}. {_ANNOTATE}"
                )
            if self.obstacle:
                raise UnsupportedArrayError(self.obstacle)
            scheduler = _scheduler(self.scheduler)
            if scheduler is None or PLUGIN_NAME not in scheduler.plugins:
                raise UnsupportedArrayError(_NO_PLUGIN)
            cluster = cluster_of(worker.identity() for worker in list(scheduler.workers.values()))
            outputs = {*flatten([keys])}
            gangs = scheduler.plugins[PLUGIN_NAME].gangs
            if self.is_auto and (left_names := gangs.left_to_dask.keys()):
                layers = graph.layers if isinstance(graph, HighLevelGraph) else map(name_of, graph)
                if not left_names.isdisjoint(layers):
                    raise UnsupportedArrayError(_LEFT_TO_DASK)
            known_tasks = _read_known(graph, outputs, scheduler)
            choice = choice_of(
                graph, keys, cluster, self.options, self.kinds, known_tasks, self.is_auto, declared
            )
            if not choice.programs:
                return None
            try:
                fused_graph, gang = optimized(keys, choice, self.options)
            except (AttributeError, PicklingError, TypeError) as exc:
                raise UnsupportedArrayError(f"{_NO_PICKLE}: {exc}") from exc
        except UnsupportedArrayError as exc:
            if not self.is_auto:
                return failing(keys, exc)
            logger.debug(_BY_DASK, exc)
            return None
        if self.is_auto:
            gangs.substitutes[gang] = partial(substitute_tasks, graph)
        logger.debug("computes %s", choice)
        return fused_graph


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
        # The graph that the scheduler gets, before it is fused.
        declared: Mapping[str, Declared] = {}
        if arrays_of(expr):
            planned = expr.optimize()
            graph, keys = planned.__dask_graph__(), list(flatten(planned.__dask_keys__()))
            declared = blocks_of_expression(planned)
        else:
            graph = HighLevelGraph.merge(*(x.__dask_graph__() for x in explained))
            keys = [x.__dask_keys__() for x in explained]
        return str(choice_of(graph, keys, cluster, options, kinds, declared=declared))
    except UnsupportedArrayError as exc:
        return f"by Dask's tasks: {exc}"


def cluster_of(workers: Iterable[Mapping[str, Any]]) -> Cluster:
    """Return the properties of a cluster, from Dask's information on each worker.

    Paused workers run no tasks now. They count if all are paused.
    """
    worker_infos = list(workers)
    running = [info for info in worker_infos if info["status"] == "running"] or worker_infos
    limits = [info["memory_limit"] for info in worker_infos if info["memory_limit"]]
    devices = [info["metrics"].get(DEVICE_METRIC) or 0 for info in running]
    return Cluster(
        workers=len(running),
        threads=sum(info["nthreads"] for info in running),
        memory_bytes=min(limits, default=0),
        device_bytes=min(filter(None, devices), default=0),
        has_resources=any(info["resources"] for info in running),
    )


def optimizer_unless_dask(mode: str, arrays: Sequence[Any]) -> Optimizer | None:
    """Return the function for one or more arrays; None if Dask computes them, for a logged reason.

    Raises an error of `optimizer_for` if `mode` is "on".
    """
    if current_worker()[0] is not None:  # in a task, whose worker a gang would wait for
        return None
    try:
        optimizers = [optimizer_for(mode, x) for x in arrays]
        return optimizers[0]  # the same for all
    except P2PError as exc:
        if mode == "on":
            raise
        logger.debug(_BY_DASK, exc)
        return None


def optimizer_for(mode: str, instance: Any) -> Optimizer:
    """Return the function for arrays of the current client, at least of one `instance`.

    Raises `UnsupportedArrayError` or `RegistrationError` if no gang can run them. With
    `auto` the function has the obstacle of the instance.
    """
    client = current_client()
    if client is None or client.asynchronous or connection_of(client) in _lacking:
        raise UnsupportedArrayError(
            "expected a synchronous client of a cluster with dask_p2p for p2p.fuse, got none. Make "
            "one, distributed.Client(...), or set the option to auto."
        )
    annotations = [name for name in dask.get_annotations() if name in ANNOTATIONS]
    if mode == "auto" and annotations:
        raise UnsupportedArrayError(
            f"expected no annotations of {', '.join(annotations)} around the call: they would "
            f"apply to ranks. Call dask_p2p.fused(x)."
        )
    try:
        register_if_possible()
    except RegistrationError:
        _lacking.add(connection_of(client))
        raise
    # Private: the public method asks the scheduler.
    optimizer = Optimizer(mode == "auto", checked_options(), client._scheduler_identity["id"])
    call = threading.get_ident(), optimizer.is_auto, optimizer.options, optimizer.scheduler
    present = _present.setdefault(call, optimizer)
    if instance is not None:
        present.kinds.add(type(instance._meta).__module__.partition(".")[0])
        try:
            backend_for(instance._meta)
        except UnsupportedArrayError as exc:  # ranks send such blocks as pickles: Dask is as good
            if mode == "auto":
                present.obstacles.append(str(exc))
    return present


def _scheduler(identity: str) -> Any:
    schedulers = {str(scheduler.id): scheduler for scheduler in Scheduler._instances}
    return schedulers.get(identity)


def _read_known(graph: Any, outputs: Container[Key], scheduler: Any) -> Known:
    """Return the tasks of a graph that the scheduler has, with all that these read.

    A task that is about to be forgotten counts if it has the key of an output: the scheduler would
    keep its dependencies.
    """
    stack = [
        key
        for key, task in graph.items()
        if type(task).__name__ != "Future"
        and (state := scheduler.tasks.get(key)) is not None
        and state.run_spec is not None
        and (key in outputs or state.state not in _GONE)
    ]
    tasks: dict[Key, Any] = {}
    while stack:
        key = stack.pop()
        if key not in tasks and (state := scheduler.tasks.get(key)) and state.run_spec is not None:
            tasks[key] = state.run_spec
            stack += [dependency.key for dependency in list(state.dependencies)]
    states = {key: scheduler.tasks.get(key) for key, _ in graph.items()}
    sizes = {key: state.nbytes for key, state in states.items() if state and state.nbytes > 0}
    holders = {
        key: [ws.address for ws in list(state.who_has)]
        for key, state in states.items()
        if state and state.who_has
    }
    return Known(tasks, sizes, Locations(holders, len(scheduler.workers)))
