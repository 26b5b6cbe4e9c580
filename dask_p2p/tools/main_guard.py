"""Finds main programs that workers cannot import, before a cluster starts.

Each worker process imports the main program. A script that starts a cluster whenever it is imported
would do so in each worker, too. Python refuses that, and some releases of Dask then start workers
again and again.
"""

from __future__ import annotations

import ast
import os
import sys
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from dask_p2p.errors import StartError

_PROBE = "dask_p2p: import of the main program"  # name of a process
_STARTS_A_CLUSTER = 77  # its exit status
_REMEDY = 'Move that code below `if __name__ == "__main__":`.'


def check_main_program() -> None:
    """Raise `StartError` if workers could not import the main program.

    If the main program does not check `__name__` before the call, a process that imports it finds
    out. Another check, which the process passes, is fine.
    """
    process = current_process()
    main = sys.modules["__main__"]
    if getattr(process, "_inheriting", False):  # multiprocessing imports the main program now
        if process.name == _PROBE:
            raise SystemExit(_STARTS_A_CLUSTER)
        raise StartError(_text(sys.modules.get("__mp_main__", main).__file__))
    path = _imported_file(main)
    if path is None:
        return
    if not os.path.exists(path):
        raise StartError(
            f"expected a main program in a file, since workers import it, got {path}. Save it in a "
            "file, and run that."
        )
    if not _checks_name(main, path):
        _probe(path)


def _text(path: Any) -> str:
    return f"{path} starts a cluster when it is imported, and each worker imports it. {_REMEDY}"


def _probe(path: str) -> None:
    """Import the main program in a process, as workers do; raise `StartError` if that fails."""
    from distributed.utils import get_mp_context

    process = get_mp_context().Process(target=int, name=_PROBE)
    process.start()
    process.join()
    if process.exitcode == _STARTS_A_CLUSTER:
        raise StartError(_text(path))
    if process.exitcode:
        raise StartError(
            f"expected a program that workers can import, but the import of {path} failed with the "
            f"error above. Move code that workers cannot run below `if __name__ == "
            '"__main__":`.'
        )


def _imported_file(main: Any) -> str | None:
    """Return the file of the main program if new processes import it, else None."""
    from distributed.utils import get_mp_context

    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    is_command = name == "__main__" or name.endswith(".__main__")  # python -m PACKAGE
    if is_command or get_mp_context().get_start_method() == "fork":
        return None
    return getattr(main, "__file__", None)  # notebooks have none


def _checks_name(main: Any, path: str) -> bool:
    """Return whether the running statement of the main program is an `if` with `__name__`.

    Returns true as well if the statement is unknown, since another thread runs the main program.
    """
    frame: Any = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    if frame is None:
        return True
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    running = [
        each for each in statements if each.lineno <= frame.f_lineno <= (each.end_lineno or 0)
    ]
    return not running or any(
        isinstance(part, ast.Name) and part.id == "__name__"
        for each in running
        if isinstance(each, ast.If)
        for part in ast.walk(each.test)
    )
