"""A conversation has the special tokens of its template and no others, whatever the tokenizer adds to a text."""

import json
import shutil

import number_rig
import pyarrow as pa
import pytest
import rig
from job_rig import job, output_table, parquet, run
from text_rig import ONE_A_KIND, exported
from tokenizer_engines import CHAT_TEMPLATE, ids_of

from extract.engine.contract import EngineChanged
from extract.errors import ResumeRefused

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<s>naïve</s>\n中文 "}],
    [{"role": "assistant", "content": ""}, {"role": "user", "content": "x" * 300}],
]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_ids_are_those_of_apply_chat_template_and_begin_with_one_bos(name, prompt):
    from extract.spec import TextSpec

    engine = exported(name, chat_template=CHAT_TEMPLATE)
    column = pa.array([json.dumps(chat) for chat in CHATS])
    rows = engine.open(TextSpec(add_generation_prompt=prompt), limit=600, kind="messages").tokenize(column, 0)
    expected = [
        engine.original.apply_chat_template(chat, tokenize=True, add_generation_prompt=prompt)["input_ids"]
        for chat in CHATS
    ]
    assert ids_of(rows) == expected
    assert all(ids[0] == 1 and ids[1] != 1 for ids in expected)
    assert rows.doubled_bos == 0


def test_conversations_stored_as_json_text_or_as_maps_give_the_rows_of_lists_of_structs(tmp_path):
    tokenizer = rig.tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    checkpoint = rig.tiny_checkpoint(tmp_path / "checkpoint", "llama", tokenizer=tokenizer)
    engine = number_rig.build_engine(checkpoint, tmp_path / "engine")
    text = [json.dumps(chat) for chat in CHATS]
    maps = [[list(message.items()) for message in chat] for chat in CHATS]
    stored = {
        "structs": pa.array(CHATS),
        "json": pa.array(text),
        "bytes": pa.array([one.encode() for one in text]),
        "maps": pa.array(maps, pa.list_(pa.map_(pa.string(), pa.string()))),
    }
    tables = {}
    for label, column in stored.items():
        source = parquet(tmp_path / f"{label}.parquet", {"chat": column})
        run(job(engine, source, tmp_path / label, column="chat", input="messages"))
        tables[label] = output_table(tmp_path / label)
        assert tables[label]["outcome"].to_pylist() == ["ok", "ok", "truncated"]
    assert all(table.equals(tables["structs"]) for table in tables.values())


def test_another_template_is_never_mixed_with_rows_of_the_first(tmp_path):
    """Whether a checkpoint got another template and was built again, or the engine's own file was edited."""
    source = parquet(tmp_path / "in.parquet", {"chat": pa.array(CHATS)})
    options = {"column": "chat", "input": "messages", "rows_per_shard": 1}
    engines = {}
    for label, template in {"first": CHAT_TEMPLATE, "second": CHAT_TEMPLATE.replace("[{{", "({{")}.items():
        tokenizer = rig.tiny_tokenizer(chat_template=template)
        checkpoint = rig.tiny_checkpoint(tmp_path / label, "llama", tokenizer=tokenizer)
        engines[label] = number_rig.build_engine(checkpoint, tmp_path / f"{label}-engine")
    run(job(engines["first"], source, tmp_path / "out", **options))
    before = output_table(tmp_path / "out")
    with pytest.raises(ResumeRefused, match="tokenizer"):
        run(job(engines["second"], source, tmp_path / "out", **options))
    shutil.copy(engines["second"] / "chat_template.jinja", engines["first"] / "chat_template.jinja")
    from extract.runners import local

    with pytest.raises(EngineChanged, match=r"chat_template\.jinja"):
        local.run(job(engines["first"], source, tmp_path / "fresh", **options))
    assert not list((tmp_path / "fresh" / "commits").iterdir())
    assert output_table(tmp_path / "out").equals(before)
