"""The command line: parse, call one library function, render. Commands are imported when they are called for.

Whatever a user or the data did wrong ends as one message on stderr that starts with `extract:`, and an exit code. An
exception that is neither ours nor click's is a bug: Python prints its traceback and exits with 1.
"""

import difflib
import importlib
import io
import sys
from typing import NoReturn

import click

from extract.errors import ExtractError

COMMANDS = {
    "quantize": "extract.cli.quantize",
    "build": "extract.cli.engines",
    "tune": "extract.cli.tune",
    "fidelity": "extract.cli.fidelity",
    "inspect": "extract.cli.show",
    "plan": "extract.cli.jobs",
    "run": "extract.cli.jobs",
    "finalize": "extract.cli.jobs",
    "status": "extract.cli.jobs",
    "embed": "extract.cli.embed",
    "verify": "extract.cli.check",
    "reprocess": "extract.cli.check",
    "report": "extract.cli.report",
    "export": "extract.cli.export",
    "families": "extract.cli.engines",
    "sample": "extract.cli.show",
    "patch": "extract.cli.patch",
    "doctor": "extract.cli.doctor",
}
"""In the order of a job."""

USAGE, OUT_OF_MEMORY, INTERRUPTED = 2, 8, 130

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but a mistyped name brings up the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"{error.format_message()}{hint}", ctx) from None


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="extract-hidden-states", prog_name="extract")
def cli() -> None:
    """Turn a decoder language model and a dataset into hidden states.

    Offline and in bulk: build an engine from a checkpoint once, then run jobs with it. Results go to stdout, progress
    and messages to stderr.

    \b
    Example:
        extract build HuggingFaceTB/SmolLM2-135M -o engine
        extract run --engine engine --data texts.parquet -o out
        extract verify out
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: runs a command and exits with its code."""
    _let_any_text_be_printed()
    try:
        sys.exit(cli.main(arguments, prog_name="extract", standalone_mode=False))
    except ExtractError as error:
        _exit(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(USAGE)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "extract"
        _exit(f"{error.format_message()} See {command} --help", USAGE)
    except click.ClickException as error:
        _exit(error.format_message(), USAGE)
    except (click.Abort, KeyboardInterrupt):
        _exit("interrupted. Nothing that was finished is lost; run the same command again to go on.", INTERRUPTED)
    except MemoryError:
        _exit("out of memory. Use a smaller --max-tokens, or a machine with more memory.", OUT_OF_MEMORY)


def _exit(message: str, code: int) -> NoReturn:
    click.echo(f"extract: {message}", err=True)
    sys.exit(code)


def _let_any_text_be_printed() -> None:
    """A terminal that lacks a character gets its escape: printing a text must not break a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
