"""What the commands show: numbers as text."""

from __future__ import annotations

import os
from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from dask_p2p.types import DType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dask_p2p.cli._options import ClusterSpec

_SHAPES_SHOWN = 6


def pluralize(count: int, noun: str) -> str:
    """Put a number before a noun.

    >>> pluralize(1, "stage"), pluralize(2, "stage")
    ('1 stage', '2 stages')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape.

    >>> shape_text((192, 1024))
    '192 x 1024'
    """
    return " x ".join(map(str, shape)) or "one value"


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """Write how many there are of each shape.

    >>> shapes_text([(2, 5), (2, 5), (1, 5)])
    '2 of 2 x 5, 1 of 1 x 5'
    """
    counts = Counter(map(tuple, shapes))
    texts = [f"{count} of {shape_text(shape)}" for shape, count in counts.items()]
    if len(texts) > _SHAPES_SHOWN:
        texts[_SHAPES_SHOWN:] = [f"and {len(texts) - _SHAPES_SHOWN} more shapes"]
    return ", ".join(texts) or "none"


def devices_text(spec: ClusterSpec, names: Sequence[str]) -> str:
    """Write which workers there are, and on what, by the names of GPUs or processors."""
    models = Counter(names)
    listed = ", ".join(f"{count} x {name}" for name, count in models.items())
    if spec.gpus:
        return f"{pluralize(spec.workers, 'worker')}, one a GPU: {listed}"
    return (
        f"{pluralize(spec.workers, 'one-thread worker')} over TCP on {', '.join(models)}, "
        f"{pluralize(os.cpu_count() or 1, 'core')}"
    )


def array_text(shape: Sequence[int], dtype: DType) -> str:
    """Write an array's shape, dtype and size."""
    size_bytes = prod(shape) * dtype.itemsize
    return f"{shape_text(shape)} {dtype}, {format_bytes(size_bytes)}"
