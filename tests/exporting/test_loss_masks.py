"""Loss masks from the roles of a job's conversations, by the engine's own chat template; or why there are none."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import rig
import torch
from job_rig import job, parquet, run
from tokenizer_engines import CHAT_TEMPLATE

from extract import export
from extract.exporting.loss_mask import NoLossMask
from extract.output import open_output

THINKING = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'] if loop.last or message['role'] != 'assistant' else message['content'][:3])",
)
"""As some templates do: what an earlier turn thought is left out of the whole."""

CHATS = [
    [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi, what is it?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve\n中文"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ],
    [{"role": "user", "content": "Nobody answers"}],
    [],
    [{"role": "user", "content": "Tell me all"}, {"role": "assistant", "content": "It is long. " * 40}],
]
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def engine_with(root, template):
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    checkpoint = rig.tiny_checkpoint(root / "checkpoint", "llama", tokenizer=rig.tiny_tokenizer(chat_template=template))
    build(checkpoint, root / "engine", Recipe(dtype="float32", device="cpu", max_input_tokens=128, max_tokens=512))
    return root / "engine"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_with(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    masks = [[1, 0] * 10] * len(CHATS)
    table = pa.table({"messages": pa.array(CHATS, MESSAGES), "mask": masks, "text": ["a b c"] * len(CHATS)})
    return parquet(tmp_path_factory.mktemp("chats") / "chats.parquet", table)


def chat_output(engine, source, out, **options):
    run(job(engine, source, out, input="messages", column="messages", **options))
    return out


def samples(path):
    files = sorted(path.rglob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("data_")))
    return [torch.load(file, weights_only=True) for file in files]


def learned_text(engine, sample):
    """What the tokens of a sample that count say."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine)
    return tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])


def expected_text(chat, tokenizer_end="</s>"):
    return "".join(message["content"] + tokenizer_end for message in chat if message["role"] == "assistant")


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_assistants_words_and_the_end_of_its_turns_count(side, engine, source, tmp_path):
    from transformers import AutoTokenizer

    out = chat_output(engine, source, tmp_path / "out", truncation_side=side)
    made = export(out, tmp_path / "to", kind="specforge", layers=("final",))
    found = samples(tmp_path / "to")
    end = AutoTokenizer.from_pretrained(engine).eos_token
    assert [learned_text(engine, one) for one in found[:3]] == [expected_text(chat, end) for chat in CHATS[:3]]
    long = learned_text(engine, found[3])
    whole = expected_text(CHATS[4], end)
    assert len(found[3]["input_ids"]) == 128
    assert whole.startswith(long) if side == "right" else whole.endswith(long)
    assert long
    assert made.record["loss_mask"]["from"] == "roles"
    assert made.record["loss_mask"]["learned"] == sum(int(one["loss_mask"].sum()) for one in found)
    assert made.left_out_without_states == {"empty": 1}


def test_chunks_of_a_conversation_have_their_own_part_of_the_mask(engine, source, tmp_path):
    whole = chat_output(engine, source, tmp_path / "whole")
    cut = {"on_long": "chunk", "max_input_tokens": 10, "chunk_overlap": 3}
    out = chat_output(engine, source, tmp_path / "out", **cut, rows="0-2")
    export(whole, tmp_path / "one", kind="specforge", layers=("final",), rows="0-2")
    export(out, tmp_path / "many", kind="specforge", layers=("final",))
    chunks = samples(tmp_path / "many")
    for row, one in enumerate(samples(tmp_path / "one")):
        own = [chunk["loss_mask"] for chunk in chunks if int(chunk["row"]) == row]
        joined = torch.cat([own[0], *(mask[3:] for mask in own[1:])])
        assert torch.equal(joined, one["loss_mask"])


def test_speculators_gets_the_same_masks(engine, source, tmp_path):
    import datasets

    out = chat_output(engine, source, tmp_path / "out")
    export(out, tmp_path / "one", kind="specforge", layers=("final",))
    export(out, tmp_path / "other", kind="speculators", layers=("final",))
    rows = datasets.load_from_disk(str(tmp_path / "other"))
    for sample, mask in zip(samples(tmp_path / "one"), rows["loss_mask"], strict=True):
        assert torch.equal(sample["loss_mask"], mask)


def test_a_conversation_that_is_written_differently_as_a_whole_gets_zeros_and_is_counted(source, tmp_path, capsys):
    from command_line import extract

    engine = engine_with(tmp_path, THINKING)
    out = chat_output(engine, source, tmp_path / "out")
    options = ["--to", "specforge", "--layers", "final", "-o", tmp_path / "to", "--quiet"]
    ended = extract(capsys, "export", out, *options)
    assert ended.code == 0
    assert "warning    1 rows have a mask of zeros" in ended.out
    record = json.loads((tmp_path / "to" / "export.json").read_bytes())
    assert record["loss_mask"]["unknown_rows"] == 1
    assert [bool(sample["loss_mask"].any()) for sample in samples(tmp_path / "to")] == [True, False, False, True]


def test_a_carried_column_gives_the_mask(engine, source, tmp_path):
    out = tmp_path / "out"
    rows = parquet(tmp_path / "ids.parquet", {"ids": [[5, 6, 7], [8, 9]], "mask": [[0, 1, 1], [1, 0]]})
    run(job(engine, rows, out, input="input_ids", column="ids", carry=("mask",)))
    export(out, tmp_path / "to", kind="specforge", layers=("final",), loss_mask="mask")
    assert [sample["loss_mask"].tolist() for sample in samples(tmp_path / "to")] == [[0, 1, 1], [1, 0]]
    export(out, tmp_path / "other", kind="speculators", layers=("final",), loss_mask="mask")


@pytest.mark.parametrize(
    ("cell", "problem"), [([1, 0], "has 2 values for 3 tokens"), ([1, 2, 0], "is no list of 0 and 1"), (None, "is no")]
)
def test_a_carried_column_that_does_not_fit_names_the_row(cell, problem, engine, tmp_path):
    rows = parquet(tmp_path / "ids.parquet", {"ids": [[5, 6, 7], [8, 9, 4]], "mask": [[0, 1, 1], cell]})
    run(job(engine, rows, tmp_path / "out", input="input_ids", column="ids", carry=("mask",)))
    with pytest.raises(NoLossMask, match=f"row 1: column mask {problem}"):
        export(tmp_path / "out", tmp_path / "to", kind="specforge", layers=("final",), loss_mask="mask")


def test_an_engine_that_is_gone_is_named_and_one_elsewhere_is_taken(engine, source, tmp_path):
    shutil.copytree(engine, tmp_path / "there")
    out = chat_output(tmp_path / "there", source, tmp_path / "out")
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    with pytest.raises(NoLossMask, match=r"the assistant wrote cannot be told: .*there"):
        export(out, tmp_path / "to", kind="specforge", layers=("final",))
    engine = str(tmp_path / "elsewhere")
    assert export(out, tmp_path / "to", kind="specforge", layers=("final",), engine=engine).rows == 4


def test_another_tokenizer_is_refused(source, engine, tmp_path):
    out = chat_output(engine, source, tmp_path / "out")
    other = engine_with(tmp_path, CHAT_TEMPLATE.replace("[{{", "({{"))
    with pytest.raises(NoLossMask, match="row 0 of the source has other token ids by the tokenizer of "):
        export(out, tmp_path / "to", kind="specforge", layers=("final",), engine=str(other))


def test_a_source_that_has_changed_is_refused(engine, tmp_path):
    source = parquet(tmp_path / "chats.parquet", pa.table({"messages": pa.array(CHATS, MESSAGES)}))
    out = chat_output(engine, source, tmp_path / "out")
    parquet(source, pa.table({"messages": pa.array(CHATS[::-1], MESSAGES)}))
    with pytest.raises(NoLossMask, match="the source has changed"):
        export(out, tmp_path / "to", kind="specforge", layers=("final",))
    assert export(out, tmp_path / "to", kind="specforge", layers=("final",), loss_mask="all").rows == 4


def test_ids_are_those_of_the_output(engine, source, tmp_path):
    out = chat_output(engine, source, tmp_path / "out")
    export(out, tmp_path / "to", kind="specforge", layers=("final",))
    rows = [row for row in open_output(out) if row.states is not None]
    for sample, row in zip(samples(tmp_path / "to"), rows, strict=True):
        assert np.array_equal(sample["input_ids"].numpy(), row.input_ids)
        assert np.array_equal(sample["hidden_state"][0].numpy(), row.states)
