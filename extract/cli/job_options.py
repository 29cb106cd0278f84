"""The options of a job, and how they become its spec: a TOML file first, options over it."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, get_type_hints

import click

from extract import assets
from extract.cli.options import NumbersType, value_type
from extract.settings import parse, read_toml
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec

F = TypeVar("F", bound=Callable[..., Any])

TABLES: dict[str, type[Any]] = {"source": SourceSpec, "text": TextSpec, "states": StatesSpec, "run": RunSpec}


@dataclass(frozen=True, slots=True)
class JobOption:
    """One option of `plan` and `run`, and the key of the job spec that it sets."""

    table: str
    key: str
    flag: str
    help: str
    metavar: str | None = None


JOB_OPTIONS = (
    JobOption("source", "path", "--data", "File, glob, directory or dataset; may be given several times.", "PATH"),
    JobOption("source", "format", "--format", "How the data is stored; auto looks at names and contents."),
    JobOption("source", "column", "--column", "Input column; dots reach into structs.", "NAME"),
    JobOption("source", "input", "--input", "What the input column holds."),
    JobOption("source", "id_column", "--id-column", "Column copied to the output as `id`.", "NAME"),
    JobOption("source", "carry", "--carry", "Column copied as it is; may be given several times.", "NAME"),
    JobOption("source", "limit", "--limit", "Only the first rows of the source.", "ROWS"),
    JobOption("source", "rows", "--rows", "Only these positions of the source, such as 0-99,250.", "RANGES"),
    JobOption("source", "name", "--dataset-config", "Configuration of a Hugging Face dataset.", "NAME"),
    JobOption("source", "split", "--split", "Split of a Hugging Face dataset.", "NAME"),
    JobOption("source", "revision", "--revision", "Branch, tag or commit of a Hugging Face dataset.", "REV"),
    JobOption("source", "streaming", "--streaming", "Stream a Hugging Face dataset instead of downloading it first."),
    JobOption(
        "text", "max_input_tokens", "--max-input-tokens", "Most tokens of a row; at most the engine's limit.", "TOKENS"
    ),
    JobOption("text", "on_long", "--on-long", "What to do with longer rows."),
    JobOption("text", "truncation_side", "--truncation-side", "Side that is cut off; auto is the tokenizer's own."),
    JobOption("text", "chunk_overlap", "--chunk-overlap", "Tokens a chunk repeats, with --on-long chunk.", "TOKENS"),
    JobOption("text", "special_tokens", "--special-tokens", "Which special tokens are added."),
    JobOption(
        "text", "split_special_tokens", "--split-special-tokens", "Special tokens written in the text are plain text."
    ),
    JobOption("text", "prefix", "--prefix", "Text put before each row's text.", "TEXT"),
    JobOption("text", "on_null", "--on-null", "Rows without a text."),
    JobOption("text", "on_empty", "--on-empty", "Rows with an empty text."),
    JobOption("text", "on_bad_text", "--on-bad-text", "Rows that are no valid text."),
    JobOption("text", "on_non_finite", "--on-non-finite", "Rows whose states are NaN, infinite or too large to store."),
    JobOption("text", "add_generation_prompt", "--add-generation-prompt", "End chats with the assistant's opening."),
    JobOption("states", "kind", "--kind", "States of every token, or one a row."),
    JobOption("states", "dtype", "--dtype", "Stored type; int8 is half the size, rotated, with a scale a state."),
    JobOption("states", "compression", "--compression", "Of the shard files."),
    JobOption("states", "compression_level", "--compression-level", "Of zstd.", "1-19"),
    JobOption("states", "normalize", "--normalize", "Scale pooled states to unit length."),
    JobOption(
        "states", "layers", "--layers", "Also store the states after these decoder layers, such as 2,15,-1.", "NUMBERS"
    ),
    JobOption("states", "input_ids", "--input-ids/--no-input-ids", "Store the token ids beside the states."),
    JobOption("states", "rows_per_shard", "--rows-per-shard", "Source rows of a shard file.", "ROWS"),
    JobOption("states", "record_batch_bytes", "--record-batch-bytes", "Size of a record batch.", "BYTES"),
    JobOption("states", "reserve_bytes", "--reserve-bytes", "Disk space that a run leaves free.", "BYTES"),
    JobOption("run", "max_sequences", "--max-sequences", "Most sequences of one forward pass.", "SEQUENCES"),
    JobOption("run", "max_tokens", "--max-tokens", "Token budget of one forward pass.", "TOKENS"),
    JobOption("run", "threads", "--threads", "CPU threads of the forward pass.", "THREADS"),
    JobOption("run", "share", "--share/--no-share", "Compute common prefixes and duplicates of a pass once."),
    JobOption("run", "overlap", "--overlap/--sequential", "Tokenise and write beside the forward pass."),
    JobOption("run", "fingerprint", "--fingerprint", "Which of several engines may make a shard: one for all, or any."),
)

NONE_MEANS = {
    "carry": "none",
    "id_column": "none",
    "layers": "none",
    "limit": "all",
    "max_input_tokens": "the engine's limit",
    "max_sequences": "the engine's limit",
    "max_tokens": "the engine's limit",
    "name": "the dataset's only one",
    "prefix": "none",
    "revision": "main",
    "rows": "all",
    "rows_per_shard": "chosen by size",
    "threads": "the engine's number, else all that this process may use",
}
"""What an option that is not given stands for, where the spec's default does not say it."""


def job_options(command: F) -> F:
    """Add the job spec argument and every job option; the command receives one `spec: JobSpec`."""

    @functools.wraps(command)
    def with_spec(**given: Any) -> Any:
        tables = {option: given.pop(f"job_{option.table}_{option.key}") for option in JOB_OPTIONS}
        path, engines, output = given.pop("spec"), given.pop("engine"), given.pop("output")
        return command(spec=_spec(path, engines, output, tables), **given)

    wrapped: Any = with_spec
    for option in reversed(JOB_OPTIONS):
        wrapped = _click_option(option)(wrapped)
    wrapped = click.option("-o", "--output", metavar="DIR", help="Output directory.  [default: the job spec's]")(
        wrapped
    )
    wrapped = click.option(
        "--engine",
        metavar="DIR",
        multiple=True,
        help="Engine directory; several are tried in turn by each worker.  [default: the job spec's]",
    )(wrapped)
    decorated: F = click.argument("spec", required=False, metavar="[SPEC]")(wrapped)
    return decorated


def chosen_job_options(*keys: str) -> Callable[[F], F]:
    """Add some of the job options; the command receives `tables`, what was given by table and key."""
    chosen = [option for option in JOB_OPTIONS if option.key in keys]

    def with_options(command: F) -> F:
        @functools.wraps(command)
        def with_tables(**given: Any) -> Any:
            tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
            for option in chosen:
                value = given.pop(f"job_{option.table}_{option.key}")
                if value not in (None, ()):
                    tables[option.table][option.key] = value
            return command(tables=tables, **given)

        wrapped: Any = with_tables
        for option in reversed(chosen):
            wrapped = _click_option(option)(wrapped)
        decorated: F = wrapped
        return decorated

    return with_options


def _spec(path: str | None, engines: tuple[str, ...], output: str | None, options: dict[JobOption, Any]) -> JobSpec:
    table: dict[str, Any] = {}
    where = "options"
    if path is not None:
        file = assets.find("jobs", path)
        table, where = read_toml(file), str(file)
    given = {option: value for option, value in options.items() if value not in (None, ())}
    if path is not None and given:
        where += ", options over it"
    for option, value in given.items():
        inner = table.setdefault(option.table, {})
        if isinstance(inner, dict):
            inner[option.key] = value
    if engines:
        table |= {"engine": engines[0], "other_engines": engines[1:]}
    if output is not None:
        table["output"] = output
    if path is None and "path" not in table.get("source", {}):
        raise click.UsageError("No data given. Name a job spec, or give --data PATH.")
    return parse(JobSpec, table, where)


def _click_option(option: JobOption) -> Callable[[Any], Any]:
    cls = TABLES[option.table]
    hint = get_type_hints(cls)[option.key]
    field = next(field for field in dataclasses.fields(cls) if field.name == option.key)
    default = None if field.default is MISSING else field.default
    shown = _shown_default(option, default)
    help_text = f"{option.help}  [default: {shown}]" if shown else option.help
    attributes: dict[str, Any] = {"default": None, "help": help_text, "metavar": option.metavar}
    if option.key in ("path", "carry"):
        attributes["multiple"] = True
    elif option.key == "layers":
        attributes["type"] = NumbersType("2,15,-1")
    elif hint is bool:
        attributes.pop("metavar")
        if "/" not in option.flag:
            attributes["is_flag"] = True
            attributes["flag_value"] = True
    else:
        attributes["type"] = value_type(cls, option.key)
    return click.option(option.flag, f"job_{option.table}_{option.key}", **attributes)


def _shown_default(option: JobOption, default: object) -> str:
    if option.key in NONE_MEANS:
        return NONE_MEANS[option.key]
    if default is True or default is False:
        return option.flag.split("/")[0 if default else 1].removeprefix("--") if "/" in option.flag else ""
    if default in (None, (), ""):
        return ""
    return f"{default:,}" if isinstance(default, int) else str(default)
