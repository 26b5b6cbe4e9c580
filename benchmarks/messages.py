"""Messages between two ranks of a section, and sums over all ranks, compared with mpi4py.

    python -m benchmarks.messages --bytes 8 --bytes 67108864 --json FILE
    python -m benchmarks.messages --gpu --json FILE

Values go there and back between two workers of one host. A time is that of one message, or of one
`allreduce`, in the fastest round of several in a row: cores that other programs share make longer
rounds mean little. Runs of a section and of MPI alternate. `messages_gpu` has the other program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

import dask_p2p
from benchmarks import messages_gpu
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals import mpi_messages
from benchmarks.rivals.mpi_messages import ALLREDUCE, INTO, NEW, NUMBER, least_s, ping_pong

__all__ = ["main"]

_WAYS = (NUMBER, NEW, INTO, ALLREDUCE)
_SIZES = (8, 1 << 20, 1 << 26)


def timed(ctx: Any, size_bytes: int, rounds: int) -> Any:
    """Return a rank's seconds of each way."""
    sent, into = np.zeros(size_bytes // 8), np.zeros(size_bytes // 8)
    peer, options = 1 - ctx.rank, mpi_messages.rounds_of(size_bytes, rounds)

    def messages(value: Any, out: Any = None) -> float:
        call = ping_pong(ctx.rank, lambda: ctx.send(value, peer), lambda: ctx.recv(peer, out=out))
        return least_s(ctx.barrier, call, *options) / 2

    seconds = [np.nan] * 3
    if ctx.size == 2:
        number = messages(0.5) if size_bytes == mpi_messages.NUMBER_BYTES else np.nan
        seconds = [number, messages(sent), messages(sent, into)]
    return np.array([*seconds, least_s(ctx.barrier, lambda: ctx.allreduce(sent), *options)])


def of_section(size_bytes: int, ranks: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each way in a section."""
    options: dict[str, Any] = {"size_bytes": size_bytes, "rounds": rounds, "ranks": ranks}
    y: Any = dask_p2p.spmd(timed, outputs=dask_p2p.PerRank(np.zeros(len(_WAYS))), **options)
    slowest = y.compute().max(axis=0).tolist()
    return {
        way: way_seconds
        for way, way_seconds in zip(_WAYS, slowest, strict=True)
        if way_seconds == way_seconds
    }


def in_turn(
    ways: dict[str, Callable[[], dict[str, float]]], repeats: int
) -> dict[str, dict[str, float]]:
    """Return the least seconds of each way by each program, whose runs alternate."""
    results: dict[str, dict[str, float]] = {program: {} for program in ways}
    for _ in range(repeats):
        for program, measure in ways.items():
            for way, own_s in measure().items():
                results[program][way] = min(own_s, results[program].get(way, own_s))
    return results


@click.command(context_settings={"show_default": True})
@click.option("--bytes", "sizes", multiple=True, type=int, help="Of a value.  [default: some]")
@click.option("--ranks", default=2, help="Workers of one thread; messages are timed with two.")
@click.option("--rounds", default=20, help="Rounds in each run.")
@click.option("--repeats", default=5, help="Runs of each program.")
@click.option("--gpu", "on_gpu", is_flag=True, help="CuPy arrays on two GPUs.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    sizes: Sequence[int], ranks: int, rounds: int, repeats: int, on_gpu: bool, path: Path | None
) -> None:
    """Time messages and sums in a section and by mpi4py."""
    if on_gpu:
        rows = messages_gpu.measured(sizes or messages_gpu.SIZES, rounds)
    else:
        rows = of_cpus(sizes or _SIZES, ranks, rounds, repeats)
    write(path, {**environment(), "ranks": ranks, "repeats": repeats, "rows": rows})


def of_cpus(sizes: Sequence[int], ranks: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Print and return the seconds of each way on CPUs, by size."""
    from distributed import Client, LocalCluster

    rows = []
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(n_workers=ranks, **options) as cluster, Client(cluster) as client:
        dask_p2p.register(client)
        for size_bytes in sizes:
            ways: dict[str, Callable[[], dict[str, float]]] = {
                "dask_p2p": lambda size=size_bytes: of_section(size, ranks, rounds)  # type: ignore[misc]
            }
            if find_spec("mpi4py") is not None:
                ways["mpi4py"] = lambda size=size_bytes: mpi_messages.seconds(size, ranks, rounds)  # type: ignore[misc]
            times = in_turn(ways, repeats)
            for way, own_s in times["dask_p2p"].items():
                text = f"{size_bytes:>10} bytes, {way:>18}: {own_s * 1e6:10.2f} us"
                if (mpi_s := times.get("mpi4py", {}).get(way)) is not None:
                    text += f", mpi4py {mpi_s * 1e6:10.2f} us, ratio {own_s / mpi_s:6.2f}"
                print(text, flush=True)
            rows.append({"bytes": size_bytes, "times_s": times})
    return rows


if __name__ == "__main__":
    main()
