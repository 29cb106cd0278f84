"""`contract.json`: what is written is what is read, what an engine is decides its id, and a wrong file is refused.

No weights are loaded here; what only a loaded engine can tell is in `test_runtimes.py`.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from job_rig import Engines, edit_contract

from extract.canonical import canonical_json
from extract.engine.contract import (
    CONTRACT_FILE,
    MAX_CONTRACT_BYTES,
    EngineChanged,
    NotAnEngine,
    check_files,
    describe_json,
    read_contract,
    write_contract,
)


@pytest.fixture(scope="module")
def whole(engines: Engines) -> Path:
    """An engine; do not change its files."""
    return engines.engine("llama")


@pytest.fixture
def engine(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "engine")
    return tmp_path / "engine"


def refusal(engine: Path) -> str:
    with pytest.raises(NotAnEngine) as error:
        read_contract(engine)
    assert error.value.exit_code == 4
    head, tail = f"{engine}: not an engine directory (", f"). Build one: extract build CHECKPOINT -o {engine}"
    assert str(error.value).startswith(head) and str(error.value).endswith(tail)
    return str(error.value)[len(head) : -len(tail)]


# --- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_a_contract_that_is_written_again_is_the_same_file(engines: Engines, tmp_path, name):
    contract = read_contract(engines.engine(name))
    write_contract(tmp_path, contract)
    assert (tmp_path / CONTRACT_FILE).read_bytes() == (engines.engine(name) / CONTRACT_FILE).read_bytes()
    assert read_contract(tmp_path) == contract


def test_the_file_is_canonical(whole):
    content = (whole / CONTRACT_FILE).read_bytes()
    assert content == canonical_json(json.loads(content)) + b"\n"


def test_it_says_what_the_engine_does_not_do(whole):
    contract = read_contract(whole)
    assert (contract.cache, contract.generated_tokens, contract.output.position) == ("none", 0, "post_final_norm")


def test_the_id_is_that_of_what_the_engine_is_and_not_of_what_was_measured_on_it(engine):
    before = read_contract(engine).engine_id
    edit_contract(engine, measured={"tokens_per_s": 1.0}, proof={"plain": 0.5}, fidelity={"bound": 0.5})
    edit_contract(engine, probe={"tolerance": 0.5})
    assert read_contract(engine).engine_id == before


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": {"sha256": "0" * 64}},
        {"runtime": {"layout": "dense"}},
        {"device": {"instruction_set": "avx2"}},
        {"precision": {"weights": "bfloat16"}},
        {"limits": {"max_input_tokens": 31}},
        {"output": {"width": 65}},
        {"tokenizer": {"truncation_side": "left"}},
        {"files": []},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_id_changes_with_everything_else(engine, change):
    before = read_contract(engine).engine_id
    edit_contract(engine, **change)
    assert read_contract(engine).engine_id != before


def test_every_file_of_the_engine_is_in_the_contract(whole):
    named = {file.name for file in read_contract(whole).files}
    assert named == {path.name for path in whole.iterdir()} - {CONTRACT_FILE}


def test_the_description_begins_with_the_id(whole):
    table = describe_json(read_contract(whole))
    assert next(iter(table.items())) == ("engine_id", read_contract(whole).engine_id)
    assert set(table) - {"engine_id"} == {field.name for field in dataclasses.fields(read_contract(whole))}


# --- what is no contract --------------------------------------------------------------------------------------------


def test_no_directory_is_no_engine(tmp_path):
    assert refusal(tmp_path / "nowhere") == "no such directory"


def test_a_file_is_no_engine(tmp_path):
    (tmp_path / "engine").write_text("")
    assert refusal(tmp_path / "engine") == "not a directory"


def test_a_directory_without_a_contract_is_no_engine(tmp_path):
    assert refusal(tmp_path) == "it holds no contract.json"


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_format_version_is_refused(engine, version):
    edit_contract(engine, version=version)
    assert refusal(engine) == f"contract version {version!r} found, 1 expected"


def test_an_absurdly_large_contract_is_not_read(engine):
    with (engine / CONTRACT_FILE).open("r+b") as file:
        file.truncate(MAX_CONTRACT_BYTES + 1)
    assert refusal(engine) == "contract.json has 16,777,217 bytes, absurdly many"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "contract.json is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            b"{",
            "contract.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (b"[" * 100_000, "contract.json is not JSON: maximum recursion depth exceeded"),
        (b"\xff\xfe", "contract.json is not JSON: "),
        (b"[]", "contract version None found, 1 expected"),
        (b"7", "contract version None found, 1 expected"),
        (b'{"version":1}', "{path}: checkpoint is missing, expected a table."),
    ],
)
def test_what_does_not_parse_is_refused(engine, content, problem):
    (engine / CONTRACT_FILE).write_bytes(content)
    assert refusal(engine).startswith(problem.format(path=engine / CONTRACT_FILE))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": 1}, '{path}: unknown key "extra". Known keys: '),
        ({"limits": {"max_tokenz": 1}}, '{path} [limits]: unknown key "max_tokenz". Did you mean '),
        ({"limits": {"max_tokens": "many"}}, '{path} [limits]: max_tokens is "many", expected a whole number.'),
        ({"device": {"type": "tpu"}}, '{path} [device]: type is "tpu", expected one of "cpu", "cuda".'),
        ({"format": "other"}, '{path}: format is "other", expected one of "extract-engine".'),
        ({"cache": "kept"}, '{path}: cache is "kept", expected one of "none", "paged".'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_its_name(engine, change, problem):
    edit_contract(engine, **change)
    assert refusal(engine).startswith(problem.format(path=engine / CONTRACT_FILE))


# --- files ----------------------------------------------------------------------------------------------------------


def changed(engine: Path) -> str:
    with pytest.raises(EngineChanged) as error:
        check_files(engine, read_contract(engine))
    assert error.value.exit_code == 4
    return str(error.value)


def test_files_as_they_were_built_pass(whole):
    check_files(whole, read_contract(whole))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_file_is_named_with_both_hashes(engine, name):
    path = engine / name
    expected = next(file for file in read_contract(engine).files if file.name == name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    message = changed(engine)
    assert message.startswith(f"{engine}: engine file {name} has sha256 ")
    assert message.endswith(f", the contract says {expected.sha256[:12]}. Copy the engine again or rebuild it.")


def test_a_cut_file_is_named_with_both_sizes(engine):
    size = (engine / "model.safetensors").stat().st_size
    with (engine / "model.safetensors").open("r+b") as file:
        file.truncate(size - 1024)
    assert changed(engine) == (
        f"{engine}: engine file model.safetensors has size {size - 1024}, the contract says {size}. "
        "Copy the engine again or rebuild it."
    )


@pytest.mark.parametrize("how", ["deleted", "a directory", "a link"])
def test_a_missing_file_is_named(engine, tmp_path, how):
    path = engine / "tokenizer.json"
    path.rename(tmp_path / "aside")
    if how == "a directory":
        path.mkdir()
    if how == "a link":
        path.symlink_to(tmp_path / "aside")
    assert changed(engine) == (
        f"{engine}: engine file tokenizer.json has state missing, the contract says present. "
        "Copy the engine again or rebuild it."
    )


@pytest.mark.parametrize("name", ["../aside", "/etc/hostname", "sub/file", ".."])
def test_a_contract_cannot_name_files_elsewhere(engine, tmp_path, name):
    (tmp_path / "aside").write_text("x")
    (engine / "sub").mkdir()
    (engine / "sub" / "file").write_text("x")
    edit_contract(engine, files=[{"name": name, "size": 1, "sha256": "0" * 64}])
    assert changed(engine).startswith(f"{engine}: engine file {name} has state missing, the contract says present.")
