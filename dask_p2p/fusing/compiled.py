"""`compile`: a function of Dask arrays whose graph is fused once, for many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count
from typing import Any

import dask
from dask.base import tokenize
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.config import checked_options
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import InputError
from dask_p2p.fusing.arguments import argument, check_reads, pinned
from dask_p2p.fusing.array_graphs import graph_of, named_graph
from dask_p2p.fusing.planning.declared import Declared, DeclaredBlocks
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.rules import check_arrays, kind_of, kinds_of
from dask_p2p.fusing.planning.tasks import name_of
from dask_p2p.fusing.resident.client import ResidentGang, Signature
from dask_p2p.fusing.resident.client_streams import ClientStreams
from dask_p2p.fusing.resident.handle_memory import HandleMemory
from dask_p2p.fusing.resident.rank import RunResident
from dask_p2p.fusing.resident.stored_handles import StoredHandles
from dask_p2p.fusing.running.gang import PREFIX, FusedGang, rank_programs
from dask_p2p.graph.libraries import check_one_library, is_dask_array
from dask_p2p.ops.arguments import check_chunks_are_known, check_function
from dask_p2p.plugins.registration import current_client, register_if_possible
from dask_p2p.sections.api.arguments import most_ranks
from dask_p2p.sections.api.graph import gang_arrays
from dask_p2p.sections.gang.tasks import commit_of, name_of_gang
from dask_p2p.types import DaskArray


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
    residual is small needs a call for each step, or for a number of steps. Later changes of values
    that `func` reads, such as globals or the attributes of an object, have no effect.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> step = compile(lambda u: (u.T + 1).T * 2, x)
    >>> step(step(x)).compute(scheduler="sync")[0]
    array([10., 10., 10., 10.])
    """
    check_function(func, "Dask arrays", "compile(step, x)")
    if not examples:
        raise InputError("expected at least one example, got none. Call compile(step, x).")
    check_arrays(examples)
    for x in examples:
        check_chunks_are_known(x)
    most = most_ranks(ranks)
    register_if_possible()
    given = [
        argument(x, number, parameter)
        for number, (x, parameter) in enumerate(zip(examples, _parameters(func), strict=False))
    ]
    returned = func(*given)
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if not outputs or not all(map(is_dask_array, outputs)):
        raise InputError(
            f"expected a function that returns a Dask array or a tuple of them, got "
            f"{returned!r:.200}. Return lazy arrays, without compute()."
        )
    check_arrays((*given, *outputs))
    return _compiled(func, given, outputs, isinstance(returned, (tuple, list)), most)


def _parameters(func: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of a function's parameters by position, for errors."""
    with suppress(TypeError, ValueError):  # functions of extension modules may have no signature
        for parameter in signature(func).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                yield parameter.name
    yield from map("argument {}".format, count())


class CompiledFunction:
    """A function of Dask arrays that `compile` has fused.

    Attributes
    ----------
    ranks : int
        Number of ranks of the gang.
    """

    def __init__(self, func: Callable[..., Any], signature: Signature, gang: FusedGang) -> None:
        self.__wrapped__ = func
        self._signature, self._gang = signature, gang

    @property
    def ranks(self) -> int:
        return len(self._gang.ranks)

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
        made = gang_arrays(self._gang, arrays, len(self._signature.results))
        return tuple(made) if self._signature.returns_several else made[0]

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
        options, known = checked_options(), self._signature
        memory = HandleMemory(known.results, [each.outputs for each in self._gang.ranks])
        submit = partial(
            self._submit, client, arrays, options.resident_idle_s, dask.get_annotations()
        )
        streams = ClientStreams(client, self.ranks, memory, options.resident_end_s)
        return ResidentGang(streams, submit, known, [x.name for x in arrays])

    def _submit(
        self,
        client: Any,
        arrays: Sequence[DaskArray],
        idle_s: float,
        annotations: Mapping[str, Any],
        token: str,
        stored: StoredHandles | None,
    ) -> Any:
        """Submit a resident gang; return the future of its commit task."""
        own, name = self._gang, name_of_gang(PREFIX, token)
        begin = None if stored is None else (stored.name, stored.number)
        ranks = []
        for each in own.ranks:
            body = each.body
            of_first = body.dtype, body.shape, body.kind
            resident = RunResident(name, body.program, own.arguments, *of_first, idle_s, begin)
            ranks.append(each._replace(body=resident))
        names, graphs = zip(*map(named_graph, arrays), strict=True)
        tasks = MaterializedLayer(replace(own, ranks=ranks).tasks(name, names), annotations)
        graph = HighLevelGraph.merge(*graphs, HighLevelGraph({name: tasks}, {name: {*names}}))
        return client.compute(Delayed(commit_of(name), graph, layer=name))

    def _check(self, arrays: Sequence[DaskArray]) -> None:
        known = self._signature.arguments
        if len(arrays) != len(known):
            raise InputError(
                f"expected {len(known)} arrays, as in compile, got {len(arrays)}. Give one for "
                f"each example."
            )
        check_arrays(arrays)
        check_one_library([self._signature.like, *arrays])
        for number, (x, each) in enumerate(zip(arrays, known, strict=True)):
            each.check(number, x)


def _compiled(
    func: Callable[..., Any],
    given: Sequence[DaskArray],
    outputs: Sequence[DaskArray],
    returns_several: bool,
    most: int,
) -> CompiledFunction:
    options = checked_options()
    graph = graph_of(outputs, options)
    read = graph.read
    size = min(most, read.tasks.widest)
    # Without locations: arguments differ, and results, which lie in order, become arguments.
    programs = programs_of(read.tasks, size, pinned=pinned(given, outputs, graph.keys, size))
    names = tuple(x.name for x in given)
    check_reads(read, names)
    token = tokenize([x.name for x in outputs], len(programs), options, str([*read.tasks.nodes]))
    kept = {key: task for key, task in read.kept.items() if name_of(key) not in names}
    kind = kind_of(kinds_of((*given, *outputs)), read)
    first = DeclaredBlocks(outputs[0].chunks, outputs[0].dtype)
    ranks = rank_programs(programs, first, kind, runs_again=True)
    results = [Declared.of(x) for x in outputs]
    signature = Signature([Declared.of(x) for x in given], results, returns_several, given[0])
    return CompiledFunction(func, signature, FusedGang(token, ranks, options, results, names, kept))
