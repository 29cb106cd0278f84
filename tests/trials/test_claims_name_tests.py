"""tests/README.md says which test proves which claim; each test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
NAMED = re.findall(r"`([\w/]+\.py)::(?:\w+::)?(\w+)`", (TESTS / "README.md").read_text(encoding="utf-8"))


def test_claims_name_tests():
    assert len(NAMED) > 60


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_is_in_its_file(file):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for other, name in NAMED if other == file} <= there
