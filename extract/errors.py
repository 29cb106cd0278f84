"""Every exception that `extract` raises on purpose: its message template and its exit code.

A message says what was wrong (found and expected), where (file, row, shard) and what to do. Long values are cut by the
caller before they get here. `assert` stays for what only a bug can break; anything else that stops a command is one of
these, so the command line prints it without a traceback.
"""

from typing import Any, ClassVar


class ExtractError(Exception):
    """Base of all; the keyword arguments fill the class's template and stay readable as `facts`."""

    exit_code: ClassVar[int] = 1
    template: ClassVar[str] = "{message}"

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        message = self.template.format(**facts)
        super().__init__(message.encode("utf-8", "backslashreplace").decode())  # a lone surrogate prints nowhere else

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors of worker processes are raised again where the job is run from: same class, same words."""
        return _as_it_was, (type(self), {name: str(fact) for name, fact in self.facts.items()}, str(self))


def _as_it_was(cls: type[ExtractError], facts: dict[str, object], message: str) -> ExtractError:
    error = cls.__new__(cls, message)  # which also sets `args`
    error.facts = facts
    return error


# --- 2: usage, job spec, recipe -------------------------------------------------------------------------------------


class SpecError(ExtractError):
    """A job spec, a recipe or an option asks for something impossible."""

    exit_code = 2


class UnknownKey(SpecError):
    """A TOML file holds a key that nothing reads."""

    template = '{where}: unknown key "{key}".{hint}'


class BadValue(SpecError):
    """A key holds a value of the wrong type or outside its range."""

    template = "{where}: {key} is {found}, expected {expected}."


class UnreadableSpec(SpecError):
    """A TOML file is missing or does not parse."""

    template = "{path}: {problem}"


# --- 3: source ------------------------------------------------------------------------------------------------------


class SourceError(ExtractError):
    """The rows cannot be read, or not as asked."""

    exit_code = 3


# --- 4: checkpoint and engine ---------------------------------------------------------------------------------------


class CheckpointRefused(ExtractError):
    """A checkpoint cannot be turned into an engine without guessing."""

    exit_code = 4


class EngineRefused(ExtractError):
    """An engine directory does not hold what its contract says, or does not fit this machine."""

    exit_code = 4


# --- 5: resume ------------------------------------------------------------------------------------------------------


class ResumeRefused(ExtractError):
    """The output directory belongs to another job than the one asked for."""

    exit_code = 5


# --- 6, 7, 8, 130: outcome of a run ---------------------------------------------------------------------------------


class ShardsFailed(ExtractError):
    """The run ended, but some shards could not be made."""

    exit_code = 6


class VerificationFailed(ExtractError):
    """Files on disk are not what the commit records say."""

    exit_code = 7


class OutOfSpace(ExtractError):
    """The disk is too small for the job, or full."""

    exit_code = 8


class Interrupted(ExtractError):
    """SIGINT or SIGTERM: what is committed stays, the same command goes on."""

    exit_code = 130
