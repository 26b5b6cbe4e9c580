"""`compile`: a function of Dask arrays whose graph is fused once, for many calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from itertools import compress, count
from typing import Any

import dask
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.fusing.fused import (
    argument,
    array_of_value,
    check_reads,
    graph_of,
    pinned,
    with_call_values,
)
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import (
    CallValue,
    Declared,
    DeclaredValue,
    is_value,
    sizes_of,
)
from dask_p2p.fusing.planning.tasks import check_arrays, kind_of, kinds_of, name_of
from dask_p2p.fusing.resident.client import ResidentGang, Signature
from dask_p2p.fusing.resident.client_streams import ClientStreams, HandleMemory
from dask_p2p.fusing.resident.rank import RunResident
from dask_p2p.fusing.running.gang import PREFIX, FusedGang, fused_gang
from dask_p2p.graph import check_one_library, is_dask_array
from dask_p2p.ops.arguments import check_chunks_are_known, check_function
from dask_p2p.plugins.registration import current_client, register_if_possible
from dask_p2p.sections.api.graph import gang_arrays, most_ranks
from dask_p2p.sections.gang.rank import commit_of, name_of_gang
from dask_p2p.types import DaskArray

_RANDOM = (
    "the function makes random arrays, {}, which compile makes once: each call has the same random "
    "numbers. Pass the noise, or a seed, as an argument of the function."
)


def compile(  # noqa: A001  # called as dask_p2p.compile
    func: Callable[..., Any], *examples: Any, ranks: int | None = None
) -> CompiledFunction:
    """Return a function of Dask arrays that is fused once, and runs as one gang in each call.

    `func` is called once, here, with lazy arrays that stand for the arguments; once more if there
    are random arrays. Its graph is shared out between ranks as by `fused`. A later call makes the
    tasks of the gang alone, whatever the number of operations. Numbers that change from call to
    call are arguments, too: `func` gets lazy arrays without dimensions for them. All calls read the
    same other arrays. Random arrays have the same numbers in each call; if `func` makes them, there
    is a `P2PWarning`.

    Parameters
    ----------
    func : callable
        Function of Dask arrays that returns a Dask array, or a tuple of them. It may read other
        arrays too, and builds lazy arrays only.
    *examples : dask.array.Array, number or numpy.ndarray
        Arrays with the chunks and dtypes of later arguments. Their values do not matter. Numbers,
        and NumPy arrays of at most 4 KiB, stand for such values in later calls. A float has the
        precision of the arrays, as in ``0.5 * x``.
    ranks : int, optional
        Largest number of ranks, as for `fused`.

    Returns
    -------
    CompiledFunction
        Function of arrays like the examples, which returns lazy arrays like those of `func`.

    Raises
    ------
    InputError
        If `func` is not callable or returns anything but Dask arrays, no example is a Dask array,
        or `ranks` is invalid here.
        Also if chunk sizes of an example are unknown.
    UnsupportedArrayError
        If an example is not a Dask array of NumPy or CuPy blocks, or an array has Python objects.
        As for `fused`.

    See Also
    --------
    fused : Fuse arrays once.
    CompiledFunction.resident : Keep the ranks on their workers between calls.

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
    >>> step = compile(lambda u, dt: u + dt * (u.T + 1).T, x, 0.0)
    >>> step(step(x, 0.5), 0.25).compute(scheduler="sync")[0]
    array([2.75, 2.75, 2.75, 2.75])
    """
    check_function(func, "Dask arrays", "compile(step, x)")
    if not examples:
        raise InputError("expected at least one example, got none. Call compile(step, x).")
    arrays = [x for x in examples if not is_value(x)]
    check_arrays(arrays or examples)
    for x in arrays:
        check_chunks_are_known(x)
    size_limit = most_ranks(ranks)
    register_if_possible()
    dtypes = [x.dtype for x in arrays]
    declared = [
        DeclaredValue.from_example(x, dtypes) if is_value(x) else Declared.from_array(x)
        for x in examples
    ]
    placeholders = [
        argument(declaration, number, arrays[0], parameter)
        for number, declaration, parameter in zip(count(), declared, _parameters(func))
    ]
    returned = func(*placeholders)
    outputs = _outputs_of(returned)
    if not outputs or not all(map(is_dask_array, outputs)):
        raise InputError(
            f"expected a function that returns a Dask array or a tuple of them, got "
            f"{returned!r:.200}. Return lazy arrays, without compute()."
        )
    check_arrays((*placeholders, *outputs))
    returns_several = isinstance(returned, (tuple, list))
    return _compiled(func, declared, placeholders, outputs, returns_several, size_limit)


def _parameters(func: Callable[..., Any]) -> Iterator[str]:
    with suppress(TypeError, ValueError):  # functions of extension modules may have no signature
        for parameter in signature(func).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                yield parameter.name
    yield from map("argument {}".format, count())


def _outputs_of(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


class CompiledFunction:
    """A function of Dask arrays that `compile` has fused.

    Attributes
    ----------
    ranks : int
        Number of ranks of the gang.

    See Also
    --------
    compile : Make one.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((6, 4), chunks=(2, 4))
    >>> step = compile(lambda u: u.T + 1, x)
    >>> step.ranks, step(x).shape
    (1, (4, 6))
    """

    def __init__(
        self,
        func: Callable[..., Any],
        signature: Signature,
        gang: FusedGang,
        names: Sequence[str],  # of the arrays that stand for the arguments
    ) -> None:
        self.__wrapped__ = func
        self._signature, self._gang, self._names = signature, gang, tuple(names)

    @property
    def ranks(self) -> int:
        return len(self._gang.ranks)

    def __repr__(self) -> str:
        name = getattr(self.__wrapped__, "__name__", repr(self.__wrapped__))
        return f"<{name} compiled for {self.ranks} ranks>"

    def __call__(self, *arguments: Any) -> Any:
        """Return the lazy arrays that the function returns for some arguments.

        Parameters
        ----------
        *arguments : dask.array.Array, number or numpy.ndarray
            One for each example, with its chunks and dtype.

        Returns
        -------
        dask.array.Array or tuple of them
            As the function returned them in `compile`.

        Raises
        ------
        InputError, UnsupportedArrayError
            If the arguments differ from the examples in number, chunks or dtype.
        """
        arrays, values = self._checked(arguments)
        register_if_possible()
        gang = self._gang.with_values(values)
        results = gang_arrays(gang, [*arrays.values()], len(self._signature.results))
        return tuple(results) if self._signature.returns_several else results[0]

    def resident(self, *arguments: Any) -> ResidentGang:
        """Return a resident gang: its ranks stay on their workers between calls of the function.

        Use it as a context manager. Inside of it, calls return handles immediately, and up to 64
        calls run in the background. Arguments of a call are handles, arrays given here, or
        numbers and small NumPy arrays.

        Parameters
        ----------
        *arguments : dask.array.Array, number or numpy.ndarray
            Arguments of the first call. Numbers may have any value here.

        Returns
        -------
        ResidentGang
            The gang, which begins when its context is entered.

        Raises
        ------
        InputError, UnsupportedArrayError
            If there is no synchronous client with a cluster. Also as for calls.

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
        arrays, _ = self._checked(arguments)
        register_if_possible()
        client = current_client()
        if client is None or client.asynchronous or current_worker()[0] is not None:
            raise InputError(
                "expected a synchronous client for a resident gang, got none. Make a "
                "distributed.Client, outside of tasks."
            )
        gang, signature = self._gang, self._signature
        idle_s, annotations = checked_options().resident_idle_s, dask.get_annotations()

        def submit(token: str) -> tuple[Any, Sequence[Any]]:
            name, ranks = name_of_gang(PREFIX, token), []
            for rank in gang.ranks:
                body = rank.body
                resident = RunResident(
                    name, body.program, self._names, body.dtype, body.shape, body.kind, idle_s
                )
                ranks.append(rank._replace(body=resident))
            inputs = client.persist([*arrays.values()])
            futures = {key: future for x in inputs for key, future in x.__dask_graph__().items()}
            tasks = replace(gang, ranks=ranks).tasks(name, [x.name for x in inputs])
            layers = {
                f"{name}-inputs": MaterializedLayer(futures),
                name: MaterializedLayer(tasks, annotations),
            }
            graph = HighLevelGraph(layers, {f"{name}-inputs": set(), name: {f"{name}-inputs"}})
            return client.compute(Delayed(commit_of(name), graph, layer=name)), inputs

        memory = HandleMemory(signature.results, [rank.outputs for rank in gang.ranks])
        streams = ClientStreams(client, self.ranks, memory)
        names = [arrays[n].name if n in arrays else None for n in range(len(arguments))]
        return ResidentGang(streams, submit, signature, names)

    def _checked(self, arguments: Sequence[Any]) -> tuple[dict[int, DaskArray], dict[int, Any]]:
        declarations, like = self._signature.arguments, self._signature.like
        if len(arguments) != len(declarations):
            is_mixed = any(isinstance(declared, DeclaredValue) for declared in declarations)
            kinds = "arguments" if is_mixed else "arrays"
            raise InputError(
                f"expected {len(declarations)} {kinds}, as in compile, got {len(arguments)}. Give "
                f"one for each example."
            )
        arrays, values = dict[int, DaskArray](), dict[int, Any]()
        for number, (x, declared) in enumerate(zip(arguments, declarations, strict=True)):
            if isinstance(declared, DeclaredValue):
                values[number] = declared.value_of(number, x)
            elif is_value(x) and declared.takes_values:
                value = declared.value_of(number, x)
                arrays[number] = array_of_value(like, declared, value)
            else:
                check_arrays([x])
                declared.check(number, x)
                arrays[number] = x
        check_one_library([like, *arrays.values()])
        return arrays, values


def _compiled(
    func: Callable[..., Any],
    declared: Sequence[Declared | DeclaredValue],
    placeholders: Sequence[DaskArray],  # they stand for the arguments
    outputs: Sequence[DaskArray],
    returns_several: bool,
    size_limit: int,
) -> CompiledFunction:
    options = checked_options()
    names = tuple(x.name for x in placeholders)
    are_values = [isinstance(declaration, DeclaredValue) for declaration in declared]
    of_call = [*compress(placeholders, are_values)]
    graph = graph_of(outputs, options, of_call)
    if layers := graph.random_layers():
        again = graph_of(_outputs_of(func(*placeholders)), options, of_call).random_layers()
        # Arrays that the function only reads have the same layers in each call.
        drawn = [str(name) for name, layer in layers.items() if again.get(name, ()) is not layer]
        if drawn:
            warnings.warn(_RANDOM.format(", ".join(drawn)), P2PWarning, stacklevel=3)
    check_reads(graph.tasks, names)
    kind = kind_of(kinds_of((*placeholders, *outputs)), graph.tasks)
    values = {
        x.name: CallValue(number, backend_for(x._meta).name)
        for number, x in enumerate(placeholders)
        if are_values[number]
    }
    arrays = [x for x in placeholders if x.name not in values]
    tasks = with_call_values(graph.tasks, values)
    size = min(size_limit, tasks.widest)
    # Without locations: arguments differ, and results, which lie in order, become arguments.
    owners = pinned(arrays, outputs, graph.keys, size)
    programs = programs_of(tasks, size, sizes_of(tasks, graph.declared), owners)
    kept_tasks = {key: task for key, task in tasks.dask_tasks.items() if name_of(key) not in names}
    arguments = [x.name for x in arrays]
    output_names, results = [x.name for x in outputs], [*map(Declared.from_array, outputs)]
    gang = fused_gang(
        tasks, programs, kind, options, output_names, results, kept_tasks, arguments=arguments
    )
    signature = Signature(declared, results, returns_several, arrays[0])
    return CompiledFunction(func, signature, gang, names)
