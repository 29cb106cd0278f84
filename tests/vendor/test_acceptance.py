"""The acceptance run that a card's owner does first, done here through the stand-in: it passes, and it can fail."""

import json
from pathlib import Path

import pytest
from acceptance import run
from acceptance.make_reference import make
from vendor_rig import vendor


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("acceptance")
    make(made)
    return made


def test_every_question_is_answered_right(folder, capsys):
    with vendor():
        code = run.main(folder)
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (code, found["right"], len(found["checks"])) == (0, True, 9)
    assert all(line.startswith("ok ") for line in lines if line.startswith(("ok", "WRONG")))


def test_logits_that_move_when_our_output_is_added_are_seen(folder, capsys, monkeypatch):
    real = run._logits
    monkeypatch.setattr(run, "_logits", lambda path, *rest: real(path, *rest) + (path.name == "plain"))
    with vendor():
        assert run.main(folder) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1
    assert wrong[0].startswith("WRONG logits with our output equal")


def test_without_the_package_it_is_skipped_with_the_reason(folder, capsys):
    assert run.main(folder) == 0
    assert "skipped: tensorrt-llm: tensorrt_llm is not installed." in capsys.readouterr().out
