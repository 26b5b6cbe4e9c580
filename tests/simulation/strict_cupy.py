"""A CuPy in host memory that refuses conversions as CuPy does, for lazy arrays of its blocks.

Its arrays are no NumPy arrays. NumPy's functions and operators take them, but never together with
NumPy arrays, and nothing converts them to NumPy arrays but `get` and `asnumpy`. Indexing never
returns scalars.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from dask_p2p.backends import cupy as cupy_backend
from dask_p2p.backends.cupy import CupyBackend
from dask_p2p.backends.host import HostQueue
from tests.simulation.gpu import OneDevice

#: Functions that make arrays of values on the host.
_CREATORS = {"arange", "array", "asanyarray", "asarray", "empty", "full", "ones", "zeros"}
_METHODS = ["astype", "conj", "copy", "max", "ravel", "reshape", "sum", "transpose", "view"]
_FFT = "strict_cupy_fft"


class StrictArray(NDArrayOperatorsMixin):
    """Stands for `cupy.ndarray`."""

    __module__ = "cupy"
    __array_priority__ = 100
    __hash__ = None
    device = OneDevice()

    def __init__(self, shape, dtype=float, memory=None):
        self.values = np.ndarray(shape, dtype, None if memory is None else memory.array)

    @classmethod
    def wrap(cls, values):
        """Return the array of these values, whose memory it shares."""
        values = np.asarray(values)
        if values.dtype.kind not in "biufc":
            raise TypeError(f"Unsupported dtype {values.dtype}")
        array = cls.__new__(cls)
        array.values = values
        return array

    def __reduce__(self):
        return StrictArray.wrap, (self.values,)

    def __array__(self, *args, **kwargs):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        foreign = [
            operand for operand in inputs if not isinstance(operand, (StrictArray, int, float))
        ]
        if method != "__call__" or any(hasattr(operand, "dask") for operand in foreign):
            return NotImplemented
        return _called(ufunc, inputs, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        if any(kind not in (StrictArray, np.ndarray) for kind in types):
            return NotImplemented
        is_creator = function.__name__ in _CREATORS or function.__name__.endswith("_like")
        return (_created if is_creator else _called)(function, args, kwargs)

    def __getitem__(self, index):
        return StrictArray.wrap(self.values[_plain(index)])

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self.values[_plain(index)] = _plain(value)

    def __getattr__(self, name):
        if name in _METHODS:
            method = getattr(self.values, name)
            return lambda *args, **kwargs: _called(method, args, kwargs)
        raise AttributeError(f"cupy.ndarray has no {name}")

    def get(self):
        return self.values.copy()

    @property
    def real(self):
        return StrictArray.wrap(self.values.real)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.values.__array_interface__["data"][0], array=self.values)


StrictArray.__name__ = StrictArray.__qualname__ = "ndarray"
for _name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"):
    setattr(StrictArray, _name, property(lambda self, name=_name: getattr(self.values, name)))


class StrictModule(ModuleType):
    """Stands for a package with functions of NumPy for `StrictArray`."""

    def __init__(self, name, functions):
        super().__init__(name)
        self._functions = functions

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(self._functions, name)
        if not callable(function) or isinstance(function, type):
            return function
        call = _created if name in _CREATORS or name.endswith("_like") else _called
        return lambda *args, **kwargs: call(function, args, kwargs)


def _called(function, args, kwargs):
    """Call a function of NumPy; refuse NumPy arrays as arguments."""
    for leaf in _leaves([args, kwargs]):
        if isinstance(leaf, np.ndarray):
            raise TypeError(f"Unsupported type {type(leaf)}")
    return _wrapped(function(*_plain(args), **_plain(kwargs)))


def _created(function, args, kwargs):
    """Call a function of NumPy that also takes NumPy arrays."""
    return _wrapped(function(*_plain(args), **_plain(kwargs)))


def _leaves(value):
    if isinstance(value, (list, tuple)):
        for element in value:
            yield from _leaves(element)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    else:
        yield value


def _plain(argument):
    if isinstance(argument, StrictArray):
        return argument.values
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_plain, argument))
    if isinstance(argument, dict):
        return {key: _plain(value) for key, value in argument.items()}
    return argument


def _wrapped(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return StrictArray.wrap(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_wrapped, value))
    return value


def _package():
    package = StrictModule("cupy", np)
    package.ndarray = StrictArray
    package.asnumpy = lambda array, **kwargs: array.get()
    package.cuda = SimpleNamespace(
        Device=lambda number=0: OneDevice(),
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDevice=lambda: 0,
            getDeviceCount=lambda: 1,
            memGetInfo=lambda: (2**30, 2**30),
        ),
    )
    return package


CUPY = _package()


def _transform(name):
    return lambda array, *args, overwrite_x=False, **kwargs: getattr(np.fft, name)(
        array, *args, **kwargs
    )


_TRANSFORMS = {name: _transform(name) for name in dir(np.fft) if "fft" in name}
FFT = StrictModule(_FFT, SimpleNamespace(**_TRANSFORMS))


def permute_into(backend, dst, src, axes):
    values = getattr(src, "values", src)  # the queue of the host reads NumPy blocks, too
    dst.values[...] = values.transpose(tuple(axes))


def emulated_strictly(monkeypatch):
    """Put this CuPy in the place of the real one."""
    from dask.array.backends import register_cupy

    monkeypatch.setitem(sys.modules, "cupy", CUPY)
    monkeypatch.setitem(sys.modules, _FFT, FFT)
    register_cupy()
    for name, value in (
        ("queue", lambda backend, leave_bandwidth=False: HostQueue(backend)),
        ("permute_into", permute_into),
        ("fft_modules", (_FFT,)),
        ("device_bytes", lambda backend: 0),
        ("memory_below", lambda backend, wanted_bytes, limit: None),
    ):
        monkeypatch.setattr(CupyBackend, name, value)
    monkeypatch.setattr(cupy_backend, "_rmm_resources", list)
    return CUPY
