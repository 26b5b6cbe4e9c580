"""Command line, timing and rows of all rivals."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

#: By dtype: the largest prime that it holds exactly. An element is its linear index in the matrix
#: modulo this prime, so that equal values are never a power of two, or a tile, apart.
MODULI = {
    "int8": 127,
    "int16": 32749,
    "float16": 2039,
    "int32": 2147483647,
    "float32": 16777213,
    "int64": 2305843009213693951,
    "float64": 9007199254740881,
    "complex64": 16777213,
    "complex128": 9007199254740881,
}

ROOT = Path(__file__).parents[2]

#: Elements of the temporaries that fill and check matrices.
BAND = 2**25

# Defaults that switch NVLink multicast off. An all-to-all does not use it, and a program that dies
# while it uses multicast can disable a host's GPUs.
_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(slots=True)
class Case:
    """A square matrix in one row slab a GPU, to be transposed into row slabs."""

    size: int  # rows
    dtype: str
    gpus: int
    repeats: int  # timed runs
    cpu: bool  # a trial on CPUs, with meaningless times

    def __post_init__(self) -> None:
        if self.size % self.gpus:
            raise ValueError(f"{self.size} rows are no multiple of {self.gpus} GPUs")

    @property
    def rows(self) -> int:
        """Rows of one slab."""
        return self.size // self.gpus

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(np.dtype(self.dtype).itemsize)

    @property
    def modulus(self) -> int:
        """Modulus of the elements' values."""
        return MODULI[self.dtype]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all slabs together."""
        return self.size**2 * self.itemsize

    @property
    def received_bytes(self) -> int:
        """Bytes that one GPU receives from the others."""
        return self.rows**2 * (self.gpus - 1) * self.itemsize

    def bands(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of a slab's rows, so that temporaries stay small."""
        step = max(1, BAND // self.size)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)


@dataclass(slots=True)
class Timing:
    """Runs of the fastest of several forms."""

    form: str
    first_s: float
    times_s: list[float]
    forms_s: dict[str, float] = field(default_factory=dict)  # median of each form's trial runs


def time_forms(forms: Mapping[str, Callable[[], float]], repeats: int, trials: int = 3) -> Timing:
    """Try each form of a rival, and time the fastest.

    Parameters
    ----------
    forms : mapping of str to callable
        Each runs once and returns the seconds that it took.
    repeats : int
        Timed runs of the fastest form. Its trial runs do not count: they were selected for their
        speed, and would flatter it.
    trials : int
        Runs of each form after its first; their median selects the fastest form.
    """
    first_s, forms_s = {}, {}
    for name, run in forms.items():
        first_s[name] = run()
        forms_s[name] = median(run() for _ in range(trials))
    form = min(forms_s, key=lambda name: forms_s[name])
    return Timing(form, first_s[form], [forms[form]() for _ in range(repeats)], forms_s)


def row(way: str, case: Case, timing: Timing, wrong_count: int, **figures: Any) -> dict[str, Any]:
    """Return a row of measurements, with the field names of `python -m benchmarks`."""
    median_s = median(timing.times_s)
    return {
        "way": way,
        "size": case.size,
        "dtype": case.dtype,
        "gpus": case.gpus,
        "matrix_bytes": case.matrix_bytes,
        "first_s": timing.first_s,
        "times_s": timing.times_s,
        "median_s": median_s,
        "bandwidth_gbs": 2 * case.matrix_bytes / median_s / 1e9,
        "wrong": wrong_count,
        "link_gbs": case.received_bytes / median_s / 1e9,
        "form": timing.form,
        "forms_s": timing.forms_s,
        **figures,
    }


def emit(report: Mapping[str, Any], path: str | None) -> None:
    """Print a row as a line of JSON, and append it to a file in case the program ends early."""
    line = json.dumps(report)
    print(line, flush=True)
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a rival."""
    argument_parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    argument_parser.add_argument(
        "--gpus", type=int, required=True, help="number of GPUs, from the first on"
    )
    argument_parser.add_argument(
        "--size", type=int, action="append", required=True, help="rows of the matrix; repeatable"
    )
    argument_parser.add_argument("--dtype", choices=sorted(MODULI), default="float32")
    argument_parser.add_argument(
        "--repeats", type=int, default=9, help="timed runs of the fastest form"
    )
    argument_parser.add_argument(
        "--cpu", action="store_true", help="use CPUs, only to try the program"
    )
    argument_parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    return argument_parser


def read(argument_parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and set the environment that the rivals' libraries read."""
    options = argument_parser.parse_args()
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return options


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield one case a size, the smallest first: the largest may run out of memory."""
    for size in sorted(options.size):
        yield Case(size, options.dtype, options.gpus, options.repeats, options.cpu)


def run_program(
    module: str, *arguments: object, timeout_s: float, **environment: str
) -> dict[str, Any]:
    """Run a module of this folder as a program; return its last line, parsed as JSON.

    Parameters
    ----------
    module
        Its name in this folder.
    *arguments
        Its command line.
    timeout_s
        Its time limit.
    **environment
        Additional environment variables.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    process = subprocess.run(
        [sys.executable, "-m", f"benchmarks.rivals.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if process.returncode:
        raise RuntimeError(why(process.stderr))
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def why(errors: str) -> str:
    r"""Return the line of a program's error output that names the error.

    >>> why("Traceback (most recent call last):\n  File ...\nValueError: too small\n\n")
    'ValueError: too small'
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or ["it ended without a message"])[-1][:300]
