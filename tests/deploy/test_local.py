"""deploy/local: the script and the units run as they are."""

from __future__ import annotations

import configparser
import re
import shutil
import sys

import pytest

from tests.deploy.support import BIN, DEPLOY, free_ports, output_of, running, transpose_on
from tests.support import run_command

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
