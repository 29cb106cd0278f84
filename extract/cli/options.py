"""Options that several commands share, and the types of their values.

A decorator adds an option and hands the command what it stands for: not `--quiet`, but the function that says a step.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

import click

from extract.progress import Progress
from extract.storage import Place, locate

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """`--json`: results as one JSON document on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")(command)


def steps_option(command: F) -> F:
    """`--quiet`; the command receives `say`, which puts a line on stderr unless it is given."""

    @functools.wraps(command)
    def with_say(*, quiet: bool, **given: Any) -> Any:
        return command(say=_say_nothing if quiet else say_on_stderr, **given)

    wrapped: Any = with_say
    decorated: F = click.option("--quiet", is_flag=True, help="No steps on stderr.")(wrapped)
    return decorated


def progress_option(command: F) -> F:
    """`--quiet`; the command receives `progress`, which shows nothing where it is given."""

    @functools.wraps(command)
    def with_progress(*, quiet: bool, **given: Any) -> Any:
        return command(progress=Progress(quiet=quiet), **given)

    wrapped: Any = with_progress
    decorated: F = click.option("--quiet", is_flag=True, help="No progress on stderr.")(wrapped)
    return decorated


def revision_option(command: F) -> F:
    """`--revision` of a checkpoint on the hub."""
    return click.option(
        "--revision", metavar="REV", help="Branch, tag or commit of a hub checkpoint.  [default: main]"
    )(command)


def allow_pickle_option(command: F) -> F:
    """`--allow-pickle` of a checkpoint."""
    return click.option(
        "--allow-pickle", is_flag=True, help="Read weights from pickled .bin files, through the safe loader."
    )(command)


def row_options(command: F) -> F:
    """`--rows` and `--outcome`: which rows of an output; the command receives `rows` and `outcomes`."""
    from extract.records import Outcome  # needs numpy, and `doctor` must start where that is broken

    outcome = click.option(
        "--outcome",
        "outcomes",
        multiple=True,
        type=click.Choice([str(outcome) for outcome in Outcome]),
        help="Only rows that ended so; may be given several times.  [default: all]",
    )
    rows = click.option("--rows", metavar="RANGES", help="Only these source rows, such as 0-99,250.  [default: all]")
    return rows(outcome(command))


def say_on_stderr(message: str) -> None:
    """One line for a person; stdout is for results."""
    click.echo(message, err=True)


def _say_nothing(message: str) -> None:
    """What is said of steps with `--quiet`."""


class PlaceType(click.ParamType[Place]):
    """A path, or an address in an object store."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        """See `locate`."""
        return locate(value)


PLACE = PlaceType()


class NumbersType(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def __init__(self, example: str) -> None:
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(number) for number in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as {self.example}.", param, ctx)


class NamesType(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """See `click.ParamType.convert`."""
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(",") if part.strip())


def choices_of(settings: type[Any], key: str) -> list[str]:
    """The values that a `Literal` field takes."""
    return list(get_args(get_type_hints(settings)[key]))


def value_type(settings: type[Any], key: str) -> Any:
    """What click makes of the value of a field: one of its choices, a number, or text."""
    hint = get_type_hints(settings)[key]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if all(isinstance(kind, str) for kind in kinds):
        return click.Choice(kinds)
    return next((kind for kind in (int, float) if kind in kinds), str)
