"""``dask p2p``: the commands. `dask` loads this at each start, so each command loads by itself."""

from __future__ import annotations

import importlib

import click

# Said here, so that the list of commands needs none of their modules.
_COMMANDS = {
    "check": "Show how workers reach each other, how fast, and what is in the way.",
    "demo": "Transpose a made array, and check every value.",
    "rechunk": "Write a file's array in other chunks.",
    "trace": "Write the last runs of a cluster as a trace, for Perfetto.",
    "transpose": "Transpose a file into another.",
}


class _LazyGroup(click.Group):
    """A group whose commands are each in a module of their own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"dask_p2p.cli.{cmd_name}")
        command = getattr(module, cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__}.{cmd_name} is no click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*_COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(package_name="dask-p2p", prog_name="dask p2p")
def p2p() -> None:
    """Peer-to-peer transposes, rechunks and halo exchanges of arrays."""
