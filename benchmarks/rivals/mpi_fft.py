"""mpi4py-fft on CPUs: a matrix redistributed among MPI processes, then transposed by each.

    python -m benchmarks.rivals.mpi_fft --cpu --gpus 4 --size 10000

`mpiexec` starts `--gpus` processes. Each has a row slab. After `DistArray.redistribute`
(`MPI_Alltoallw` of subarrays) it has a column slab, and copies the transpose of that slab into the
rows of the result. Two forms are tried: NumPy's copy of the whole slab, and copies of blocks that
fit into a cache. The faster form is reported, with the time of the redistribution alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.rivals.common import Case, cases, emit, parser, read, row, time_forms

WAY = "mpi4py-fft"

_INSIDE = "DASK_P2P_RIVAL_IN_MPI"
_BLOCK_BYTES = 1024  # bytes of a block's row; a block is transposed at a time

_TIMEOUT_S = 120

# Open MPI starts more processes than cores, or processes of root, only with these settings.
_MPI_ENVIRONMENT = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# The environment before a cluster starts. A nanny sets its workers' variables in its own process's
# environment, and with these MPI took twice as long for a step of 128 x 128 elements.
_ENVIRONMENT = {**_MPI_ENVIRONMENT, **os.environ}


def copy_whole(dst: Any, src: Any) -> None:
    """Transpose by one NumPy copy."""
    dst[...] = src.T


def copy_in_blocks(dst: Any, src: Any) -> None:
    """Transpose blocks that fit into a cache, one by one."""
    step = max(1, _BLOCK_BYTES // src.itemsize)
    for row_ in range(0, src.shape[0], step):
        for column in range(0, src.shape[1], step):
            block = src[row_ : row_ + step, column : column + step]
            dst[column : column + step, row_ : row_ + step] = block.T


def values(case: Case, rank: int, transposed: bool) -> Any:
    """Return the slab of a process, of the input or of the result."""
    rows = (np.arange(case.rows) + rank * case.rows)[:, None]
    columns = np.arange(case.size)[None, :]
    index = columns * case.size + rows if transposed else rows * case.size + columns
    return (index % case.modulus).astype(case.dtype)


def measure(case: Case, world: Any) -> dict[str, Any]:
    """Time the transpose of one matrix, and check it."""
    import mpi4py
    import mpi4py_fft
    from mpi4py import MPI

    shape = (case.size, case.size)
    subcomm = mpi4py_fft.pencil.Subcomm(world, [0, 1])
    x = mpi4py_fft.DistArray(shape, subcomm, dtype=np.dtype(case.dtype), alignment=1)
    x[...] = values(case, world.rank, transposed=False)
    columns = x.redistribute(0)
    y = np.empty((case.rows, case.size), case.dtype)

    def seconds(run: Callable[[], Any]) -> float:
        """Time one run, from a common start to the end of the slowest process."""
        world.Barrier()
        start_s = time.perf_counter()
        run()
        return float(world.allreduce(time.perf_counter() - start_s, MPI.MAX))

    def transpose(copy: Callable[[Any, Any], None]) -> None:
        x.redistribute(out=columns)
        copy(y, np.asarray(columns))

    runs = {
        "NumPy's copy": partial(transpose, copy_whole),
        "copied in blocks": partial(transpose, copy_in_blocks),
    }
    # All processes get the slowest process's times, and therefore choose the same form.
    timing = time_forms({name: partial(seconds, run) for name, run in runs.items()}, case.repeats)
    alone = time_forms({"alone": partial(seconds, lambda: x.redistribute(out=columns))}, 3)
    y.view(np.uint8).fill(0xA5)
    columns.view(np.uint8).fill(0xA5)
    seconds(runs[timing.form])
    wrong_count = world.allreduce(int((y != values(case, world.rank, transposed=True)).sum()))
    versions = {"mpi4py": mpi4py.__version__, "mpi": MPI.Get_library_version().partition(",")[0]}
    versions["mpi4py-fft"] = mpi4py_fft.__version__
    alone_s = alone.forms_s["alone"]
    return row(WAY, case, timing, wrong_count, all_to_all_s=alone_s, versions=versions)


def launcher() -> str:
    """Return the path of `mpiexec` or `mpirun`."""
    path = shutil.which("mpiexec") or shutil.which("mpirun")
    if path is None:
        raise FileNotFoundError("found no mpiexec: install an MPI, such as openmpi-bin")
    return path


def run_once(module: str, processes: int, *numbers: int) -> dict[str, Any]:
    """Run a module of this folder in MPI processes; return the output of rank 0, parsed as JSON.

    Parameters
    ----------
    module
        Full name of the module, which runs as a program.
    processes
        Number of processes.
    *numbers
        Arguments of the program.

    Raises
    ------
    RuntimeError
        If a process fails.
    """
    command = [launcher(), "-n", str(processes), sys.executable, "-m", module]
    process = subprocess.run(
        [*command, *map(str, numbers)],
        env=_ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if process.returncode:
        raise RuntimeError(
            process.stderr.strip().rpartition("\n")[2] or "it ended without a message"
        )
    report: dict[str, Any] = json.loads(process.stdout)
    return report


def main() -> None:
    """Start the processes, or measure as one of them."""
    options = read(parser(__doc__))
    if not options.cpu:
        sys.exit("mpi4py-fft is measured on CPUs only: give --cpu")
    if _INSIDE not in os.environ:
        program = launcher()
        command = [program, "-n", str(options.gpus), sys.executable, "-m", __spec__.name]
        os.execve(program, [*command, *sys.argv[1:]], {**_ENVIRONMENT, _INSIDE: "1"})
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != options.gpus:
        sys.exit(f"expected {options.gpus} processes, MPI has {world.size}")
    for case in cases(options):
        report = measure(case, world)
        if world.rank == 0:
            emit(report, options.json)


if __name__ == "__main__":
    main()
