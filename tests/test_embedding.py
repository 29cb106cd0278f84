"""`extract embed`: a directory's own embeddings, row for row, every setting said, nothing left out in silence."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig
from command_line import extract as command
from command_line import write_rows
from job_rig import stored, texts

from extract.embedding import NoSuchPrompt, OtherCheckpoint, embed
from extract.engine.embedding_settings import EmbeddingSettings, NotApplied, read_embedding_settings
from extract.engine.recipe import Recipe
from extract.engine.sentence_transformers import BadModules
from extract.output import open_output
from extract.spec import StatesSpec, TextSpec
from extract.verification import verify

QUERY = "Instruct: find the passage\nQuery: "
ROWS = ["", "a", *texts(10, characters=60), *(text for text in rig.passages() if len(text) > 300)][:16]
"""One row is empty and has no embedding here; the last ones are longer than any limit below."""

PEER = Path(__file__).parent.parent / "build/bench/venvs/sentence_transformers/bin/python"
ENCODE = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer
directory, rows, options, to, again = sys.argv[1:]
model = SentenceTransformer(directory, device="cpu")
np.save(to, model.encode(json.load(open(rows)), **json.loads(options)))
if again:
    model.save(again)
"""


def pipeline(
    directory: Path,
    *,
    pooling: dict[str, Any] | None = None,
    normalize: bool = True,
    others: tuple[str, ...] = (),
    transformer: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Make a checkpoint directory one of sentence-transformers, in the layout that most on the hub have."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *others]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{name}" if number else "",
            "type": name if "." in name else f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]
    config = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "include_prompt": True}
    for name, table in {
        "modules.json": modules,
        "1_Pooling/config.json": config | (pooling or {"pooling_mode_lasttoken": True}),
        "sentence_bert_config.json": transformer or {"max_seq_length": 40, "do_lower_case": False},
        "config_sentence_transformers.json": settings or {"prompts": {"query": QUERY, "document": ""}},
    }.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(table))
    return directory


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """A tiny Qwen 3 whose tokenizer puts EOS after a text, as those of last-token embedders do."""
    directory = tmp_path_factory.mktemp("decoder")
    return rig.tiny_checkpoint(directory, "qwen3", tokenizer=rig.tiny_tokenizer(bos=False, eos=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    """One cache for all tests here, so that each engine is built once."""
    monkeypatch.setenv("EXTRACT_CACHE", str(cache))


@pytest.fixture
def model(decoder, tmp_path) -> Path:
    """A copy of the decoder whose small files may be changed; always of one name, and so of one engine."""
    return shutil.copytree(decoder, tmp_path / "model")


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.parquet", ROWS)


def made(model: Path, rows: Path, output: Path, **options: Any) -> Any:
    states = StatesSpec(kind="last", dtype="float32", reserve_bytes=0)
    return embed(model, str(rows), output, states=states, recipe=Recipe(dtype="float32", device="cpu"), **options)


def expected(model: Path, pool: str, *, prompt: str = "", limit: int = 40, unit: bool = True) -> np.ndarray:
    """Transformers' own model, one row at a time, and the pooling written out. The empty row is left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(prompt + row, truncation=True, max_length=limit)["input_ids"] for row in ROWS if row]
    assert all(one[-1] == tokenizer.eos_token_id for one in ids)
    assert max(map(len, ids)) == limit
    states = rig.reference_states(model, ids)
    pooled = np.stack([{"last": one[-1], "first": one[0], "mean": one.mean(axis=0)}[pool] for one in states])
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True) if unit else pooled


def embeddings(output: Path) -> np.ndarray:
    empty, *others = stored(output)
    assert empty is None
    return np.stack(others)


def least_cosine(found: np.ndarray, other: np.ndarray) -> float:
    products = (found * other).sum(axis=1)
    return float((products / np.linalg.norm(found, axis=1) / np.linalg.norm(other, axis=1)).min())


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "pool", "unit", "options", "prompt"),
    [
        ({"pooling_mode_lasttoken": True}, "last", True, {}, ""),
        ({"pooling_mode": "mean"}, "mean", False, {"prompt_name": "query"}, QUERY),
        ({"pooling_mode": ["cls"]}, "first", True, {}, ""),
        ({"pooling_mode": "mean"}, "last", False, {"pool": "last", "normalize": False, "prompt": "x: "}, "x: "),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "last", True, {"prompt_name": "query"}, QUERY),
    ],
)
def test_embeddings_are_those_of_the_plain_model_pooled_as_the_directory_says(
    model, rows, tmp_path, pooling, pool, unit, options, prompt
):
    pipeline(model, pooling=pooling, normalize=unit)
    result = made(model, rows, tmp_path / "out", **options)
    assert result.summary.complete
    reference = expected(model, pool, prompt=prompt, unit=unit)
    assert rig.relative_error(embeddings(tmp_path / "out"), reference) < 1e-5
    assert open_output(tmp_path / "out").row(len(ROWS) - 1).outcome == "truncated"


def peer(directory: Path, rows: list[str], to: Path, again: Path | None = None, **options: Any) -> np.ndarray:
    """What sentence-transformers gives, in the environment that the benchmarks keep for it."""
    if not PEER.is_file():
        pytest.skip("sentence-transformers is not here: its environment is made by the benchmarks (make bench)")
    (to.parent / "rows.json").write_text(json.dumps(rows))
    arguments = [directory, to.parent / "rows.json", json.dumps(options), to, again or ""]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [PEER, "-c", ENCODE, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return np.load(to)


@pytest.mark.slow  # a process that imports torch and sentence-transformers for each
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings_are_those_of_sentence_transformers_and_of_what_it_saves(model, rows, tmp_path, mode):
    prompts = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": "query"}
    pipeline(model, pooling={f"pooling_mode_{mode}{'_tokens' * (mode == 'mean')}": True}, settings=prompts)
    saved = tmp_path / "saved"
    reference = peer(model, ROWS, tmp_path / "peer.npy", saved)
    assert least_cosine(reference[1:], expected(model, {"lasttoken": "last"}.get(mode, mode), prompt=QUERY)) > 0.9999
    for directory in (model, saved):
        output = tmp_path / f"of-{directory.name}"
        settings = {one.name: one.value for one in made(directory, rows, output).settings}
        assert settings["prompt"] == QUERY
        found = embeddings(output)
        assert least_cosine(found, reference[1:]) > 0.9999
        assert np.abs(found - reference[1:]).max() < 1e-5
    without = peer(model, ROWS, tmp_path / "peer.npy", prompt="")
    made(model, rows, tmp_path / "without", prompt="")
    assert least_cosine(embeddings(tmp_path / "without"), without[1:]) > 0.9999


# --- what is taken from where ---------------------------------------------------------------------------------------


def test_the_settings_of_a_directory_are_read_with_the_file_that_each_came_from(model):
    settings = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": "query"}
    found = read_embedding_settings(pipeline(model, settings=settings), model)
    assert found == EmbeddingSettings(
        pool="last",
        normalize=True,
        prompts={"query": QUERY, "document": ""},
        default_prompt_name="query",
        max_input_tokens=40,
        origins={
            "normalize": "modules.json",
            "pool": "1_Pooling/config.json",
            "max_input_tokens": "sentence_bert_config.json",
            "prompts": "config_sentence_transformers.json",
        },
    )


def test_a_plain_checkpoint_says_nothing(model):
    assert read_embedding_settings(model, model) is None


@pytest.mark.parametrize(
    ("transformer", "own", "expected"),
    [
        ({"max_seq_length": 512}, 90, (512, "sentence_bert_config.json")),
        ({"processor_kwargs": {"model_max_length": 70}}, 90, (70, "sentence_bert_config.json")),
        ({"unpad_inputs": None}, 90, (90, "tokenizer_config.json")),
        ({"unpad_inputs": None}, 300, (256, "config.json")),
        ({"unpad_inputs": None}, 1e30, (256, "config.json")),
    ],
)
def test_the_longest_row_is_the_directory_s_own(model, transformer, own, expected):
    pipeline(model, transformer=transformer)
    rig.edit_json(model / "tokenizer_config.json", {"model_max_length": own})
    found = read_embedding_settings(model, model)
    assert (found.max_input_tokens, found.origins["max_input_tokens"]) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"others": ("Dense",)}, "it lists a module sentence_transformers.models.Dense (3_Dense)"),
        ({"others": ("custom_st.Pooling",)}, "it lists a module custom_st.Pooling (3_custom_st.Pooling)"),
        ({"others": ("Pooling",)}, "its modules are Transformer, Pooling, Normalize, Pooling"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "its pooling is weightedmean"),
        (
            {"pooling": {"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True}},
            "its pooling is max + lasttoken",
        ),
        ({"transformer": {"do_lower_case": True}}, "do_lower_case is true"),
        ({"transformer": {"transformer_task": "fill-mask"}}, 'transformer_task is "fill-mask"'),
        ({"transformer": {"config_args": {"num_hidden_layers": 2}}}, "config_args.num_hidden_layers is 2"),
        ({"transformer": {"tokenizer_args": {"truncation_side": "left"}}}, 'tokenizer_args.truncation_side is "left"'),
        ({"transformer": {"modality_config": {"message": {}}}}, 'modality_config is {"message": {}}'),
        ({"transformer": {"something_new": 1}}, "something_new is 1"),
        ({"settings": {"model_type": "SparseEncoder"}}, 'model_type is "SparseEncoder"'),
        ({"settings": {"truncate_dim": 32}}, "truncate_dim is 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_the_numbers_and_is_not_applied_is_refused_by_its_name(model, changes, problem):
    with pytest.raises(NotApplied) as caught:
        read_embedding_settings(pipeline(model, **changes), model)
    assert caught.value.facts["found"] == problem
    assert caught.value.exit_code == 4


def test_a_pooling_that_was_chosen_goes_over_one_that_there_is_not_here(model):
    pipeline(model, pooling={"pooling_mode": "weightedmean"})
    assert read_embedding_settings(model, model, pool="mean").pool == "mean"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{}}"),
        ("1_Pooling/config.json", "[]"),
        ("sentence_bert_config.json", "no JSON"),
        ("config_sentence_transformers.json", '{"prompts": ["query"]}'),
        ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "query"}'),
    ],
)
def test_settings_that_cannot_be_read_are_refused(model, name, content):
    pipeline(model)
    (model / name).write_text(content)
    with pytest.raises(BadModules) as caught:
        read_embedding_settings(model, model)
    assert str(model / name) in str(caught.value)


def test_a_prompt_that_does_not_count_in_a_mean_is_refused(model, rows, tmp_path):
    pipeline(model, pooling={"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(NotApplied, match=re.escape('leaves the states of a prompt out of the pooling ("mean")')):
        made(model, rows, tmp_path / "out", prompt_name="query")
    assert made(model, rows, tmp_path / "out").summary.complete


def test_a_prompt_that_there_is_not_is_refused_with_those_that_there_are(model, rows, tmp_path):
    with pytest.raises(NoSuchPrompt, match="It has none; give the text itself with --prompt TEXT"):
        made(model, rows, tmp_path / "out", prompt_name="query")
    pipeline(model)
    with pytest.raises(NoSuchPrompt, match=r'no prompt of the name "passage"\. It has: query, document\.'):
        made(model, rows, tmp_path / "out", prompt_name="passage")


# --- engines and jobs -----------------------------------------------------------------------------------------------


def setting(result: Any, name: str) -> tuple[Any, str]:
    return next((one.value, one.origin) for one in result.settings if one.name == name)


def test_an_engine_is_built_once_and_found_again_by_what_it_is_made_of(decoder, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    model = pipeline(shutil.copytree(decoder, tmp_path / "model"))
    first, origin = setting(made(model, rows, tmp_path / "one"), "engine")
    assert origin == "built now, used again next time"
    pipeline(model, pooling={"pooling_mode": "mean"}, normalize=False)
    assert setting(made(model, rows, tmp_path / "two"), "engine") == (first, "built before, used again")
    rig.tiny_tokenizer(bos=True, eos=True).save_pretrained(model)
    other, origin = setting(made(model, rows, tmp_path / "three"), "engine")
    assert (other != first, origin) == (True, "built now, used again next time")
    Path(first, "contract.json").write_text("{}")
    rig.tiny_tokenizer(bos=False, eos=True).save_pretrained(model)
    assert setting(made(model, rows, tmp_path / "four"), "engine") == (first, "built now, used again next time")


def test_the_output_is_an_ordinary_one_that_the_same_call_goes_on_with(model, rows, tmp_path):
    pipeline(model)
    assert made(model, rows, tmp_path / "out").summary.num_shards_made == 1
    again = made(model, rows, tmp_path / "out").summary
    assert (again.complete, again.num_shards_made) == (True, 0)
    assert verify(tmp_path / "out", recompute=8).worst <= 1e-5


def test_an_engine_that_is_named_is_used_within_its_limit_and_only_for_its_own_checkpoint(
    model, rows, tmp_path, tiny_engine
):
    from extract.engine.builder import build

    pipeline(model)
    build(model, tmp_path / "engine", Recipe(dtype="float32", device="cpu", max_input_tokens=24))
    result = made(model, rows, tmp_path / "out", engine=tmp_path / "engine")
    assert setting(result, "max_input_tokens")[0] == 24
    assert rig.relative_error(embeddings(tmp_path / "out"), expected(model, "last", limit=24)) < 1e-5
    with pytest.raises(OtherCheckpoint):
        made(model, rows, tmp_path / "other", engine=tiny_engine)


def test_an_engine_that_takes_longer_rows_is_given_none_that_are_longer_than_the_directory_says(model, rows, tmp_path):
    from extract.engine.builder import build

    pipeline(model)
    build(model, tmp_path / "engine", Recipe(dtype="float32", device="cpu", max_input_tokens=64))
    made(model, rows, tmp_path / "out", engine=tmp_path / "engine")
    assert rig.relative_error(embeddings(tmp_path / "out"), expected(model, "last")) < 1e-5


def test_a_row_may_be_as_long_as_is_asked_for(model, rows, tmp_path):
    pipeline(model)
    made(model, rows, tmp_path / "out", text=TextSpec(max_input_tokens=24))
    assert rig.relative_error(embeddings(tmp_path / "out"), expected(model, "last", limit=24)) < 1e-5


def test_the_command_says_what_it_took_from_where(model, rows, tmp_path, capsys):
    pipeline(model)
    arguments = ("--precision", "float32", "--reserve-bytes", 0, "--no-normalize", "--pool", "mean")
    ended = command(capsys, "embed", model, rows, "-o", tmp_path / "out", *arguments)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[:4] == [
        "pool             'mean'  (as asked)",
        "normalize        False  (as asked)",
        "prompt           ''  (default: none is named)",
        "max_input_tokens 40  (sentence_bert_config.json)",
    ]
    assert re.fullmatch(
        r"engine           '\S+/built/model-[0-9a-f]{16}'  \(built (now|before), used again.*\)", lines[4]
    )
    assert lines[5] == "note: no prompt is used; the checkpoint has some: --prompt-name query"
    assert "pool: 'mean' (as asked)" in ended.err
    assert rig.relative_error(embeddings(tmp_path / "out"), expected(model, "mean", unit=False)) < 1e-5


def test_a_prompt_and_the_name_of_one_are_a_usage_error(tmp_path, capsys):
    ended = command(capsys, "embed", "m", "d", "-o", tmp_path / "out", "--prompt", "a", "--prompt-name", "b")
    assert ended.code == 2
    assert "--prompt and --prompt-name do not go together." in ended.err


def test_a_tokenizer_that_ends_texts_with_nothing_brings_up_a_note(llama_checkpoint, rows, tmp_path):
    result = made(llama_checkpoint, rows, tmp_path / "out")
    assert "--special-tokens bos+eos" in result.notes[0]
    assert setting(result, "pool") == ("last", "default: the checkpoint names none")
    assert setting(result, "max_input_tokens") == (128, "default: the checkpoint does not say")


# --- docs/embeddings.md ---------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs/embeddings.md").read_text(encoding="utf-8")
ON_THE_PAGE = "Qwen/Qwen3-Embedding-0.6B"


def test_what_the_page_says_to_type_finds_the_nearest_passages(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pipeline(model)
    lines = re.findall(r"^    ((?:extract|echo) .*)$", PAGE, re.MULTILINE)
    assert [line.split()[:2] for line in lines if line.startswith("extract")] == [
        ["extract", "sample"],
        ["extract", "embed"],
        ["extract", "embed"],
    ]
    for line in lines:
        if line.startswith("echo"):
            subprocess.run(["bash", "-c", line], check=True)
            continue
        line = line.replace(ON_THE_PAGE, "model").replace("--rows 1000", "--rows 40")
        options = ["--precision", "float32", "--reserve-bytes", "0"] if "embed" in line else []
        ended = command(capsys, *line.split()[1:], *options)
        assert ended.code == 0, ended.err
    assert "prompt           'Instruct: find the passage\\nQuery: '  (\"query\" of config_sentence_" in ended.out
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 10
    exec(program, {})
    shown = capsys.readouterr().out.splitlines()
    cosines = [float(line.split()[0]) for line in shown]
    assert len(cosines) == 3
    assert 1 >= cosines[0] >= cosines[1] >= cosines[2] >= -1


def test_every_command_of_the_page_is_one_with_these_options():
    import click

    from extract.cli import COMMANDS, cli

    named = re.findall(r"`extract ([^`]+)`", PAGE)
    assert named
    for line in named:
        name, *words = line.split()
        assert name in COMMANDS
        found = cli.get_command(click.Context(cli), name)
        flags = {flag for one in found.params for flag in (*one.opts, *one.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= flags
