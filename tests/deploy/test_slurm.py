"""deploy/slurm: run on this host, by a Slurm of its own, and where its commands are replaced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.controller import controller, ended
from tests.deploy.support import BIN, DEPLOY, environment, output_of

pytestmark = pytest.mark.programs

SLURM = DEPLOY / "slurm"
FAKES = Path(__file__).parent / "slurm"
SCRIPTS = [*sorted(DEPLOY.glob("*/*.sh")), DEPLOY.parent / ".ci" / "package"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    def check(text):
        return subprocess.run(
            [BIN / "shellcheck", "-"], input=text, capture_output=True, text=True, check=False
        ).stdout

    text = path.read_text()
    assert check(text) == ""
    assert "SC2086" in check(text + "\necho $1\n")


@pytest.fixture
def slurm(tmp_path):
    """Variables with which jobs run here; jobs that are left at the end are ended."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    yield {
        "PATH": os.pathsep.join([str(FAKES), environment()["PATH"]]),
        "FAKE_SLURM": str(jobs),
        "INTERFACE": "lo",
        "TMPDIR": str(tmp_path),
    }
    for job in jobs.glob("*.pid"):
        subprocess.run([FAKES / "scancel", job.stem], env={"FAKE_SLURM": str(jobs)}, check=False)


@pytest.mark.long  # two nodes on one machine take it a while; jobs of one node are below
def test_a_job_of_two_nodes(tmp_path, slurm):
    shutil.copy(SLURM / "transpose.py", tmp_path)
    header = {
        line.partition("=")[0]: line.partition("=")[2]
        for line in (SLURM / "job.sh").read_text().splitlines()
        if line.startswith("#SBATCH")
    }
    assert header["#SBATCH --nodes"] == "2"
    assert header["#SBATCH --ntasks-per-node"] == "1"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    output = output_of(
        "bash", SLURM / "job.sh", **slurm, **job, SLURM_SUBMIT_DIR=str(tmp_path), cwd=tmp_path
    )
    assert "every element is right: True" in output
    logs = tmp_path / "dask-7"
    assert [path.name for path in sorted(logs.iterdir())] == ["scheduler.log", "workers.log"]
    assert not list((tmp_path / "jobs").iterdir()), "a step goes on after the job"


def test_jobs_that_come_and_go_with_a_cluster(tmp_path, slurm):
    command = (sys.executable, SLURM / "cluster.py", "--workers", "1", "--interface", "lo")
    output = output_of(*command, **slurm, cwd=tmp_path)
    assert "every element is right: True" in output
    assert len((tmp_path / "jobs" / "submitted").read_text().split()) == 2
    assert not list((tmp_path / "jobs").glob("*.pid")), "a job was not cancelled"


def test_jobs_on_gpus(tmp_path, slurm):
    """What would be submitted: dask-cuda's worker takes the place of Dask's."""
    (tmp_path / "gpus.py").write_text(
        f"import sys; sys.path.insert(0, {str(SLURM)!r})\n"
        "import cluster\n"
        "if __name__ == '__main__':\n"
        "    with cluster.gpu_cluster(cluster.arguments()) as made: print(made.job_script())\n"
    )
    flags = ["--gpus", "--workers", "4", "--memory", "32GiB", "--interface", "lo"]
    script = output_of(sys.executable, tmp_path / "gpus.py", *flags, **slurm, cwd=tmp_path)
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
    output = output_of(*command, timeout=200, **real, TMPDIR=str(tmp_path), cwd=tmp_path)
    assert "every element is right: True" in output
    assert "#SBATCH -t 00:05:00" in output
    assert not output_of("squeue", "--noheader", "--states=PENDING,RUNNING", **real).strip()
