"""Tasks whose kernels a GPU may replay in place of further calls.

Such a task depends on its inputs alone: `dask_p2p.replayable`. Functions of Dask
and of this package do so, apart from random numbers. A call of a task gets its own copies of all
other objects among its arguments, so they have no state. NumPy arrays among them are refused: a
task would upload them.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
from dask.task_spec import GraphNode

from dask_p2p.fusing.planning.program import AssembleStep
from dask_p2p.fusing.running.functions import parts_of
from dask_p2p.replayable import is_constant, is_replayable

_PACKAGES = frozenset({"cytoolz", "dask", "dask_array", "dask_p2p", "functools", "tlz", "toolz"})
_CONTAINERS = (tuple, list, set, frozenset, dict, GraphNode, functools.partial)
_CLASSES = (tuple, list, set, frozenset, dict)  # which Dask passes to its functions
_STATEFUL = "random"


def is_replayable_step(step: Any) -> bool:
    """Return whether a step of a program is known to depend on its inputs alone."""
    if isinstance(step, AssembleStep):
        return _is_replayable(step.block.epilogue, set())
    return _is_replayable(step, set())


def _is_replayable(value: Any, seen: set[int]) -> bool:
    if isinstance(value, np.ndarray):
        return False
    if id(value) in seen or is_constant(value) or any(value is each for each in _CLASSES):
        return True
    seen.add(id(value))
    is_named = isinstance(value, (FunctionType, BuiltinFunctionType, type))
    package, *others = str((value if is_named else type(value)).__module__).split(".")
    if package in _PACKAGES or isinstance(value, _CONTAINERS):
        return _STATEFUL not in others and all(_is_replayable(p, seen) for p in parts_of(value))
    return is_replayable(value)
