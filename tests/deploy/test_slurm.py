"""deploy/slurm: run on this host, by a Slurm of its own."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from tests.deploy.controller import controller, ended
from tests.deploy.support import BIN, DEPLOY, output_of
from tests.support import run_command

pytestmark = pytest.mark.programs

SLURM = DEPLOY / "slurm"
SCRIPTS = [*sorted(DEPLOY.glob("*/*.sh")), DEPLOY.parent / ".ci" / "package"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    def check(text):
        return run_command(BIN / "shellcheck", "-", input=text).stdout

    text = path.read_text()
    assert check(text) == ""
    assert "SC2086" in check(text + "\necho $1\n")


def test_jobs_on_gpus(tmp_path):
    """What would be submitted: dask-cuda's worker takes the place of Dask's."""
    (tmp_path / "gpus.py").write_text(
        f"import sys; sys.path.insert(0, {str(SLURM)!r})\n"
        "import cluster\n"
        "if __name__ == '__main__':\n"
        "    with cluster.gpu_cluster(cluster.arguments()) as made: print(made.job_script())\n"
    )
    flags = ["--gpus", "--workers", "4", "--memory", "32GiB", "--interface", "lo"]
    script = output_of(sys.executable, tmp_path / "gpus.py", *flags, cwd=tmp_path)
    assert "#SBATCH --gpus-per-node=4" in script
    assert "#SBATCH --mem=131072M" in script
    (command,) = [line for line in script.splitlines() if "-m dask_cuda.cli tcp://" in line]
    assert "--nthreads 1 " in command
    assert "--set-rmm-allocator-for-libs cupy" in command
    assert "--memory-limit 32.00GiB" in command


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A Slurm of two nodes on this host, where a shared folder is none of a test's."""
    with controller(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def submitted(folder, variables, *flags):
    """Submit job.sh in a folder; return the state in which it ended, its output, and its logs."""
    shutil.copy(SLURM / "transpose.py", folder)
    command = ("sbatch", "--parsable", *flags, SLURM / "job.sh")
    job = output_of(*command, cwd=folder, TMPDIR=str(folder), **variables).strip()
    state = ended(job, variables)
    return state, (folder / f"slurm-{job}.out").read_text(), folder / f"dask-{job}"


def test_a_job_on_a_real_controller(tmp_path, real):
    """With the script's own interface, and flags in the place of its sizes."""
    flags = ("--cpus-per-task=1", "--mem=2000M", "--time=5")
    state, output, logs = submitted(tmp_path, real, *flags)
    assert state == "COMPLETED", output
    assert "every element is right: True" in output
    workers = (logs / "workers.log").read_text()
    assert len(re.findall(r"Memory: +1\.95 GiB", workers)) == 2, "--mem is shared out to workers"


def test_a_job_ends_with_its_scheduler(tmp_path, real):
    """Here its interface is not there, and the scheduler does not start."""
    flags = ("--cpus-per-task=1", "--time=5")
    state, output, _ = submitted(tmp_path, real | {"INTERFACE": "ib7"}, *flags)
    assert state == "FAILED"
    assert "'ib7' is not a valid network interface" in output


def test_jobs_of_a_cluster_on_a_real_controller(tmp_path, real):
    flags = ["--nodes", "2", "--workers", "1", "--memory", "1GiB", "--time", "00:05:00"]
    command = (sys.executable, SLURM / "cluster.py", *flags)
    output = output_of(*command, timeout_s=200, **real, TMPDIR=str(tmp_path), cwd=tmp_path)
    assert "every element is right: True" in output
    assert "#SBATCH -t 00:05:00" in output
    assert not output_of("squeue", "--noheader", "--states=PENDING,RUNNING", **real).strip()
