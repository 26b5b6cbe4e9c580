"""The queue of host memory: work is finished when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dask_p2p.backends.base import Backend, Timer
from dask_p2p.types import Array, DTypeLike


class HostQueue:
    """The queue of NumPy arrays: work is finished when a call returns."""

    def __init__(self, backend: Backend, pinned_output: bool = False) -> None:
        self.kind = backend.name
        self.pinned_output = pinned_output
        self._backend = backend

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        return self._backend.empty(shape, dtype)

    scratch = empty

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        pass

    def permute(
        self, dst: Array, src: Array, axes: Sequence[int], *, concurrent: bool = False
    ) -> None:
        self._backend.permute_into(dst, src, axes)

    def permute_and_drop(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        self.permute(dst, src if isinstance(src, np.ndarray) else src.get(), axes)

    def fill(self, dst: Array, value: Any) -> None:
        self.permute(dst, np.broadcast_to(value, dst.shape), range(dst.ndim))

    def prefetch(self, src: Array, slot_bytes: int) -> Any:
        return src

    def permute_prefetched(self, dst: Array, part: Any, axes: Sequence[int]) -> None:
        self.permute(dst, part, axes)

    def pack(self, dst: Array, src: Array) -> Callable[[], None]:
        self.permute(dst, src, range(src.ndim))
        return self.synchronize

    def to_host(self, array: Array) -> Any:
        return array

    def timing(self, timer: Timer) -> Timer:
        return timer

    def synchronize(self) -> None:
        pass
