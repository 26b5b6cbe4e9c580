"""Functions that write into the fields that they should only read.

A later step would read the changed values. Arrays in host memory refuse writes. On a GPU, and in
another library's arrays over the same memory, checksums before and after the first call find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dask_p2p.backends.dlpack import LibraryFunction
from dask_p2p.errors import InputError
from dask_p2p.sections.exchange.device import Host


@contextmanager
def explained_writes() -> Iterator[None]:
    """Explain errors of writes into read-only fields and constants, with the remedy."""
    try:
        yield
    except (TypeError, ValueError) as exc:
        text = str(exc)
        if "read-only" not in text and "readonly" not in text:
            raise
        raise InputError(
            f"expected a function that only reads its fields and constants, got one that writes "
            f"into them: {text}. Write into a copy, u = u.copy(), or into the parameter out. "
            f"Declare arrays read-only where a compiled function declares types."
        ) from exc


def written_fields() -> InputError:
    """Return the error for a function that has written into its fields."""
    return InputError(
        "expected a function that only reads its fields and constants, got one that writes "
        "into them. Write into a copy, u = u.copy(), or into the parameter out."
    )


def can_refuse(device: Host, function: Callable[..., Any]) -> bool:
    """Return whether the arrays that a function receives refuse writes."""
    return device.has_read_only and not isinstance(function, LibraryFunction)


def arrays_in(values: Iterable[Any], kind: Any) -> Iterator[Any]:
    """Yield the arrays among values, and among the time levels of fields."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, tuple):
            yield from arrays_in(value, kind)


class Reader:
    """A function of fields that is called after steps: it must not change them.

    Parameters
    ----------
    device : Host
        Device of the fields.
    function : callable
        The user's function.
    """

    def __init__(self, device: Host, function: Callable[..., Any]) -> None:
        self._device, self._is_checked = device, can_refuse(device, function)

    def __call__(self, bound: partial[Any]) -> Any:
        """Call the function with its arguments; return its value.

        Raises `InputError` if the function writes into its fields or constants.
        """
        arrays: list[Any] = []
        if not self._is_checked:
            given = (*bound.args, *bound.keywords.values())
            arrays += arrays_in(given, self._device.module.ndarray)
        before = [self._device.checksum(array) for array in arrays]
        with explained_writes():
            value = bound()
        if before != [self._device.checksum(array) for array in arrays]:
            raise written_fields()
        self._is_checked = True
        return value
