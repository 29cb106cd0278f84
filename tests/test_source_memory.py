"""Memory stays flat while a large source is read through: measured in a process of its own, by its highest point.

The highest point is VmHWM, not `ru_maxrss`, which a child takes over from the process that started it.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")

ROOT = Path(__file__).parents[1]
NUM_ROWS = 1_000_000
MAX_RSS_MB = 600

READ_THROUGH = """
import sys
from pathlib import Path
from extract.sources import open_source
from extract.spec import SourceSpec
source = open_source(SourceSpec(path=sys.argv[1]))
num_rows = source.layout().num_rows
rows = text_bytes = 0
for batch in source.read(0, None, 1024):
    rows += batch.num_rows
    text_bytes += batch["text"].nbytes
assert rows == num_rows
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(rows, text_bytes, int(status["VmHWM"].split()[0]) // 1024)
"""


def read_through(path: Path) -> tuple[int, int, int]:
    """Rows, bytes of text and peak resident MB of a process that reads all of `path`."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ_THROUGH, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    rows, text_bytes, peak = map(int, done.stdout.split())
    return rows, text_bytes, peak


@pytest.fixture(scope="module")
def short_texts() -> pa.Table:
    """A million different texts of about a hundred characters."""
    generator = random.Random(0)
    words = [f"word{index}" for index in range(5000)]
    endings = [" ".join(generator.choices(words, k=12)) for _ in range(50_000)]
    return pa.table({"text": [f"{index} {endings[index % len(endings)]}" for index in range(NUM_ROWS)]})


@pytest.mark.parametrize("group_rows", [NUM_ROWS, 1000], ids=["one row group", "groups of 1,000 rows"])
@pytest.mark.parametrize("dictionary", [True, False], ids=["dictionary", "plain"])
def test_a_million_rows_of_parquet_are_read_in_little_memory(tmp_path, short_texts, group_rows, dictionary):
    path = tmp_path / "a.parquet"
    pq.write_table(short_texts, path, row_group_size=group_rows, use_dictionary=dictionary)
    rows, _, peak = read_through(path)
    assert rows == NUM_ROWS
    assert peak < MAX_RSS_MB / 2, f"{peak} MB"


@pytest.mark.slow
def test_a_million_rows_of_jsonl_are_read_in_little_memory(tmp_path, short_texts):
    path = tmp_path / "a.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in short_texts["text"].to_pylist())
    rows, _, peak = read_through(path)
    assert rows == NUM_ROWS
    assert peak < MAX_RSS_MB / 2, f"{peak} MB"


@pytest.mark.slow
@pytest.mark.parametrize("page_rows", [1, 1024], ids=["a page a row", "a page a row group"])
def test_a_few_rows_of_forty_megabytes_are_decoded_one_at_a_time(tmp_path, page_rows):
    size, num_rows = 40 * 2**20, 16
    schema = pa.schema([("text", pa.large_string())])
    texts = [f"{index:04}" * (size // 4) for index in range(num_rows)]
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": texts}, schema),
        path,
        row_group_size=num_rows // 2,
        write_batch_size=page_rows,
        use_dictionary=False,
        compression="zstd",
    )
    assert pq.ParquetFile(path).num_row_groups == 2
    rows, text_bytes, peak = read_through(path)
    assert rows == num_rows
    assert text_bytes >= num_rows * size
    whole_page = (
        2 * size * num_rows // 2 // 2**20 if page_rows > 1 else 0
    )  # decompressed whole, the next beside the last
    assert peak < MAX_RSS_MB + whole_page, f"{peak} MB"
