"""deploy/slurm: run on this host, where the commands of Slurm are replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow  # two nodes on one machine take it a while; jobs of one node are below
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
    said = output_of(
        "bash", SLURM / "job.sh", **slurm, **job, SLURM_SUBMIT_DIR=str(tmp_path), cwd=tmp_path
    )
    assert "every element is right: True" in said
    logs = tmp_path / "dask-7"
    assert [path.name for path in sorted(logs.iterdir())] == ["scheduler.log", "workers.log"]
    assert not list((tmp_path / "jobs").iterdir()), "a step goes on after the job"


def test_jobs_that_come_and_go_with_a_cluster(tmp_path, slurm):
    program = (SLURM / "cluster.py").read_text()
    fewer = program.replace("WORKERS_PER_NODE = 8", "WORKERS_PER_NODE = 1")
    assert fewer != program
    (tmp_path / "cluster.py").write_text(fewer)
    said = output_of(sys.executable, tmp_path / "cluster.py", **slurm, cwd=tmp_path)
    assert "every element is right: True" in said
    assert len((tmp_path / "jobs" / "submitted").read_text().split()) == 2
    assert not list((tmp_path / "jobs").glob("*.pid")), "a job was not cancelled"


def test_jobs_on_gpus(tmp_path, slurm):
    """What would be submitted: dask-cuda's worker takes the place of Dask's."""
    (tmp_path / "gpus.py").write_text(
        f"import sys; sys.path.insert(0, {str(SLURM)!r})\n"
        "import cluster\n"
        "if __name__ == '__main__':\n"
        "    with cluster.gpu_cluster('lo') as made: print(made.job_script())\n"
    )
    script = output_of(sys.executable, tmp_path / "gpus.py", **slurm, cwd=tmp_path)
    assert "#SBATCH --gpus-per-node=8" in script
    (command,) = [line for line in script.splitlines() if "-m dask_cuda.cli tcp://" in line]
    assert "--nthreads 1 " in command
    assert "--set-rmm-allocator-for-libs cupy" in command
