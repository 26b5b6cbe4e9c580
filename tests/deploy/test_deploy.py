"""The commands and units of deploy/local, deploy/ssh and deploy/slurm, run as they are."""

import configparser
import os
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.controller import controller, ended
from tests.deploy.support import BIN, DEPLOY, free_ports, output_of, running, transpose_on
from tests.support import import_path, run_command
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.programs

LOCAL = DEPLOY / "local"
UNITS = sorted(LOCAL.glob("*.service"))


def unit(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(LOCAL / f"{name}.service")
    return parser["Service"]


def command(name, variables):
    """What systemd makes of a unit's command."""
    words = unit(name)["ExecStart"].replace("/opt/dask-p2p/bin", str(BIN)).split()
    return [re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word) for word in words]


def settings(**changed):
    lines = (LOCAL / "p2p.env").read_text().splitlines()
    return dict(line.split("=") for line in lines if line and line[0] != "#") | changed


def test_the_script_runs():
    assert "every element is right: True" in output_of(sys.executable, LOCAL / "cpu.py")


def test_the_units_make_a_cluster_and_the_configuration_puts_the_plugin_on_it(tmp_path):
    port, dashboard = map(str, free_ports(2))
    variables = settings(
        SCHEDULER_PORT=port, DASHBOARD_PORT=dashboard, WORKERS="1", CACHE_DIRECTORY=str(tmp_path)
    )
    shutil.copy(DEPLOY / "p2p-cluster.yaml", tmp_path)
    commands = [command(name, variables) for name in ("dask-scheduler", "dask-worker")]
    with running(tmp_path, *commands, DASK_CONFIG=str(tmp_path)):
        transpose_on(f"tcp://127.0.0.1:{port}", 1)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong(path, tmp_path):
    def verify(text):
        (tmp_path / path.name).write_text(text.replace("/opt/dask-p2p/bin", str(BIN)))
        process = run_command("systemd-analyze", "verify", "--man=no", tmp_path / path.name)
        # Units of this machine itself may be wrong too.
        return [line for line in process.stderr.splitlines() if path.name in line]

    text = path.read_text()
    assert verify(text) == []
    assert verify(text.replace("LimitNOFILE", "LimitFiles").replace("RestartSec", "RestartS"))


def test_all_variables_are_set():
    variables = {*settings(), "CACHE_DIRECTORY"}  # the latter by systemd
    for path in UNITS:
        assert set(re.findall(r"\$\{(\w+)\}", path.read_text())) <= variables
        assert unit(path.stem)["EnvironmentFile"] == "/etc/dask/p2p.env"


SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def keys(folder):
    output_of("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id_ed25519")
    return (folder / "id_ed25519.pub").read_text()


@contextmanager
def server(folder, port):
    """An ssh server of this user's own, with a home folder that knows its key."""
    home, host = folder / "home", folder / "host"
    (home / ".ssh").mkdir(parents=True)
    host.mkdir()
    (folder / "authorized").write_text(keys(home / ".ssh"))
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {keys(host)}")
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\n"
        f"HostKey {host}/id_ed25519\n"
        f"AuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
    )
    if os.getuid() == 0:  # where it keeps what has no rights
        Path("/run/sshd").mkdir(exist_ok=True)
    with running(folder, [SSHD, "-D", "-e", "-f", str(folder / "config")]):
        wait_until(lambda: "listening" in (folder / "0.log").read_text())
        yield home


@pytest.mark.skipif(SSHD is None, reason="there is no sshd: apt-get install openssh-server")
def test_a_cluster_on_hosts_that_ssh_reaches(tmp_path):
    (port,) = free_ports(1)
    python = tmp_path / "python"  # ssh takes no environment along
    python.write_text(f'#!/bin/sh\nPYTHONPATH={import_path()} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = ["127.0.0.1"] * 3  # with a worker on each of the last two
    with server(tmp_path, port) as home:
        program = [sys.executable, DEPLOY / "ssh" / "cluster.py"]
        options = ["--port", port, "--python", python, "--each", "1"]
        output = output_of(*program, *options, *hosts, HOME=str(home), cwd=tmp_path)
    assert "every element is right: True" in output
    assert output.startswith("2 workers")


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
    options = "--nthreads 1 ", "--set-rmm-allocator-for-libs cupy", "--memory-limit 32.00GiB"
    assert all(option in command for option in options), command


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
