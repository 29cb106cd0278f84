"""A text of 50 MB, a column past 2 GiB, a hundred thousand rows of one character: quick, in flat memory, all there."""

import json
import mmap
import sys

import numpy as np
import pyarrow as pa
import pytest
from command_line import spawn
from job_rig import job, output_table, parquet, run
from text_rig import exported
from tokenizer_engines import ids_of, outcomes_of

from extract.text import text_column

MEASURED = """
import resource, sys, time
from extract.cli import main
clock = time.perf_counter()
try:
    main(sys.argv[1:])
finally:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak {peak} seconds {time.perf_counter() - clock}", file=sys.stderr)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured in KiB as Linux says it")
def test_a_text_of_fifty_megabytes_costs_about_its_own_size_and_is_cut_as_a_short_one(subjects, tmp_path):
    engine = subjects.engine("llama-own")
    unit = "hello world, this is long "
    long = unit * (50_000_000 // len(unit))
    peaks = {}
    for label, text in {"short": unit * 40, "long": long}.items():
        source = parquet(tmp_path / f"{label}.parquet", {"text": ["one", text, "three"]})
        options = ["--engine", engine, "--data", source, "-o", tmp_path / label, "--threads", 1, "--reserve-bytes", 0]
        ended = spawn("run", *options, "--quiet", python=MEASURED)
        assert ended.code == 0, ended.err
        _, peak, _, seconds = ended.err.split()
        peaks[label] = int(peak)
        assert float(seconds) < 60
    kept = [output_table(tmp_path / label) for label in peaks]
    assert kept[0]["input_ids"].equals(kept[1]["input_ids"])
    assert kept[0]["hidden_states"].equals(kept[1]["hidden_states"])
    assert kept[1]["outcome"].to_pylist() == ["ok", "truncated", "ok"]
    assert kept[1]["num_tokens_original"].to_pylist()[1] is None  # too long to be counted, and said so
    assert (peaks["long"] - peaks["short"]) * 1024 < 8 * len(long)


def test_a_column_whose_offsets_pass_32_bits_is_read_whole():
    """Two rows stand on both sides of 2.5 GiB that a null row covers: pages that nobody reads take no memory."""
    gap = 5 * 2**29
    memory = mmap.mmap(-1, 5 + gap + 4)
    memory[:5], memory[-4:] = b"first", b"last"
    offsets = np.array([0, 5, 5 + gap, 5 + gap + 4], np.int64)
    valid = pa.py_buffer(np.packbits([1, 0, 1], bitorder="little").tobytes())
    column = pa.Array.from_buffers(pa.large_string(), 3, [valid, pa.py_buffer(offsets), pa.py_buffer(memory)])
    rows = exported("adds bos, pads right").rows(column)
    assert outcomes_of(rows) == ["ok", "null", "ok"]
    assert ids_of(rows) == ids_of(exported("adds bos, pads right").rows(["first", None, "last"]))


def test_no_more_text_is_in_hand_at_once_than_a_slice_however_many_rows_a_column_has():
    column = pa.array(["x" * 1000] * 5000)
    parts = list(text_column.read_texts(column))
    assert sum(len(part.texts) for part in parts) == 5000
    assert max(sum(map(len, part.texts)) for part in parts) <= text_column.SLICE_BYTES
    (alone,) = text_column.read_texts(pa.array(["y" * (3 * text_column.SLICE_BYTES)]))
    assert len(alone.texts) == 1


@pytest.mark.parametrize("subject", ["llama-own"])
def test_a_hundred_thousand_rows_of_one_character_are_all_there_in_order(subjects, tmp_path, subject):
    letters = [chr(97 + number % 26) for number in range(100_000)]
    source = parquet(tmp_path / "in.parquet", {"text": letters})
    summary = run(job(subjects.engine(subject), source, tmp_path / "out", kind="last", dtype="float16"))
    assert summary.totals.outcomes == {"ok": 100_000}
    table = output_table(tmp_path / "out")
    assert table["row"].to_numpy().tolist() == list(range(100_000))
    found = np.array(table["input_ids"].combine_chunks().flatten())
    ids = ids_of(exported("adds bos, pads right").rows(letters[:26]))
    assert np.array_equal(found.reshape(-1, 2), np.tile(ids, (3847, 1))[:100_000])
    states = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["hidden_state"].chunks])
    states = states.reshape(100_000, -1)
    first = states[:26]
    assert len(np.unique(first, axis=0)) == 26
    assert np.abs(states - np.tile(first, (3847, 1))[:100_000]).max() < 0.02


def test_tokenising_twenty_thousand_rows_twice_in_one_process_with_threads_and_forks_ends(subjects, tmp_path):
    """A tokenizer's own threads and a forked worker wait for each other for ever where nobody forbids the first."""
    source = parquet(tmp_path / "in.parquet", {"text": [f"row {number}" for number in range(20_000)]})
    code = """
import json, sys, multiprocessing
from extract import JobSpec, run
from extract.spec import SourceSpec, StatesSpec, RunSpec
engine, source, out = sys.argv[1:]
counts = []
for number in range(2):
    states = StatesSpec(kind="first", reserve_bytes=0)
    where = {"engine": engine, "source": SourceSpec(path=source), "output": out + str(number)}
    counts.append(run(JobSpec(**where, states=states, run=RunSpec(threads=2))).totals.num_rows_out)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, range(4))
print(json.dumps(counts))
"""
    ended = spawn(subjects.engine("llama-own"), source, tmp_path / "out", python=code)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == [20_000, 20_000]
