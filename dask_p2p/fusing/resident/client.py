"""Resident gangs: ranks that stay on their workers between the calls of a compiled function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4
from weakref import finalize

from dask.array.core import finalize as joined
from dask.core import reshapelist
from distributed.protocol import Serialized, deserialize
from distributed.protocol.pickle import dumps, loads

from dask_p2p.backends import as_array, backend_for
from dask_p2p.errors import InputError, SectionError
from dask_p2p.fusing.planning.sizes import (
    MOST_VALUE_BYTES,
    Declared,
    DeclaredValue,
    is_value,
)
from dask_p2p.fusing.resident.client_streams import ClientStreams, Submit
from dask_p2p.fusing.resident.commands import FETCH, PUBLISH, SIZES, register_blocks
from dask_p2p.fusing.running.gang import array_of_tasks
from dask_p2p.fusing.running.messages import quick_form
from dask_p2p.graph import is_dask_array
from dask_p2p.types import DaskArray, Key

_PREFIX = "p2p-resident"  # of the names of arrays
_ATTEMPTS = 8  # attempts to make an array


@dataclass(frozen=True)
class Signature:
    """The arguments and results of a compiled function."""

    arguments: Sequence[Declared | DeclaredValue]
    results: Sequence[Declared]
    returns_several: bool
    like: DaskArray  # an array of the library of the results


class Handle:
    """A result of a call of a resident gang. Its blocks stay with the ranks.

    The ranks drop the blocks when Python drops the handle. Operators and functions of arrays refuse
    a handle by an `InputError`: get its values, or compute in the compiled function.

    Attributes
    ----------
    shape : tuple of int
        Shape of the array.
    chunks : tuple of tuple of int
        Lengths of its blocks along each axis.
    dtype : numpy.dtype
        Data type of the array.

    See Also
    --------
    ResidentGang.fetch : The values as a NumPy array.
    ResidentGang.array : The values as a Dask array.

    Examples
    --------
    >>> with step.resident(x) as run:  # doctest: +SKIP
    ...     handle = run(x)
    ...     handle.shape, run.fetch(handle)
    """

    def __init__(self, streams: ClientStreams, number: int, declared: Declared) -> None:
        self._streams, self._number, self._declared = streams, number, declared

    @property
    def chunks(self) -> Any:
        return self._declared.chunks

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.chunks))

    @property
    def dtype(self) -> Any:
        return self._declared.dtype

    def __repr__(self) -> str:
        return f"<handle of a resident gang, shape {self.shape}, {self.dtype}>"

    def __del__(self) -> None:
        self._streams.drop(self._number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"expected an array with the attribute {name!r}, got a handle of a resident gang. Call "
            f"run.array, or run.fetch."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("expected an array, got a handle of a resident gang. Call run.fetch.")

    def _refuse(self, *_: Any) -> Any:
        raise InputError(
            "expected a value, got a handle of a resident gang. Call run.fetch(handle), such as "
            "float(run.fetch(handle)), or compute in the compiled function."
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __iter__ = __len__ = _refuse

    def __reduce__(self) -> Any:
        raise InputError(
            "expected a value for other processes, got a handle of a resident gang. Call run.array."
        )


class ResidentGang:
    """The ranks of a compiled function, which stay on their workers between calls.

    `CompiledFunction.resident` returns one. It is a context manager: the ranks begin when the
    context is entered, and end with it. Inside of it, call the object as the function. It begins
    once; entering it again raises an `InputError`.

    See Also
    --------
    CompiledFunction.resident : Make one.
    Handle : A result of a call.

    Examples
    --------
    >>> import dask_p2p
    >>> step = dask_p2p.compile(lambda u: u.T + 1, x)  # doctest: +SKIP
    >>> with step.resident(x) as run:  # doctest: +SKIP
    ...     u = run(x)
    ...     u = run(u)
    ...     values = run.fetch(u)
    """

    def __init__(
        self,
        streams: ClientStreams,
        submit: Submit,
        signature: Signature,
        names: Sequence[str | None],  # of the arrays that the gang begins with; None: a value
    ) -> None:
        self._streams, self._submit, self._signature = streams, submit, signature
        self._names = names
        self._calls = count()
        self._has_begun = False
        self._end = finalize(self, streams.close)
        self._end.atexit = False  # the client ends the gang then

    def __enter__(self) -> ResidentGang:
        """Submit the ranks to the cluster; do not wait for them."""
        if self._has_begun:
            raise InputError(
                "expected a resident gang that has not begun: it begins once. Call step.resident."
            )
        self._has_begun = True
        self._streams.start(self._submit)
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        """Wait for all calls, and end the ranks. After an exception end them immediately."""
        try:
            if kind is None:
                self._streams.finish()
        finally:
            self._end()

    def __call__(self, *arguments: Any) -> Any:
        """Begin a call; return handles of its results immediately.

        Parameters
        ----------
        *arguments : Handle, dask.array.Array, number or numpy.ndarray
            Handles of this gang, or arrays that it has begun with. Arguments whose example was a
            number, a small NumPy array or a Dask array of one small block also take other values,
            which may change from call to call. A Dask array of one is computed first.

        Returns
        -------
        Handle or tuple of Handle
            As the results of the function.

        Raises
        ------
        InputError
            If the arguments differ from the examples of `compile` in number, chunks or dtype. Also
            for handles of other gangs, and for arrays that the gang has not begun with.
        MemoryLimitError
            If the results would not fit into the memory of a worker, next to other handles.
        SectionError
            If the gang has ended.
        """
        self._check_begun()
        declarations, results = self._signature.arguments, self._signature.results
        if len(arguments) != len(declarations):
            raise InputError(
                f"expected {len(declarations)} arguments, as in compile, got {len(arguments)}."
            )
        read = [self._argument(number, x) for number, x in enumerate(arguments)]
        first = next(self._calls) * len(results)
        self._streams.call(read, first)
        handles = [Handle(self._streams, number, x) for number, x in enumerate(results, first)]
        return tuple(handles) if self._signature.returns_several else handles[0]

    def fetch(self, handle: Handle) -> Any:
        """Return the values of a handle as a NumPy array.

        Parameters
        ----------
        handle : Handle
            A handle of this gang.

        Returns
        -------
        numpy.ndarray
            As `compute` of a Dask array returns it.

        Raises
        ------
        InputError
            If the argument is no handle of this gang.
        SectionError
            If the gang has ended.
        Exception
            The exception of a task that the values need, in the call that made the handle or in an
            earlier one. Notes name the task and the call.
        """
        self._check_handle(handle)
        replies = self._request(FETCH, handle)
        blocks = {tuple(index): block for reply in replies for index, block in reply}
        for index, block in blocks.items():
            if isinstance(block, bytes):
                blocks[index] = loads(block)
            elif isinstance(block, Serialized):  # of this process: it is the block itself
                blocks[index] = deserialize(block.header, block.frames).copy(order="K")
        # In a list also without axes: otherwise Dask takes a zero for a list without blocks.
        shape = tuple(map(len, handle.chunks)) or (1,)
        return joined(reshapelist(shape, [blocks[index] for index in sorted(blocks)]))

    def array(self, handle: Handle) -> DaskArray:
        """Return a Dask array with the values of a handle. Its blocks are on the workers.

        Parameters
        ----------
        handle : Handle
            A handle of this gang.

        Returns
        -------
        dask.array.Array
            Array with the chunks and the dtype of the handle. It is independent of the gang. Dask
            cannot compute its blocks again if their worker is lost, as with `client.scatter`.

        Raises
        ------
        Exception
            As for `fetch`.
        """
        self._check_handle(handle)
        client = self._streams.client
        for _ in range(_ATTEMPTS):
            attempt = self._streams.attempt
            sizes = self._request(SIZES, handle)
            name, futures = f"{_PREFIX}-{uuid4().hex}", dict[Key, Any]()
            with suppress(KeyError):  # a worker is lost
                futures = client.sync(register_blocks, client, name, sizes, self._streams.ranks)
                self._request(PUBLISH, handle, name)
            if futures and self._streams.attempt == attempt:  # the ranks had the same workers
                like, declared = self._signature.like, handle._declared
                return array_of_tasks(like, name, declared.chunks, declared.meta, futures)
        raise SectionError(
            f"workers were lost in {_ATTEMPTS} attempts to make an array of a handle. Call "
            f"run.array again."
        )

    def _request(self, kind: str, handle: Handle, *arguments: Any) -> list[Any]:
        """Return the blocks of each rank, as the answers of a request have them.

        Raises the exception of a block that has failed.
        """
        replies = self._streams.request(kind, handle._number, *arguments)
        for reply in replies:
            if isinstance(reply, bytes):
                raise loads(reply)
        return replies

    def _argument(self, number: int, x: Any) -> Any:
        """Return the number of the handle that is an argument of a call, or the value that is."""
        declared = self._signature.arguments[number]
        if isinstance(declared, DeclaredValue) or declared.takes_values:
            is_new = is_dask_array(x) and x.name != self._names[number]
            if is_new and x.nbytes <= MOST_VALUE_BYTES:
                value = as_array(x.compute())
                x = backend_for(value).to_host(value)
            if isinstance(declared, DeclaredValue) or is_value(x):
                value = declared.value_of(number, x)
                return quick_form(value) or dumps(value)
        if is_dask_array(x):
            if x.name != self._names[number]:
                raise InputError(
                    f"argument {number}: expected a handle, or the array that the gang has begun "
                    f"with, got another Dask array. Begin a gang with it: step.resident(x)."
                )
            handle_number = -1 - number
        else:
            self._check_handle(x)
            handle_number = x._number
        declared.check(number, x)
        return handle_number

    def _check_begun(self) -> None:
        if not self._has_begun:
            raise InputError(
                "expected a resident gang that has begun. Write: with step.resident(x) as run."
            )

    def _check_handle(self, handle: Any) -> None:
        self._check_begun()
        if is_dask_array(handle):
            raise InputError("expected a handle, got a Dask array. Call its compute().")
        if not isinstance(handle, Handle):
            raise InputError(
                f"expected a handle, got {type(handle).__name__}. Give one result of a call of "
                f"this gang."
            )
        if handle._streams is not self._streams:
            raise InputError(
                "expected a handle of this resident gang, got that of another one. Call other.array"
                "(handle), and begin a gang from this array."
            )
