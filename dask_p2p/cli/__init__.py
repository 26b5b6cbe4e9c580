"""The ``dask p2p`` commands. `dask` imports this module at each start, so commands load lazily."""

from __future__ import annotations

import importlib

import click

# Modules and help texts by command, listed here so that the overview imports no command.
_COMMANDS = {
    "check": ("cluster", "Show transports and speeds between workers, and any problems."),
    "demo": ("cluster", "Transpose a generated array, and check every value."),
    "rechunk": ("files", "Write the array of a file with other chunks."),
    "transpose": ("files", "Transpose the array of a file into another file."),
}


class _LazyGroup(click.Group):
    """A group whose commands are in modules that are imported at first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"dask_p2p.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__}.{cmd_name} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(package_name="dask-p2p", prog_name="dask p2p")
def p2p() -> None:
    """Peer-to-peer transposes, rechunks and halo exchanges of arrays."""
