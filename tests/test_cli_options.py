"""The commands and options, frozen: a new flag, or one that is gone, is a decision and shows up here.

And the options of `plan` and `run` against the job spec: each key has one, each sets its key, and something reads it.
"""

import ast
import dataclasses
import functools
from pathlib import Path
from typing import get_args, get_type_hints

import click
import pytest

import extract
from extract.cli import COMMANDS, cli
from extract.cli.job_options import JOB_OPTIONS, TABLES, job_options
from extract.cli.recipe_options import RECIPE_OPTIONS, recipe_options
from extract.engine.recipe import Recipe
from extract.spec import JobSpec

JOB = """
    --add-generation-prompt --carry --chunk-overlap --column --compression --compression-level --data --dataset-config
    --dtype --engine --fingerprint --format --id-column --input --input-ids --kind --layers --limit --max-input-tokens
    --max-sequences --max-tokens --no-input-ids --no-share --normalize --on-bad-text --on-empty --on-long
    --on-non-finite --on-null --output --overlap --prefix --record-batch-bytes --reserve-bytes --revision --rows
    --rows-per-shard --sequential --share --special-tokens --split --split-special-tokens --streaming --threads
    --truncation-side -o
"""

OPTIONS = {
    "quantize": """
        --cache --calibration --column --json --max-input-tokens --output --quiet --revision --rows --to -o
    """,
    "build": """
        --allow-no-final-norm --allow-pickle --cache --card-memory --compile --decoder --device --dry-run --dtype --json
        --layout --max-input-tokens --max-sequences --max-tokens --micro-batch --output --pass-tokens --quiet --recipe
        --reference --revision --runtime --states --threads --tiers -o
    """,
    "tune": """
        --allow-int8 --device --json --max-input-tokens --output --plot --precisions --quiet --reference --runtime
        --seconds --threads -o
    """,
    "fidelity": """
        --allow-pickle --column --data --input --json --kl-budget --max-kl --output --quiet --rank-layers --reference
        --revision --rows --threads --write -o
    """,
    "inspect": "--json --row",
    "plan": f"{JOB} --json",
    "run": f"""
        {JOB} --address --boot-timeout --json --on --quiet --stall-timeout --worker-count --worker-index --workers
    """,
    "finalize": "--json",
    "status": "--json",
    "embed": """
        --carry --column --dataset-config --dtype --engine --format --id-column --json --limit --max-input-tokens
        --max-tokens --no-normalize --normalize --output --pool --precision --prompt --prompt-name --quiet
        --reserve-bytes --revision --special-tokens --split --threads --workers -o
    """,
    "verify": "--engine --json --recompute --reference --repair",
    "reprocess": """
        --cast --compression --compression-level --engine --json --outcome --output --pool --quiet --rows
        --rows-per-shard --shards -o
    """,
    "report": "--json --output --rows -o",
    "export": """
        --cast --context --engine --hook --json --layers --loss-mask --outcome --output --quiet --rows --rows-per-file
        --to --unfinished -o
    """,
    "families": "--json",
    "sample": "--json --output --rows -o",
    "patch": "--dry-run --json --kind --patch --tree",
    "doctor": "--json --seconds",
}

ARGUMENTS = {
    "quantize": ["CHECKPOINT"],
    "build": ["CHECKPOINT"],
    "tune": ["CHECKPOINT"],
    "fidelity": ["ENGINE"],
    "inspect": ["ENGINE|OUT"],
    "plan": ["[SPEC]"],
    "run": ["[SPEC]"],
    "finalize": ["OUT"],
    "status": ["OUT"],
    "embed": ["CHECKPOINT", "DATA"],
    "verify": ["OUT"],
    "reprocess": ["OUT"],
    "report": ["OUT"],
    "export": ["OUT"],
    "families": [],
    "sample": [],
    "patch": ["list|check|apply|revert"],
    "doctor": [],
}


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_the_commands_are_these_in_the_order_of_a_job():
    assert list(COMMANDS) == list(OPTIONS)
    assert cli.list_commands(click.Context(cli)) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_command_has_exactly_these_options(name):
    options = [option for option in command(name).params if isinstance(option, click.Option)]
    assert sorted(flag for option in options for flag in (*option.opts, *option.secondary_opts)) == sorted(
        OPTIONS[name].split()
    )


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_command_has_exactly_these_arguments(name):
    arguments = [argument for argument in command(name).params if isinstance(argument, click.Argument)]
    assert [argument.metavar for argument in arguments] == ARGUMENTS[name]


FIELDS = [(table, field.name) for table, cls in TABLES.items() for field in dataclasses.fields(cls)]

OTHER_VALUES = {
    "path": ("other.parquet",),
    "carry": ("url", "score"),
    "layers": (2, -1),
    "rows": "0-9",
    "compression_level": 3,
    "record_batch_bytes": 2**17,
    "chunk_overlap": 5,
}
"""Values that differ from the default, where any other would be refused."""

NEEDED_WITH = {"chunk_overlap": ["--on-long", "chunk"], "normalize": ["--kind", "last"]}
"""Other options without which a value is refused."""


def parsed(arguments: list[str]) -> JobSpec:
    """The job spec that a command with the job options would receive."""
    received = []

    @click.command()
    @job_options
    def command(spec: JobSpec) -> None:
        received.append(spec)

    command.main(arguments, standalone_mode=False)
    return received[0]


def another_value(table: str, key: str) -> object:
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    cls = TABLES[table]
    hint, default = get_type_hints(cls)[key], cls.__dataclass_fields__[key].default
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if isinstance(default, bool):
        return not default
    if all(isinstance(kind, str) for kind in kinds):
        return next(kind for kind in kinds if kind != default)
    return 7 if kinds == [int] else "other"


def test_every_key_of_the_four_tables_has_one_option():
    assert [(option.table, option.key) for option in JOB_OPTIONS] == FIELDS
    assert len({option.flag for option in JOB_OPTIONS}) == len(JOB_OPTIONS)


def test_options_that_are_not_given_leave_the_defaults_of_the_spec():
    assert parsed(["--data", "rows.parquet"]) == JobSpec(source=TABLES["source"](path=("rows.parquet",)))


@pytest.mark.parametrize("option", JOB_OPTIONS, ids=lambda option: option.flag)
def test_an_option_sets_its_key_and_no_other(option):
    value = another_value(option.table, option.key)
    flag = option.flag.split("/")[-1] if value is False else option.flag.split("/")[0]
    given = [flag] if isinstance(value, bool) else [part for one in _each(value) for part in (flag, str(one))]
    data = [] if option.key == "path" else ["--data", "rows.parquet"]
    needed = NEEDED_WITH.get(option.key, [])
    spec = parsed([*data, *needed, *given])
    assert getattr(getattr(spec, option.table), option.key) == value
    without = parsed([*(data or ["--data", "rows.parquet"]), *needed])
    part = dataclasses.replace(getattr(without, option.table), **{option.key: value})
    assert spec == dataclasses.replace(without, **{option.table: part})


def _each(value: object) -> tuple[object, ...]:
    """As many times as the option is given."""
    if value == OTHER_VALUES["layers"]:
        return ("2,-1",)
    return value if isinstance(value, tuple) else (value,)


@functools.cache
def attributes_read() -> frozenset[str]:
    """Every `.name` in the package, except where the spec and its options are defined."""
    files = [
        path for path in Path(extract.__file__).parent.rglob("*.py") if path.name not in ("spec.py", "job_options.py")
    ]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


@pytest.mark.parametrize(("table", "key"), FIELDS, ids=lambda part: part)
def test_something_other_than_the_spec_reads_each_key(table, key):
    assert attributes_read() & {key, f"{key}s"}  # `path` is read as `paths`


def test_engine_and_output_go_over_those_of_the_job_spec(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('engine = "a"\noutput = "b"\n[source]\npath = "rows.parquet"\n')
    spec = parsed([str(file), "--engine", "c", "-o", "d"])
    assert (spec.engine, spec.output) == ("c", "d")
    assert (parsed([str(file)]).engine, parsed([str(file)]).output) == ("a", "b")


def test_an_option_goes_over_the_same_key_of_the_job_spec_and_leaves_the_others(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[source]\npath = "rows.parquet"\ncolumn = "body"\nlimit = 9\n')
    source = parsed([str(file), "--limit", "3"]).source
    assert (source.path, source.column, source.limit) == ("rows.parquet", "body", 3)


def test_a_shipped_job_is_found_by_its_name():
    assert parsed(["demo"]).output == "demo/out"


RECIPE_FILE_ONLY = {"high_precision", "mlp", "keep_head", "architectures", "description"}
"""Keys that are too long to type, or that nobody changes from build to build."""

RECIPE_VALUES = {
    "runtime": "tensorrt-llm",
    "device": "cpu",
    "dtype": "float16",
    "max_input_tokens": 64,
    "max_sequences": 7,
    "max_tokens": 4096,
    "pass_tokens": 512,
    "decoder": "own",
    "compile": "jit",
    "micro_batch": 64,
    "threads": 3,
    "layout": "packed",
    "states": "last",
    "cache": "paged",
    "card_memory_gib": 24.0,
}
"""A value other than the default for each key that has an option."""


def recipe_of(arguments: list[str]) -> Recipe:
    """The recipe that `build` would receive."""
    received = []

    @click.command()
    @recipe_options
    def command(recipe: Recipe) -> None:
        received.append(recipe)

    command.main(arguments, standalone_mode=False)
    return received[0]


def test_every_key_of_a_recipe_has_one_option_or_none_on_purpose():
    keys = [option.key for option in RECIPE_OPTIONS]
    assert sorted(keys) == sorted({field.name for field in dataclasses.fields(Recipe)} - RECIPE_FILE_ONLY)
    assert len({option.flag for option in RECIPE_OPTIONS}) == len(keys)


@pytest.mark.parametrize("option", RECIPE_OPTIONS, ids=lambda option: option.flag)
def test_an_option_of_build_sets_its_key_of_the_recipe_and_no_other(option):
    value = RECIPE_VALUES[option.key]
    needed = {"runtime": "tensorrt-llm"} if option.flag in ("--states", "--cache", "--card-memory") else {}
    given = [part for key, one in needed.items() for part in (f"--{key}", one)]
    assert recipe_of([*given, option.flag, str(value)]) == dataclasses.replace(Recipe(**needed), **{option.key: value})


def test_an_option_of_build_goes_over_the_same_key_of_the_recipe(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('dtype = "float32"\nthreads = 2\n')
    recipe = recipe_of(["--recipe", str(file), "--threads", "1"])
    assert recipe == Recipe(dtype="float32", threads=1)
