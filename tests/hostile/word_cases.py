"""One case for each error class: the command that provokes it, or the facts to build it from where nothing here can.

`messages.toml` beside this holds the complete message of each. Classes go by their module and name without `extract.`.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PLAN = "plan --engine engine -o out --data "

COMMANDS: dict[str, str] = {
    # 2: usage
    "assets.NoSuchAsset": "plan nojob",
    "errors.BadValue": PLAN + "rows.parquet --limit -1",
    "errors.UnknownKey": "plan unknown.toml",
    "errors.UnreadableSpec": "plan broken.toml",
    "jobs.Missing": "run --data rows.parquet -o out",
    "job.NotAJob": "status gone",
    "inspection.NothingToInspect": "inspect gone",
    "planning.BeyondEngine": PLAN + "rows.parquet --max-input-tokens 64",
    "selection.BadSelection": PLAN + "rows.parquet --rows 1,1",
    "shards.schema.ColumnTaken": PLAN + "rows.parquet --carry row",
    "shards.schema.ColumnNotStorable": PLAN + "union.arrow --carry either",
    "text.chat.NoChatTemplate": PLAN + "rows.parquet --column chat --input messages",
    "text.tokens.DoesNotApply": PLAN + "rows.parquet --column ids --input input_ids --special-tokens none",
    "text.tokens.NoRoom": PLAN + "rows.parquet --max-input-tokens 1",
    "sample.SampleExists": "sample -o rows.parquet",
    "engine.builder.OutputExists": "build checkpoint -o engine",
    "tuning.plot.NoPictureFormat": "tune checkpoint -o new.toml --plot curve.jpg",
    # 3: source
    "sources.files.NoSuchFile": PLAN + "gone.parquet",
    "sources.files.NoFiles": PLAN + "nothing",
    "sources.files.DuplicateFile": PLAN + "rows.parquet --data ./rows.parquet",
    "sources.files.UnreadableFile": PLAN + "empty.parquet",
    "sources.formats.UnknownFormat": PLAN + "data.bin",
    "sources.formats.MixedFormats": PLAN + "mixed",
    "sources.formats.RemotePath": PLAN + "s3://bucket/rows.parquet",
    "sources.hf.OneDatasetOnly": PLAN + "a --data b --format hf",
    "sources.columns.NoSuchColumn": PLAN + "rows.parquet --column txt",
    "sources.columns.AmbiguousColumn": PLAN + "twice.parquet",
    "sources.column_types.WrongInputType": PLAN + "rows.parquet --column n",
    "sources.column_types.TypesDiffer": PLAN + "drift --carry n",
    "sources.column_types.CastFailed": PLAN + "wide --carry n",
    "sources.column_types.NotReadableText": PLAN + "bytes.arrow --carry text",
    "sources.jsonl.BadLine": PLAN + "lines.jsonl",
    "text.id_column.BadTokenId": PLAN + "rows.parquet --column ids --input input_ids",
    "text.tokens.RowRefused": PLAN + "rows.parquet --on-null error",
    # 4: checkpoint and engine
    "engine.contract.NotAnEngine": "plan --engine nothing --data rows.parquet",
    "engine.model_config.NotACheckpoint": "build nothing -o new",
    "engine.model_config.UnknownModelType": "build unknown -o new",
    "engine.model_config.NotADecoder": "build encoder -o new",
    "engine.weights_files.NoWeights": "build bare -o new",
    "engine.weights_files.PickledWeights": "build pickled -o new",
    # 5: resume
    "job.ForeignDirectory": "run --engine engine --data rows.parquet -o mixed --reserve-bytes 0",
    # 8: space
    "estimate.DiskTooSmall": PLAN + "rows.parquet --reserve-bytes 1000000000000000",
}

FACTS: dict[str, dict[str, Any]] = {}


def plant(directory: Path, engine: Path, checkpoint: Path) -> None:
    """The files that the commands name."""
    (directory / "engine").symlink_to(engine)
    (directory / "checkpoint").symlink_to(checkpoint)
    for name in ("nothing", "mixed", "drift", "wide", "unknown", "encoder", "bare", "pickled"):
        (directory / name).mkdir()
    chat = [[{"role": "user", "content": "hi"}]] * 2
    rows = pa.table({"text": ["a", None], "n": [1, 2], "row": [1, 2], "ids": [[1, 2], [3, 10**6]], "chat": chat})
    for name in ("rows.parquet", "mixed/0.parquet"):
        pq.write_table(rows, directory / name)
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), directory / "twice.parquet")
    either = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])])
    bad = pa.array([b"a", b"\xff"]).view(pa.string())
    for name, table in {
        "union.arrow": pa.table({"text": ["a"], "either": either}),
        "bytes.arrow": pa.table({"text": bad}),
    }.items():
        with pa.ipc.new_file(str(directory / name), table.schema) as writer:
            writer.write_table(table)
    for name, values in {"drift/0": ["1"], "drift/1": [1], "wide/0": [2**60 + 1], "wide/1": [0.5]}.items():
        pq.write_table(pa.table({"text": ["a"], "n": values}), directory / f"{name}.parquet")
    for name, content in {
        "unknown.toml": '[source]\npath = "x"\ncolum = "text"\n',
        "broken.toml": "[source\n",
        "lines.jsonl": '{"text": "a"}\n[1]\n',
        "mixed/1.jsonl": '{"text": "a"}\n',
        "data.bin": "0101",
        "empty.parquet": "",
        "unknown/config.json": json.dumps({"model_type": "lama", "architectures": ["LamaForCausalLM"]}),
        "encoder/config.json": json.dumps({"model_type": "bert", "architectures": ["BertModel"]}),
        "bare/config.json": (checkpoint / "config.json").read_text(),
        "pickled/config.json": (checkpoint / "config.json").read_text(),
        "pickled/pytorch_model.bin": "pickle",
    }.items():
        (directory / name).write_text(content)
