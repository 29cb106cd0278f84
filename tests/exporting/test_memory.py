"""Memory does not grow with the output: what is held after three shards is what is held after twelve."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shard_rig
from exporting_rig import output

from extract.exporting import TARGETS
from extract.spec import StatesSpec

NUM_SHARDS, ROWS, TOKENS, WIDTH = 12, 32, 128, 1024
SHARD_BYTES = ROWS * TOKENS * WIDTH * 2

PROGRAM = """
import json, resource, sys
from extract import export
from extract.exporting import TARGETS, parquet, safetensors
from extract.exporting.working_directory import WorkingDirectory
parquet.ROW_GROUP_BYTES = safetensors.FILE_BYTES = 2**23
record, peaks = WorkingDirectory.record, []
def noted(self, part, shared):
    record(self, part, shared)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
WorkingDirectory.record = noted
found = {}
for kind in json.loads(sys.argv[3]):
    peaks.clear()
    options = {"layers": ("final",), "loss_mask": "all"} if kind in ("speculators", "specforge") else {}
    export(sys.argv[1], sys.argv[2] + "/" + kind, kind=kind, **options)
    found[kind] = peaks[-1] - peaks[2]
print(json.dumps(found))
"""


def large_output(root: Path) -> Path:
    """Twelve shards of 8 MiB of float16, which compress to almost nothing."""
    spec = StatesSpec(dtype="float16", record_batch_bytes=2**21)
    out = output(root, "tokens", "float16", num_shards=1)
    for path in (*(out / "data").iterdir(), *(out / "commits").iterdir()):
        path.unlink()
    job = json.loads((out / "job.json").read_bytes())
    schema = shard_rig.schema_for(spec, width=WIDTH)
    job |= {"num_rows": NUM_SHARDS * ROWS, "rows_per_shard": ROWS}
    job["schema"] = shard_rig.base64.b64encode(schema.serialize().to_pybytes()).decode()
    (out / "job.json").write_text(json.dumps(job))
    rows = shard_rig.token_rows([TOKENS] * ROWS)
    states = np.ones((ROWS * TOKENS, WIDTH), np.float16)
    for shard in range(NUM_SHARDS):
        temporary = out / "data" / "tmp"
        facts = shard_rig.write_shard(temporary, spec, rows, states, first_row=shard * ROWS, shard=shard, width=WIDTH)
        name = f"{shard_rig.shard_name(shard)}-{facts.sha256[:8]}.arrow"
        temporary.rename(out / "data" / name)
        commit = shard_rig.Commit(
            shard=shard,
            first_row=shard * ROWS,
            num_rows=ROWS,
            last=shard == NUM_SHARDS - 1,
            num_rows_out=facts.num_rows,
            data=name,
            sha256=facts.sha256,
            num_bytes=facts.num_bytes,
            num_tokens=facts.num_tokens,
            num_tokens_original=facts.num_tokens_original,
            outcomes=facts.outcomes,
        )
        shard_rig.write_commit(out / "commits", commit)
    return out


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path):
    pytest.importorskip("lance", reason="pylance is not installed")
    out = large_output(tmp_path)
    command = [sys.executable, "-c", PROGRAM, out, tmp_path, json.dumps(list(TARGETS))]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    grown = json.loads(ended.stdout)
    assert set(grown) == set(TARGETS)
    most = max(grown.values())
    assert most < 3 * SHARD_BYTES, {kind: f"{size / 2**20:.0f} MiB" for kind, size in grown.items()}
