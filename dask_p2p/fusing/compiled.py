"""`compile`: a function of Dask arrays whose graph is fused once, for many calls."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from dask.array.core import new_da_object
from dask.base import tokenize
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import Task

from dask_p2p.config import Options, checked_options
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import FuseError, InputError
from dask_p2p.fusing.planning.declared import Declared
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.rechunks import tasks_of_layer
from dask_p2p.fusing.planning.rules import (
    check_annotations,
    check_arrays,
    check_tasks,
    kind_of,
    kinds_of,
)
from dask_p2p.fusing.planning.tasks import keys_of, name_of, read_graph
from dask_p2p.fusing.resident.client import ResidentGang, Signature
from dask_p2p.fusing.resident.client_streams import ClientStreams
from dask_p2p.fusing.resident.handle_memory import HandleMemory
from dask_p2p.fusing.resident.rank import RunResident
from dask_p2p.fusing.running.gang import (
    FusedGang,
    RankProgram,
    gang_of,
    name_of_gang,
    name_of_output,
    rank_programs,
)
from dask_p2p.graph.libraries import is_dask_array
from dask_p2p.ops.arguments import check_chunks_are_known, check_function
from dask_p2p.plugins.registration import current_client, register_if_possible
from dask_p2p.sections.api.arguments import most_ranks
from dask_p2p.types import DaskArray, Key

_PREFIX = "p2p-argument"  # of the names of arrays that stand for arguments


def compile(  # noqa: A001  # called as dask_p2p.compile
    func: Callable[..., Any], *examples: DaskArray, ranks: int | None = None
) -> CompiledFunction:
    """Return a function of Dask arrays that is fused once, and runs as one gang in each call.

    `func` is called once, here, with lazy arrays that stand for the arguments. Its graph is shared
    out between ranks as by `fused`. A later call makes the tasks of the gang alone, whatever the
    number of operations. All calls read the same other arrays: those of `dask.array.random`, for
    example, have the same numbers in each call.

    Parameters
    ----------
    func : callable
        Function of Dask arrays that returns a Dask array, or a tuple of them. It may read other
        arrays too, and builds lazy arrays only.
    *examples : dask.array.Array
        Arrays with the chunks and dtypes of later arguments. Their values do not matter.
    ranks : int, optional
        Largest number of ranks, as for `fused`.

    Returns
    -------
    CompiledFunction
        Function of arrays like the examples, which returns lazy arrays like those of `func`.

    Raises
    ------
    InputError
        If `func` is not callable or returns anything but Dask arrays, there is no example, or
        `ranks` is invalid here.
    ChunksError
        If chunk sizes of an example are unknown.
    UnsupportedArrayError
        If an example is not a Dask array of NumPy or CuPy blocks, or an array has Python objects.
    FuseError
        As for `fused`.

    Notes
    -----
    Decisions of `func` that depend on Python values are made once. A loop that ends when a
    residual is small needs a call for each step, or for a number of steps.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> step = compile(lambda u: (u.T + 1).T * 2, x)
    >>> step(step(x)).compute(scheduler="sync")[0]
    array([10., 10., 10., 10.])
    """
    check_function(func, "Dask arrays", "compile(step, x)")
    check_arrays(examples)
    for x in examples:
        check_chunks_are_known(x)
        _check_has_layers(x)
    most = most_ranks(ranks)
    register_if_possible()
    given = [_argument(x, number) for number, x in enumerate(examples)]
    returned = func(*given)
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if not outputs or not all(map(is_dask_array, outputs)):
        raise InputError(
            f"expected a function that returns a Dask array or a tuple of them, got "
            f"{returned!r:.200}. Return lazy arrays, without compute()."
        )
    check_arrays(outputs)
    return _compiled(func, given, outputs, isinstance(returned, (tuple, list)), most)


class CompiledFunction:
    """A function of Dask arrays that `compile` has fused.

    Attributes
    ----------
    ranks : int
        Number of ranks of the gang.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        arguments: Sequence[Declared],
        outputs: Sequence[Declared],
        returns_several: bool,
        programs: Sequence[RankProgram],
        others: HighLevelGraph,  # tasks that stay with Dask, and are the same in all calls
        options: Options,
        token: str,
    ) -> None:
        self.__wrapped__ = func
        self._arguments, self._outputs = arguments, outputs
        self._returns_several, self._programs = returns_several, programs
        self._others, self._options, self._token = others, options, token

    @property
    def ranks(self) -> int:
        return len(self._programs)

    def __repr__(self) -> str:
        name = getattr(self.__wrapped__, "__name__", repr(self.__wrapped__))
        return f"<{name} compiled for {self.ranks} ranks>"

    def __call__(self, *arrays: DaskArray) -> Any:
        """Return the lazy arrays that the function returns for some arguments.

        Raises `InputError`, `ChunksError` or `UnsupportedArrayError` if the arguments differ from
        the examples in number, chunks or dtype.
        """
        self._check(arrays)
        register_if_possible()
        token = tokenize(self._token, [x.name for x in arrays])
        gang = gang_of(token, self._programs, self._options, self._renamed(arrays))
        before = self._graph(gang, arrays)
        made = []
        for number, known in enumerate(self._outputs):
            name = name_of_output(gang, number)
            own = {**before.layers, name: MaterializedLayer(gang.outputs(number, name))}
            graph = HighLevelGraph(own, {**before.dependencies, name: {gang.name}})
            made.append(new_da_object(graph, name, known.chunks, meta=known.meta))
        return tuple(made) if self._returns_several else made[0]

    def resident(self, *arrays: DaskArray) -> ResidentGang:
        """Return a resident gang: its ranks stay on their workers between calls of the function.

        Use it as a context manager. Inside of it, calls return handles immediately, and up to 64
        calls run in the background. Arguments of a call are handles, or arrays given here.

        Parameters
        ----------
        *arrays : dask.array.Array
            Arguments of the first call.

        Returns
        -------
        ResidentGang
            The gang, which begins when its context is entered.

        Raises
        ------
        InputError
            If there is no synchronous client with a cluster, or as for calls.
        ChunksError, UnsupportedArrayError
            As for calls.

        Notes
        -----
        The client connects to each worker that has a rank. If a worker is lost, the ranks begin
        again, and the client repeats the calls since the last checkpoint.

        Examples
        --------
        >>> step = dask_p2p.compile(lambda u: u.T + 1, x)  # doctest: +SKIP
        >>> with step.resident(x) as run:  # doctest: +SKIP
        ...     u = x
        ...     for _ in range(1000):
        ...         u = run(u)
        ...     values = run.fetch(u)  # NumPy array
        ...     y = run.array(u)  # Dask array, whose blocks are on the workers
        """
        self._check(arrays)
        register_if_possible()
        client = current_client()
        if client is None or client.asynchronous or current_worker()[0] is not None:
            raise InputError(
                "expected a synchronous client for a resident gang, got none. Make a "
                "distributed.Client, outside of tasks."
            )
        token = uuid4().hex  # each gang has its own handles
        names = tuple(known.name for known in self._arguments)
        name = name_of_gang(token)
        programs = [
            each._replace(
                body=RunResident(name, each.body.program, names, each.body.dtype, each.body.kind)
            )
            for each in self._programs
        ]
        gang = gang_of(token, programs, self._options, self._renamed(arrays))
        commit = Delayed(gang.commit, self._graph(gang, arrays), layer=gang.name)
        memory = HandleMemory(self._outputs, [each.outputs for each in self._programs])
        return ResidentGang(
            ClientStreams(client, gang.name, self.ranks, memory),
            partial(client.compute, commit),
            Signature(self._arguments, self._outputs, self._returns_several),
            [x.name for x in arrays],
        )

    def _renamed(self, arrays: Sequence[DaskArray]) -> Callable[[Key], Key]:
        """Return the function that returns the keys of inputs in a call."""
        names = {known.name: x.name for known, x in zip(self._arguments, arrays, strict=True)}
        return lambda key: (names[key[0]], *key[1:]) if name_of(key) in names else key

    def _graph(self, gang: FusedGang, arrays: Sequence[DaskArray]) -> HighLevelGraph:
        """Return the graph of a gang and its inputs."""
        before = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays), self._others)
        read = {name for x in arrays for name in x.__dask_layers__()} | {*self._others.layers}
        layers = {**before.layers, gang.name: MaterializedLayer(gang.tasks)}
        return HighLevelGraph(layers, {**before.dependencies, gang.name: read})

    def _check(self, arrays: Sequence[DaskArray]) -> None:
        check_arrays(arrays)
        if len(arrays) != len(self._arguments):
            raise InputError(
                f"expected {len(self._arguments)} arrays, as in compile, got {len(arrays)}."
            )
        for number, (x, known) in enumerate(zip(arrays, self._arguments, strict=True)):
            _check_has_layers(x)
            known.check(number, x)


def _argument(x: DaskArray, number: int) -> DaskArray:
    """Return an array that stands for an argument; its tasks are replaced in each call."""
    name = f"{_PREFIX}-{number}-{tokenize(x.chunks, x.dtype, number)}"
    tasks = {}
    for key in keys_of(x):
        own = (name, *key[1:])
        tasks[own] = Task(own, _no_value, number)
    graph = HighLevelGraph({name: MaterializedLayer(tasks)}, {name: set()})
    return new_da_object(graph, name, x.chunks, meta=x._meta, dtype=x.dtype)


def _no_value(number: int) -> Any:
    raise InputError(
        f"expected a function that builds lazy arrays only, got one that computes argument "
        f"{number}, which has no values in compile. Move compute() out of the function."
    )


def _check_has_layers(x: DaskArray) -> None:
    if hasattr(x, "expr"):
        raise InputError(
            "expected arrays whose graphs have layers, got an expression of Dask's query planning. "
            "Call fused on the results."
        )


def _compiled(
    func: Callable[..., Any],
    given: Sequence[DaskArray],
    outputs: Sequence[DaskArray],
    returns_several: bool,
    most: int,
) -> CompiledFunction:
    options = checked_options()
    before = HighLevelGraph.merge(*(x.__dask_graph__() for x in (*given, *outputs)))
    layers = {name: tasks_of_layer(layer, options) for name, layer in before.layers.items()}
    graph = {key: task for tasks in layers.values() for key, task in tasks.items()}
    read = read_graph(graph, [keys_of(x) for x in outputs])
    check_tasks(read)
    check_annotations(before.layers, read.tasks)
    size = min(most, read.tasks.widest)
    programs = programs_of(read.tasks, size, pinned=_pinned(given, outputs, size))
    arguments = {x.name for x in given}
    _check_kept(read.kept, arguments)
    token = tokenize([x.name for x in outputs], len(programs), options, str([*read.tasks.nodes]))
    kept = {key: task for key, task in read.kept.items() if name_of(key) not in arguments}
    name = f"{_PREFIX}-others-{token}"
    others = {name: MaterializedLayer(kept)} if kept else {}
    return CompiledFunction(
        func,
        [Declared.of(x) for x in given],
        [Declared.of(x) for x in outputs],
        returns_several,
        rank_programs(programs, outputs[0].dtype, kind_of(kinds_of((*given, *outputs)), read)),
        HighLevelGraph(others, {each: set() for each in others}),
        options,
        token,
    )


def _pinned(given: Sequence[DaskArray], outputs: Sequence[DaskArray], size: int) -> dict[Key, int]:
    """Return the owner of each block of the arguments, and of results with the chunks of one.

    So such a result can be an argument of the next call on the same ranks.
    """
    chunks = [x.chunks for x in given]
    alike = [x for x in outputs if x.chunks in chunks]
    return {
        key: number * size // len(keys)
        for keys in map(keys_of, (*given, *alike))
        for number, key in enumerate(keys)
    }


def _check_kept(kept: Mapping[Key, Any], arguments: Container[Any]) -> None:
    """Refuse tasks that stay with Dask and read an argument: `FuseError`."""
    for key, task in kept.items():
        read = getattr(task, "dependencies", ())
        if name_of(key) not in arguments and any(name_of(each) in arguments for each in read):
            raise FuseError(
                f"expected only tasks of ranks between arguments and results, got the task "
                f"{key!r}, which stays with Dask: that of a section, of a shuffle or of a future. "
                f"Call it outside of the compiled function."
            )
