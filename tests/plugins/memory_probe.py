"""Run by a test in a process of its own: prints a worker's blocks, its peak, the estimate; MiB.

They are those of the worker that needs most beside its blocks. The peak is that of resident memory
over what the worker used before it had any block.
"""

import sys

import dask
from distributed import Client, wait

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from tests.support import spread

MIB = 2**20


def reset_peak() -> int:
    """Forget the peak; return the resident bytes of now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def block_bytes(dask_worker) -> int:
    return sum(block.nbytes for block in dask_worker.data.values())


def main(size: int, workers: int) -> None:
    with (
        dask.config.set({"p2p.transports.part-bytes": "4 MiB"}),
        dask_p2p.local_cluster(workers, gpus=False) as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        # The first exchange loads code and fills pools; what it leaves is not a block's.
        small = client.persist(indexed_array((400, 400), (100, 400), "f8"))
        wait(client.persist(dask_p2p.transpose(small)))
        del small
        before = client.run(reset_peak)
        chunks = (size // workers, size)
        x = spread(client, indexed_array((size, size), chunks, "f8"))  # a slab each
        estimated = dask_p2p.estimate(x).total_bytes
        client.run(reset_peak)  # making the values needs more than keeping them
        y = client.persist(dask_p2p.transpose(x))
        wait(y)
        peaks = client.run(peak)
        sizes = client.run(block_bytes)
    worst = max(before, key=lambda address: peaks[address] - before[address] - sizes[address])
    numbers = sizes[worst], peaks[worst] - before[worst], estimated
    print(*(f"{nbytes / MIB:.1f}" for nbytes in numbers))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3])) if len(sys.argv) > 2 else main(5100, 3)
