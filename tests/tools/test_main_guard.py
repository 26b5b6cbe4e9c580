"""Scripts as newcomers write them, without and with `if __name__ == "__main__":`."""

import pytest

from tests.support import ran

pytestmark = pytest.mark.programs

UNGUARDED = """
import dask_p2p
from distributed import Client

print("imported as", __name__)
cluster = dask_p2p.local_cluster(2, gpus=False)
client = Client(cluster)
print(client.submit(sum, [1, 2]).result())
client.close()
cluster.close()
"""
CONTEXTS = """
import dask_p2p
from distributed import Client

def main():
    with dask_p2p.local_cluster(1, gpus=False) as cluster, Client(cluster) as client:
        print(client.submit(sum, [1, 2]).result())

main()
"""
ASYNCHRONOUS = """
import asyncio
import dask_p2p
from distributed import Client

async def main():
    async with (
        dask_p2p.local_cluster(1, gpus=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        print(await client.submit(sum, [1, 2]))

asyncio.run(main())
"""
SPAWNING = """
import multiprocessing
import dask_p2p
if __name__ != "__main__":
    dask_p2p.local_cluster(1, gpus=False)
else:
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
SCRIPTS = {"statements": UNGUARDED, "function": CONTEXTS, "asynchronous": ASYNCHRONOUS}


def guarded(script):
    """The script with all but its imports and functions below the line that workers need."""
    *before, last = script.rstrip().split("\n\n")
    below = "\n".join("    " + line for line in last.splitlines())
    return "\n\n".join(before) + f'\n\nif __name__ == "__main__":\n{below}\n'


def written(folder, text, name="first.py"):
    (folder / name).write_text(text)
    return folder / name


def refused(process, *words):
    """The only error is a ConfigError with these words."""
    assert process.returncode == 1
    error = process.stderr.strip().splitlines()[-1]
    assert error.startswith("dask_p2p.errors.ConfigError: ")
    assert all(word in error for word in words), error


REMEDY = 'Move that code below `if __name__ == "__main__":`.'


@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts_without_the_line(tmp_path, kind):
    script = written(tmp_path, SCRIPTS[kind])
    process = ran(script)
    refused(process, f"{script} starts a cluster when it is imported", REMEDY)
    assert process.stderr.count("Traceback") == 1
    assert "distributed" not in process.stderr
    # A single process has imported it, not each worker.
    assert process.stdout.count("imported as __mp_main__") == (kind == "statements")


@pytest.mark.parametrize("kind", ["statements", "asynchronous"])
def test_scripts_with_the_line(tmp_path, kind):
    process = ran(written(tmp_path, guarded(SCRIPTS[kind])))
    assert process.returncode == 0
    assert "dask_p2p" not in process.stderr  # nothing of this package, whatever distributed says
    assert process.stdout.splitlines()[-1] == "3"


#: What works without the line, too: another check, which works with LocalCluster, and threads.
OTHER_WAYS = {
    "\nmain()": (
        "\nimport multiprocessing as mp\nif mp.current_process().name == 'MainProcess':\n    main()"
    ),
    "gpus=False": "gpus=False, processes=False",
}


@pytest.mark.parametrize("part", OTHER_WAYS)
def test_other_ways_that_are_fine(tmp_path, part):
    process = ran(written(tmp_path, CONTEXTS.replace(part, OTHER_WAYS[part])))
    assert (process.returncode, process.stdout) == (0, "3\n")
    assert "dask_p2p" not in process.stderr


def test_programs_without_a_module_that_workers_import(tmp_path):
    assert ran("-c", CONTEXTS).stdout == "3\n"
    package = tmp_path / "package"
    package.mkdir()
    written(package, CONTEXTS, "__main__.py")
    assert ran("-m", "package", cwd=tmp_path).stdout == "3\n"


def test_modules_that_start_a_cluster(tmp_path):
    """As the main program, or imported by it."""
    script = written(tmp_path, CONTEXTS)
    refused(ran("-m", "first", cwd=tmp_path), f"{script} starts a cluster", REMEDY)
    written(tmp_path, UNGUARDED, "helper.py")
    written(tmp_path, "import helper\nprint(1)")
    refused(ran(script), f"{script} starts a cluster", REMEDY)


def test_a_program_that_fails_when_it_is_imported(tmp_path):
    failing = CONTEXTS.replace("\nmain()", "\n1 / (__name__ == '__main__')\nmain()")
    process = ran(written(tmp_path, failing))
    refused(process, "failed with the error above")
    assert "ZeroDivisionError" in process.stderr


def test_a_program_from_a_pipe():
    refused(ran(stdin=guarded(CONTEXTS)), "Save it in a file, and run that.")


def test_another_process_that_imports_the_program(tmp_path):
    """The program has the line, but starts a cluster in front of it, except as a main program."""
    script = written(tmp_path, SPAWNING)
    refused(ran(script), f"{script} starts a cluster", REMEDY)
