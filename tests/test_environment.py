from __future__ import annotations

import json
import os
import subprocess

import dask

from dask_p2p import environment as module
from dask_p2p.environment import commit, cpu_name, environment, versions


def test_it_is_json_and_says_what_figures_depend_on():
    found = json.loads(json.dumps(environment()))
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cpu_count"] >= 1
    assert set(found) == {"versions", "commit", "hardware"}


def test_versions():
    found = versions()
    assert {"python", "dask", "distributed", "numpy", "cupy", "dask-cuda", "ucxx"} < set(found)
    assert found["dask-p2p"]
    assert found["dask"] == dask.__version__


def test_commit_is_that_of_the_checkout(monkeypatch, tmp_path):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    file = tmp_path / "environment.py"
    file.write_text("")
    monkeypatch.setattr(module, "__file__", str(file))
    assert commit() is None, "not tracked"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    first = commit()
    assert len(first) == 40
    file.write_text("changed")
    assert commit() == f"{first}-dirty"


def test_no_commit_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
    assert commit() is None
    monkeypatch.setenv("PATH", os.devnull)
    assert commit() is None


def test_cpu_name_says_something():
    assert cpu_name()
