"""Programs that measure, run with options."""

from __future__ import annotations

import json
import shlex

from click.testing import CliRunner


def results_of(program, folder, options):
    """Return the JSON that a program writes, and the text that it prints."""
    path = folder / "result.json"
    arguments = [*shlex.split(options), "--json", str(path)]
    done = CliRunner().invoke(program.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text()), done.output
