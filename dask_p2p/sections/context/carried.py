"""Variables that a loop of steps carries from step to step, next to its state.

In ``for _ in ctx.steps(n, s): s.u = s.u + t; t += dt`` the number `t` is not in the state. Ranks
that resumed from a checkpoint would begin with the first `t` again.
"""

from __future__ import annotations

import dis
import logging
import re
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np

from dask_p2p.sections.context.bindings import names_in
from dask_p2p.sections.context.state import State
from dask_p2p.types import Array

logger = logging.getLogger(__name__)

#: Operations on local variables: one, or two in one.
_LOCAL = re.compile(r"(LOAD|STORE)_(?:FAST|DEREF)")
_HIDES = "LOAD_FAST_AND_CLEAR"  # hides a variable from a comprehension that has its name, too


def carried_values(state: State, code: CodeType | None, frame: FrameType) -> list[str]:
    """Return the names of numbers and arrays that a loop carries, and its state does not have.

    `code` is that of the function with the loop. `frame` has requested the next step: it may be
    that of a progress bar instead.
    """
    if not state.has_copies or frame.f_code is not code:
        return []
    names, own = names_in(frame), [leaf.array for leaf in state.leaves().values()]
    found = [name for name in _read_first(frame) if _is_outside(names.get(name), own)]
    if found:
        logger.warning(
            "The loop of ctx.steps carries %s from step to step, outside of its state. After the "
            "loss of a worker its ranks begin at the start. A run that resumes from files has the "
            "first values. Give them to ctx.state: s.%s.",
            ", ".join(found),
            found[0],
        )
    return found


def _is_outside(value: Any, own: Sequence[Array]) -> bool:
    """Return whether a value is a number, or an array outside of a state."""
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return True
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array and getattr(value, "base", None) is None and all(value is not a for a in own)


def _read_first(frame: FrameType) -> list[str]:
    """Return the names that the body of a loop reads before it sets them, in their order."""
    first: dict[str, str] = {}
    is_set = set[str]()
    for verb, name in _accesses(frame):
        first.setdefault(name, verb)
        if verb == "STORE":
            is_set.add(name)
    return [name for name, verb in first.items() if verb == "LOAD" and name in is_set]


def _accesses(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield the accesses to local variables in the body of a loop: verb and name."""
    instructions = [*dis.get_instructions(frame.f_code)]
    # Python 3.12 is in the cache behind the operation.
    loop = [each for each in instructions if each.offset <= frame.f_lasti][-1]
    if loop.opname != "FOR_ITER":
        return
    for each in instructions:
        if loop.offset < each.offset < loop.argval and (verbs := _LOCAL.findall(each.opname)):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            yield from zip(["HIDE"] if each.opname == _HIDES else verbs, names, strict=True)
