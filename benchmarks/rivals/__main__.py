"""Run the rivals, each in a process of its own, print a table, write JSON.

    python -m benchmarks.rivals --gpus 8 --size 65536 --size 131072 --json FILE

Each process returns its memory before the next one starts. A rival that fails or hangs gets a row
with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rivals import copy_engines, mpi_fft, sharded_jax, torch_dtensor, torch_nccl
from benchmarks.rivals.common import ROOT, parser, why

#: Way, module and required library; mpi4py-fft runs on CPUs, the others on GPUs.
RIVALS = (
    (copy_engines.WAY, copy_engines.__name__, "cupy"),
    (torch_nccl.WAY, torch_nccl.__name__, "torch"),
    (torch_dtensor.WAY, torch_dtensor.__name__, "torch"),
    (sharded_jax.WAY, sharded_jax.__name__, "jax"),
    (mpi_fft.WAY, mpi_fft.__name__, "mpi4py_fft"),
)

#: Libraries of the default rivals; true: on CPUs.
LIBRARIES = {
    False: ("cupy", "torch", "jax"),
    True: ("cupy", "torch", "jax", "mpi4py_fft"),
}


def run_rival(
    way: str, module: str, library: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run one rival at all sizes; a row without figures has the reason in ``failed``."""
    # On CPUs NumPy replaces CuPy.
    if find_spec(library) is None and not (options.cpu and library == "cupy"):
        return failed(way, options, options.size, f"{library} is not installed")
    command = [sys.executable, "-m", module, "--gpus", str(options.gpus)]
    command += ["--dtype", options.dtype, "--repeats", str(options.repeats)]
    command += [word for size in options.size for word in ("--size", str(size))]
    command += ["--cpu"] if options.cpu else []
    with tempfile.TemporaryDirectory() as folder:
        rows_path, errors_path = Path(folder, "rows"), Path(folder, "errors")
        rows_path.touch()
        with errors_path.open("wb") as errors:
            reason = run_for([*command, "--json", str(rows_path)], options.timeout, errors)
        rows = [json.loads(line) for line in rows_path.read_text("utf-8").splitlines()]
        said = errors_path.read_text("utf-8", errors="replace")
    missing = [size for size in options.size if size not in {row["size"] for row in rows}]
    if missing:
        sys.stderr.write(said)
        rows += failed(way, options, missing, reason or why(said))
    return rows


def run_for(command: Sequence[str], timeout_s: float, errors: Any) -> str | None:
    """Run a command; after its time, end it and its children, and return the reason."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=errors, stderr=errors, start_new_session=True
    )
    try:
        process.wait(timeout_s)
    except BaseException as exc:  # also an interrupt: the processes of the GPUs must end
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for child in started:  # those of MPI have groups of their own
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if isinstance(exc, subprocess.TimeoutExpired):
            return f"not done after {timeout_s:g} s"
        raise
    return None


def failed(
    way: str, options: argparse.Namespace, sizes: Sequence[int], reason: str
) -> list[dict[str, Any]]:
    """Return rows with a reason instead of figures."""
    return [
        {
            "way": way,
            "size": size,
            "dtype": options.dtype,
            "gpus": options.gpus,
            "failed": reason,
        }
        for size in sizes
    ]


def line(row: dict[str, Any]) -> str:
    """Return a printed row of the table."""
    head = f"{row['size']:>8}  {row['dtype']:<10}  {row['way']:<21}"
    if "failed" in row:
        return f"{head}  failed: {row['failed'][:100]}"
    return (
        f"{head}  {row['median_s'] * 1e3:9.3f} ms  {min(row['times_s']) * 1e3:9.3f} ms best  "
        f"{row['link_gbs']:6.1f} GB/s  wrong {row['wrong']}  {row['form']}"
    )


def main() -> None:
    """Read the command line, run, print, write."""
    argument_parser = parser(__doc__)
    argument_parser.add_argument(
        "--timeout", type=float, default=120, help="limit of each rival, seconds"
    )
    argument_parser.add_argument("--only", action="append", help="library of a rival; repeatable")
    options = argument_parser.parse_args()
    rows = []
    for way, module, library in RIVALS:
        if library not in (options.only or LIBRARIES[options.cpu]):
            continue
        measured = run_rival(way, module, library, options)
        for row in measured:
            print(line(row), flush=True)
        rows += measured
        if options.json:  # after each rival, in case this program ends early
            Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
