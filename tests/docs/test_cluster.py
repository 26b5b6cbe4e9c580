"""The page "Start it on a cluster": its programs and commands start clusters that transpose."""

import re
import shlex
import shutil
import sys
from importlib.util import find_spec

import dask.array as da
import pytest

import dask_p2p
from tests.deploy.support import environment, output_of, running
from tests.docs.pages import DOCS, blocks_of
from tests.support import BOUND_S

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:Port 8787 is already in use"),  # of another cluster
]

PAGE = DOCS / "how-to" / "cluster.md"


def block(section, language="python"):
    lines = PAGE.read_text("utf-8").splitlines()
    first = lines.index(f"## {section}")
    return next(
        example.text
        for example in blocks_of(PAGE)
        if example.language == language and example.line > first
    )


def transposes(client):
    x = da.arange(48, chunks=12).reshape(12, 4)
    return client.compute((dask_p2p.transpose(x) == x.T).all()).result(timeout=BOUND_S)


def test_a_scheduler_and_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in block("Several machines", "sh").splitlines()]
    commands[0] += ["--port", "0", "--dashboard-address", ":0", "--no-jupyter"]
    names = {}
    with running(tmp_path, *commands):
        exec(block("Several machines"), names)
        with names["client"] as client:
            assert transposes(client)


HEADERS = {
    "SLURMCluster": ["#SBATCH --cpus-per-task=16", "#SBATCH --mem=64G", "#SBATCH -t 01:00:00"],
    "PBSCluster": ["#PBS -l select=1:ncpus=16:mem=64GB", "#PBS -l walltime=01:00:00"],
    "LSFCluster": ["#BSUB -n 16", "#BSUB -M 68720", "#BSUB -W 01:00"],
}


@pytest.mark.parametrize("kind", HEADERS)
def test_the_scripts_of_jobs(tmp_path, monkeypatch, kind):
    pytest.importorskip("dask_jobqueue")
    monkeypatch.chdir(tmp_path)
    text = block("Slurm, PBS, LSF").partition("cluster.scale")[0]
    assert kind in text.partition("\n")[0]
    text = text.replace("SLURMCluster", kind).replace('"ib0"', '"lo"')
    if kind == "LSFCluster":
        walltime = re.search(r'for LSF ("[\d:]+")', text)[1]
        text = text.replace('"01:00:00"', f"{walltime}, lsf_units='mb'")
    names = {}
    exec(text, names)
    with names["cluster"] as cluster:
        script = cluster.job_script()
    for line in HEADERS[kind]:
        assert line in script, script
    (command,) = [line for line in script.splitlines() if "dask_worker" in line]
    for part in ("--nworkers 16", "--nthreads 1", "--interface lo", "4.00GiB"):
        assert part in command


# For containers: four ranks on two cores, as root; by Open MPI 4 and 5.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def lacks_mpi():
    for package in ("dask_mpi", "mpi4py"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    return None if shutil.which("mpirun", path=environment()["PATH"]) else "there is no mpirun"


@pytest.mark.skipif(lacks_mpi() is not None, reason=str(lacks_mpi()))
def test_a_job_of_mpi(tmp_path):
    program = block("MPI").replace('"ib0"', '"lo"').replace("(64)", "(2)")
    program += (
        "import dask.array as da, dask_p2p\n"
        "x = da.arange(48, chunks=12).reshape(12, 4).persist()\n"
        "y = dask_p2p.transpose(x).persist()\n"
        "print('all right:', bool((y == x.T).all().compute()))\n"
        "print(len(client.nthreads()), 'workers')\n"
    )
    (tmp_path / "program.py").write_text(program)
    (command, *_) = block("MPI", "sh").splitlines()
    command = command.replace("-n 66", "-n 4").replace("python", sys.executable)
    output = output_of(*shlex.split(command), cwd=tmp_path, **OPEN_MPI)
    assert "all right: True\n2 workers\n" in output
