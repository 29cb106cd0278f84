"""The command line: parse, call one library function, render. Commands are imported when they are called for."""

import importlib
import sys
from typing import Any

import click

from extract.errors import ExtractError

COMMANDS = {
    "build": "extract.cli.engines",
    "inspect": "extract.cli.show",
    "plan": "extract.cli.jobs",
    "run": "extract.cli.jobs",
    "status": "extract.cli.jobs",
    "verify": "extract.cli.check",
    "reprocess": "extract.cli.check",
    "families": "extract.cli.engines",
    "sample": "extract.cli.show",
}
"""In the order of a job."""

EPILOG = """\b
Exit codes: 0 complete; 1 internal error; 2 usage, job spec or recipe;
3 source; 4 checkpoint or engine refused; 5 resume refused; 6 shards
failed; 7 verification failed; 8 out of space or memory; 130 interrupted
(run the same command again to go on).
"""


class Commands(click.Group):
    """A group that imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a job."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or `None`."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), f"{cmd_name}_command")
        return command


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="extract-hidden-states", prog_name="extract")
def cli() -> None:
    """Turn a decoder language model and a dataset into hidden states, offline and in bulk.

    \b
    Build an engine from a checkpoint once, then run jobs with it:
        extract build HuggingFaceTB/SmolLM2-135M -o engine
        extract run --engine engine --data texts.parquet -o out
        extract verify out
    """


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: a user's or the data's fault is one message on stderr and an exit code, never a traceback."""
    try:
        return cli(arguments, standalone_mode=True)
    except ExtractError as error:
        click.echo(f"extract: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
