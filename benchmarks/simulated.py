"""Programs of `benchmarks.solvers`: steps of NumPy expressions, which note when they begin.

Workers import this module, so that the notes are those of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np

__all__ = ["IN_A_ROW", "PROGRAMS", "Arrays", "by_numpy", "least_noted"]

IN_A_ROW = 50  # steps: with one frame
Arrays = Mapping[str, Any]
_began_s: list[float] = []  # start times of steps in this process


def least_noted() -> float:
    """Return the seconds of a step in the fastest steps in a row; clear the record.

    The first steps do not count: a frame is written during the steps after it.
    """
    began_s = _began_s[IN_A_ROW:]
    _began_s.clear()
    pairs = zip(began_s, began_s[IN_A_ROW:], strict=False)
    return min((last - first for first, last in pairs), default=inf) / IN_A_ROW


# --- Gray-Scott


def laplacian(a: Any) -> Any:
    """Return the Laplacian of nine points."""
    near = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]
    far = a[:-2, :-2] + a[:-2, 2:] + a[2:, :-2] + a[2:, 2:]
    return 0.2 * near + 0.05 * far - a[1:-1, 1:-1]


def react(u: Any, v: Any) -> Arrays:
    """Return two substances after a step, from those with a halo."""
    _began_s.append(time.perf_counter())
    spread_u, spread_v = laplacian(u), laplacian(v)
    u, v = u[1:-1, 1:-1], v[1:-1, 1:-1]
    rate = u * v**2
    return {
        "u": u + spread_u - rate + 0.055 * (1 - u),
        "v": v + 0.5 * spread_v + rate - 0.117 * v,
    }


def substances(side: int) -> Arrays:
    """Return the first fields."""
    draw = np.random.default_rng(0)
    return {"u": draw.random((side, side)), "v": draw.random((side, side)) / 4}


# --- lattice Boltzmann, D2Q9

_X = np.array([0, 1, 0, -1, 0, 1, -1, -1, 1])
_Y = np.array([0, 0, 1, 0, -1, 1, 1, -1, -1])
_WEIGHTS = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)[:, None, None]


def flow(f: Any) -> Arrays:
    """Return the populations of a lattice after a step, from those with a halo."""
    _began_s.append(time.perf_counter())
    ny, nx = f.shape[1] - 2, f.shape[2] - 2
    new = np.empty((9, ny, nx))
    for k in range(9):
        new[k] = f[k, 1 - _Y[k] : 1 - _Y[k] + ny, 1 - _X[k] : 1 - _X[k] + nx]
    rho = new.sum(axis=0)
    ux = (new[1] + new[5] + new[8] - new[3] - new[6] - new[7]) / rho
    uy = (new[2] + new[5] + new[6] - new[4] - new[7] - new[8]) / rho
    along = _X[:, None, None] * ux + _Y[:, None, None] * uy
    balanced = _WEIGHTS * rho * (1 + 3 * along + 4.5 * along**2 - 1.5 * (ux**2 + uy**2))
    return {"f": new + 1.5 * (balanced - new)}


def populations(side: int) -> Arrays:
    """Return the first populations."""
    return {
        "f": _WEIGHTS * (1 + 0.1 * np.random.default_rng(0).random((9, side // 4, side * 3 // 4)))
    }


#: By name: the function of a step, its first fields for a side, and the depth of halos.
PROGRAMS: dict[str, tuple[Callable[..., Arrays], Callable[[int], Arrays], Any]] = {
    "Gray-Scott": (react, substances, 1),
    "lattice Boltzmann": (flow, populations, {1: 1, 2: 1}),
}


def by_numpy(name: str, fields: Arrays, steps: int) -> Arrays:
    """Return the fields after some steps of one process."""
    step = PROGRAMS[name][0]
    for _ in range(steps):
        width = [(0, 0)] * ("f" in fields) + [(1, 1)] * 2
        fields = step(**{key: np.pad(array, width, "wrap") for key, array in fields.items()})
    return fields
