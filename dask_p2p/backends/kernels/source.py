"""CUDA sources of this folder, compiled at their first use on a device.

Import this module only if CuPy is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, Generic, TypeVar

import cupy

_T = TypeVar("_T")


class CudaSource(Generic[_T]):
    """The kernels of a CUDA source file, loaded once on each device.

    Parameters
    ----------
    file
        Name of the file.
    load
        Returns the kernels, from the compiled `cupy.RawModule` on the current device.
    options
        Options of the compiler, in addition to the C++ standard.
    """

    def __init__(self, file: str, load: Callable[[Any], _T], *options: str) -> None:
        self._file, self._load, self._options = file, load, ("--std=c++17", *options)
        self._loaded: dict[int, _T] = {}  # by device
        self._loading = threading.Lock()

    def on(self, device_id: int) -> _T:
        """Return the kernels on the current device, `device_id`."""
        found = self._loaded.get(device_id)
        if found is None:
            with self._loading:  # other threads wait for the compilation
                found = self._loaded.get(device_id)
                if found is None:
                    found = self._loaded[device_id] = self._load(self._compiled())
        return found

    def _compiled(self) -> Any:
        """Compile for the current device; CuPy keeps the binary on disk."""
        source = resources.files("dask_p2p.backends.kernels").joinpath(self._file)
        return cupy.RawModule(code=source.read_text("utf-8"), options=self._options)


def load_all(sources: Iterable[CudaSource[Any]]) -> None:
    """Load sources on the current device before their first use. Do not call it on an event loop.

    The first call on a machine compiles them, about 0.8 s each. Threads compile them concurrently,
    so all together take little longer.
    """
    device_id = cupy.cuda.runtime.getDevice()

    def load(source: CudaSource[Any]) -> None:
        with cupy.cuda.Device(device_id):
            source.on(device_id)

    with ThreadPoolExecutor(thread_name_prefix="dask-p2p-compile") as pool:
        for loading in [pool.submit(load, source) for source in sources]:
            loading.result()
