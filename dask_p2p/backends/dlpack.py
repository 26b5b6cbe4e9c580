"""Functions of other array libraries, called with views of NumPy and CuPy arrays by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from dask_p2p.backends.base import is_plain
from dask_p2p.errors import BlockMismatchError, InputError, MissingPackageError
from dask_p2p.types import Array

LIBRARIES = ("torch", "jax")
_X64 = "call jax.config.update('jax_enable_x64', True) where the workers import the function"
_CPU = 1  # DLPack's number of host memory
# Errors of libraries about arrays that DLPack cannot describe.
_REFUSALS = (BufferError, TypeError, ValueError, RuntimeError)


def checked_library(library: Any) -> str | None:
    """Return the argument `as_library`; raise `InputError` for an unknown library."""
    if library is None or (isinstance(library, str) and library in LIBRARIES):
        name: str | None = library
        return name
    raise InputError(
        f"as_library: expected one of {', '.join(LIBRARIES)}, or None for NumPy and CuPy arrays, "
        f"got {library!r}. Name one of these."
    )


class LibraryFunction:
    """A function of another library's arrays, called with NumPy and CuPy arrays.

    The arrays among its arguments become arrays of the library over the same memory, also in
    tuples. Arrays that it returns are taken back in the same way. A read-only array over writable
    memory is passed as a writable one, since DLPack has no read-only arrays; another read-only
    array is copied.
    """

    def __init__(self, function: Callable[..., Any], library: str) -> None:
        self.function, self.library = function, library
        self._returned = _ReturnedArrays()

    def __reduce__(self) -> Any:
        return LibraryFunction, (self.function, self.library)  # each copy keeps arrays of its own

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        library = _load_library(self.library)
        self._returned.drop()
        with library.follow_stream():
            view = library.view_block
            arguments = (_convert_arrays(value, view) for value in args)
            named = {name: _convert_arrays(value, view) for name, value in kwargs.items()}
            return self._return_blocks(library, self.function(*arguments, **named))

    def _return_blocks(self, library: _Library, value: Any) -> Any:
        if isinstance(value, library.kind):
            if library.frees_early:
                self._returned.add(value)
            return library.export_array(value)
        if isinstance(value, Mapping):
            return {name: self._return_blocks(library, element) for name, element in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._return_blocks(library, element) for element in value)
        return value


def wrap_in_library(function: Callable[..., Any], library: str | None) -> Callable[..., Any]:
    """Return a function that calls `function` with arrays of a library; None: unchanged."""
    return function if library is None else LibraryFunction(function, library)


def copy_for_thread(function: Any) -> Any:
    """Return a function for one thread: that of another library keeps arrays of its own."""
    return copy(function) if isinstance(function, LibraryFunction) else function


def _convert_arrays(value: Any, convert: Callable[[Array], Any]) -> Any:
    if is_block(value):
        return convert(value)
    if type(value) is tuple:
        return tuple(_convert_arrays(element, convert) for element in value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: convert(array) for name, array in vars(value).items()})
    convert_indexed: Callable[[Any], Any] | None = getattr(value, "with_indices", None)
    return value if convert_indexed is None else convert_indexed(convert)


def is_block(value: Any) -> bool:
    """Return whether a value is a plain NumPy or CuPy array."""
    if isinstance(value, np.ndarray):
        return is_plain(value)
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


class _ReturnedArrays:
    """Arrays that a function has returned, kept until the GPU has read them.

    Without a reference, its library may reuse their memory on a stream of its own.
    """

    def __init__(self) -> None:
        self._new: list[Any] = []
        self._read: list[tuple[Any, list[Any]]] = []  # arrays, with the event after their last use

    def add(self, array: Any) -> None:
        """Keep an array whose readers will be enqueued on the current stream."""
        if _is_on_gpu(array):
            self._new.append(array)

    def drop(self) -> None:
        """Drop arrays that have been read; all readers of the new ones have been enqueued."""
        if self._new:
            event = sys.modules["cupy"].cuda.get_current_stream().record()
            self._read.append((event, self._new))
            self._new = []
        while self._read and self._read[0][0].done:
            self._read.pop(0)


class _Library:
    """A library: conversions of arrays, and the order of its work on a GPU."""

    kind: Any  # class of its arrays
    frees_early = False  # whether it reuses the memory of dropped arrays on other streams

    def __init__(self, module: Any) -> None:
        self._module = module

    def follow_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the library's work follows CuPy's current stream."""
        return nullcontext()

    def view_block(self, array: Array) -> Any:
        """Return an array of the library over the memory of an array.

        Raises `InputError` if the library cannot hold such an array.
        """
        try:
            return self._import_array(_as_writable(array))
        except InputError:
            raise
        except _REFUSALS as exc:
            where = "NumPy" if isinstance(array, np.ndarray) else "CuPy"
            raise InputError(
                f"as_library: expected arrays that {self._module.__name__} can use, got one of "
                f"{where} of dtype {array.dtype}: {exc}. Convert it first, or install the "
                f"library's version for this device."
            ) from exc

    def _import_array(self, array: Array) -> Any:
        return self._module.from_dlpack(array)

    def export_array(self, value: Any) -> Any:
        """Return a NumPy or CuPy array over the memory of an array of the library.

        Raises `BlockMismatchError` if DLPack cannot describe it.
        """
        try:
            if not _is_on_gpu(value):
                return np.from_dlpack(value)
            import cupy

            return cupy.from_dlpack(value)
        except ModuleNotFoundError as exc:
            raise BlockMismatchError(
                "as_library: expected an array in host memory from the function, like its blocks, "
                "got one on a GPU. Copy it to the host, and return that."
            ) from exc
        except _REFUSALS as exc:
            raise BlockMismatchError(
                f"as_library: expected a dense array of a dtype that NumPy has from the function, "
                f"got one of {getattr(value, 'dtype', None)}: {exc}. Return such an array, without "
                f"gradients: tensor.detach()."
            ) from exc


class _Torch(_Library):
    """PyTorch: its current stream is the rank's one."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.kind = module.Tensor

    def follow_stream(self) -> AbstractContextManager[Any]:
        cupy, cuda = sys.modules.get("cupy"), self._module.cuda
        if cupy is None or not cuda.is_available():
            return nullcontext()
        pointer = cupy.cuda.get_current_stream().ptr
        if not pointer:  # the default stream of both
            return nullcontext()
        stream = cuda.ExternalStream(pointer, device=cupy.cuda.runtime.getDevice())
        context: AbstractContextManager[Any] = cuda.stream(stream)
        return context


class _Jax(_Library):
    """JAX: computes on streams of its own.

    By DLPack its streams wait for the current one before they read an array, and the current stream
    waits for a returned array.
    """

    frees_early = True

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.kind = module.Array

    def _import_array(self, array: Array) -> Any:
        pack = np if isinstance(array, np.ndarray) else sys.modules["cupy"]
        array = pack.ascontiguousarray(array).reshape(array.shape)
        jax_array = self._module.dlpack.from_dlpack(array)
        if jax_array.dtype != array.dtype:
            raise InputError(
                f"as_library: expected JAX with arrays of {array.dtype}, got one that makes "
                f"{jax_array.dtype} of them. To use such arrays, {_X64}; or convert the arrays, "
                f"x.astype({str(jax_array.dtype)!r})."
            )
        return jax_array

    def export_array(self, value: Any) -> Any:
        if not _is_on_gpu(value):
            value.block_until_ready()
        return super().export_array(value)


def _is_on_gpu(array: Any) -> bool:
    try:
        return int(array.__dlpack_device__()[0]) != _CPU
    except _REFUSALS:
        return False  # such as an array of several devices, which cannot be exported


def _as_writable(array: Array) -> Array:
    """Return an array that DLPack exports: a read-only one over writable memory, or a copy."""
    if not isinstance(array, np.ndarray) or array.flags.writeable:
        return array
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:
        return array.copy()
    return view


@cache
def _load_library(name: str) -> _Library:
    """Return a library of `LIBRARIES`; raise `MissingPackageError` if it is not installed."""
    try:
        if name == "torch":
            import torch

            return _Torch(torch)
        import jax
        import jax.dlpack

        return _Jax(jax)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != name:
            raise  # one of its dependencies is missing
        raise MissingPackageError(
            f"as_library={name!r}: expected the package {name} on the worker, which is not "
            f"installed there. Run: pip install {name}",
            name=name,
        ) from None
