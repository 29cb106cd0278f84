"""Damaged and hostile files: of contracts, records, jobs, recipes and headers, only errors of ours come out.

Real files are changed by bytes and by JSON values. The same changes in each run; set EXTRACT_FUZZ_EXAMPLES (changes per
kind of file, such as 20000) for a longer search with fresh ones.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shard_rig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from extract.commits import read_commit
from extract.cpu.architecture import ARCHITECTURE_FILE, read_architecture
from extract.cpu.mapped_weights import WeightsFile
from extract.engine.contract import check_files, read_contract
from extract.engine.gguf_file import read_gguf
from extract.engine.recipe import load_recipe
from extract.engine.weights_files import read_header
from extract.errors import ExtractError
from extract.job import read_job
from extract.output import open_output
from extract.record_sums import RecordSums
from extract.spec import StatesSpec, load_job
from extract.status import status
from extract.verification import verify

EXAMPLES = int(os.environ.get("EXTRACT_FUZZ_EXAMPLES", "0"))
MAX_MESSAGE = 6000

fuzzed = settings(
    max_examples=EXAMPLES or 80,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# --- changes --------------------------------------------------------------------------------------------------------

ODD = [None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, float("inf")]
ODD += [
    float("nan"),
    "",
    "x",
    "..",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "NaN",
    [],
    {},
    [[]],
    [None],
]
ODD += [{"x": 1}, {"": {}}, [0] * 100, "0123456789abcdef", "float32", "tokens"]


def changed_bytes(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """A flipped bit, a cut, something inserted, repeated or overwritten, once or a few times."""
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, max(0, len(content) - 1)))
        length = draw(some.integers(0, 40))
        how = draw(some.sampled_from(["flip", "cut", "insert", "repeat", "overwrite", "drop"]))
        if how == "flip" and content:
            content = content[:place] + bytes([content[place] ^ 1 << draw(some.integers(0, 7))]) + content[place + 1 :]
        elif how == "cut":
            content = content[:place]
        elif how == "insert":
            content = content[:place] + draw(some.binary(max_size=20)) + content[place:]
        elif how == "repeat":
            content = content[: place + length] + content[place:]
        elif how == "overwrite":
            content = content[:place] + bytes(length) + content[place + length :]
        else:
            content = content[:place] + content[place + length :]
    return content


def changed_value(draw: Callable[[Any], Any], value: Any) -> Any:
    """One value somewhere inside is another one, gone, doubled, or of another name."""
    if isinstance(value, (dict, list)) and value and draw(some.integers(0, 5)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(some.sampled_from(keys))
        how = draw(some.sampled_from(["in", "in", "in", "in", "drop", "rename", "add"]))
        copy = value.copy()
        if how == "in":
            copy[key] = changed_value(draw, value[key])
        elif how == "drop":
            del copy[key]
        elif isinstance(copy, list):
            copy.insert(key, draw(some.sampled_from(ODD)))
        elif how == "rename":
            copy[draw(some.text(max_size=8))] = copy.pop(key)
        else:
            copy[draw(some.text(max_size=8))] = draw(some.sampled_from(ODD))
        return copy
    number = some.integers(-(2**65), 2**65) | some.floats()
    return draw(some.sampled_from(ODD) | number | some.text(max_size=20))


@some.composite
def changed_json(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """A JSON file with some values or bytes changed."""
    if draw(some.integers(0, 2)) == 0:
        return changed_bytes(draw, content)
    table = json.loads(content)
    for _ in range(draw(some.integers(1, 2))):
        table = changed_value(draw, table)
    return json.dumps(table, ensure_ascii=draw(some.booleans())).encode("utf-8", "surrogatepass")


@some.composite
def changed_header(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """A safetensors file with another header, or another length of it."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    header = draw(changed_json(header))
    said = draw(some.sampled_from([len(header), len(header) + 1, 0, 2**40, 2**64 - 1]) | some.just(len(header)))
    return struct.pack("<Q", said) + header + data[: draw(some.sampled_from([len(data), len(data), 0, 7]))]


@some.composite
def changed_text(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """A text file with some bytes or lines changed."""
    if draw(some.booleans()):
        return changed_bytes(draw, content)
    lines = content.decode().splitlines()
    for _ in range(draw(some.integers(1, 3))):
        place = draw(some.integers(0, len(lines) - 1))
        key = lines[place].partition("=")[0]
        word = ["-1", "0", "99999999999999999999", "nan", "1e999", '""', '"../x"', "[]", "{}", "true", '"\\u0000"']
        word += ["[" * 2000, "1979-05-27", '"a" = 1', "'" * 3, "[1, [2, {}]]", '["x", "y"]']
        lines[place] = f"{key} = {draw(some.sampled_from(word))}"
    return "\n".join(lines).encode()


# --- what comes out -------------------------------------------------------------------------------------------------


def only_our_errors(read: Callable[[], object]) -> None:
    try:
        read()
    except ExtractError as error:
        message = str(error)
        assert message.strip()
        assert len(message) < MAX_MESSAGE, len(message)
        assert "Traceback" not in message
        message.encode()  # a terminal must be able to print it


@pytest.fixture(scope="module")
def engine(tiny_engine, tmp_path_factory) -> Path:
    return shutil.copytree(tiny_engine, tmp_path_factory.mktemp("fuzzed") / "engine")


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Three shards and their manifest."""
    from extract.manifest import finalize

    root = tmp_path_factory.mktemp("fuzzed-output") / "out"
    shard_rig.write_output(root, StatesSpec())
    finalize(read_job(root))
    return root


class Changed:
    """A file whose contents are replaced for a while."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, path.read_bytes()

    def hold(self, content: bytes, read: Callable[[], object]) -> None:
        self.path.write_bytes(content)
        try:
            only_our_errors(read)
        finally:
            self.path.write_bytes(self.content)


def test_contracts(engine):
    file = Changed(engine / "contract.json")

    def read():
        contract = read_contract(engine)
        assert len(contract.engine_id) == 64
        check_files(engine, contract)

    @fuzzed
    @given(changed_json(file.content))
    def holds(content):
        file.hold(content, read)

    holds()


def test_decoders(engine):
    file = Changed(engine / ARCHITECTURE_FILE)

    @fuzzed
    @given(changed_json(file.content))
    def holds(content):
        file.hold(content, lambda: read_architecture(engine))

    holds()


def test_headers_of_weights(engine, tmp_path):
    real = (engine / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(real)
    file = Changed(path)

    def mapped():
        with WeightsFile(path) as weights:
            for name in weights.names:
                weights.drop(name)

    @fuzzed
    @given(changed_header(real))
    def holds(content):
        file.hold(content, lambda: read_header(path))
        file.hold(content, mapped)

    holds()


def test_commit_records(output):
    file, job = Changed(output / "commits" / "shard-00001.json"), read_job(output)

    def read():
        commit = read_commit(file.path)
        sums = RecordSums(job, [commit])
        assert sums.totals.num_shards == 1 and sums.problem is not None

    @fuzzed
    @given(changed_json(file.content))
    def holds(content):
        file.hold(content, read)

    holds()


def sealed(content: bytes) -> bytes:
    """The content without the digest that would tell, where it is a JSON object."""
    try:
        table = json.loads(content)
        table.pop("check", None)
        return json.dumps(table).encode()
    except (ValueError, AttributeError, RecursionError):
        return content


def test_outputs_with_a_record_of_somebody_elses_making(output):
    file = Changed(output / "commits" / "shard-00001.json")

    def read_all():
        found = open_output(output)
        for row in range(7, 14):
            found.states(row)
        found.table()

    @fuzzed
    @given(changed_json(file.content).map(sealed))
    def holds(content):
        for read in (lambda: verify(output), lambda: status(output), read_all):
            file.hold(content, read)

    holds()


def test_jobs(output):
    file = Changed(output / "job.json")

    def read_all():
        found = open_output(output)
        found.states(8)
        found.table()

    @fuzzed
    @given(changed_json(file.content))
    def holds(content):
        for read in (lambda: status(output), lambda: verify(output), read_all):
            file.hold(content, read)

    holds()


def test_manifests(output):
    file = Changed(output / "manifest.json")

    @fuzzed
    @given(changed_json(file.content))
    def holds(content):
        for read in (lambda: status(output), lambda: verify(output)):
            file.hold(content, read)

    holds()


RECIPE = b"""
runtime = "torch"
device = "cpu"
dtype = "bfloat16"
max_input_tokens = 64
max_tokens = 4096
architectures = ["LlamaForCausalLM"]
description = "a recipe"
"""

JOB = b"""
engine = "engine"
output = "out"

[source]
path = ["a.parquet", "b.parquet"]
column = "text"
id_column = "key"
carry = ["url", "meta.score"]
rows = "0-99,250"

[text]
max_input_tokens = 64
on_long = "chunk"
chunk_overlap = 8

[states]
kind = "tokens"
dtype = "float16"
compression = "zstd"
compression_level = 3
rows_per_shard = 100

[run]
max_tokens = 2048
overlap = false
"""


@pytest.mark.parametrize(("real", "read"), [(RECIPE, load_recipe), (JOB, load_job)], ids=["recipes", "job specs"])
def test_toml_files(real, read, tmp_path):
    path = tmp_path / "file.toml"
    path.write_bytes(real)
    read(path)
    file = Changed(path)

    @fuzzed
    @given(changed_text(real))
    def holds(content):
        file.hold(content, lambda: read(path))

    holds()


def test_headers_of_gguf_files(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read_gguf(path)
    file = Changed(path)

    @some.composite
    def changed(draw):
        return changed_bytes(draw, file.content)

    @fuzzed
    @given(changed())
    def holds(content):
        file.hold(content, lambda: read_gguf(path))

    holds()
