"""Passages are docstrings of the standard library: the same for the same Python, parsed and never imported."""

import re
import sys
import sysconfig
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from extract.sample import NoPassages, Passage, SampleExists, passages, spread, write_sample


def standard_library_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sysconfig.get_paths
    monkeypatch.setattr(sysconfig, "get_paths", lambda *given: {**real(*given), "stdlib": str(root)})


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files."""
    root = tmp_path / "lib"
    files = {
        "a.py": '"""Module a."""\nclass C:\n    """Class C."""\n    def f(self):\n        """Method f."""\n\nx = 1\n',
        "b/__init__.py": 'async def h():\n    """Function h."""\n    def inner():\n        """Inner."""\n',
        "broken.py": "def (:\n",
        "strange.py": "x = 1\0",
        "runs.py": '"""Runs."""\nraise SystemExit\n',
        "test/test_a.py": '"""A test."""\n',
        "site-packages/p.py": '"""Installed."""\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    standard_library_at(root, monkeypatch)
    return root


def test_passages_are_the_docstrings_of_all_modules_but_tests_and_installed_ones(library):
    assert list(passages()) == [
        Passage("a", "a", "Module a."),
        Passage("a.C", "a", "Class C."),
        Passage("a.C.f", "a", "Method f."),
        Passage("b.__init__.h", "b.__init__", "Function h."),
        Passage("b.__init__.h.inner", "b.__init__", "Inner."),
        Passage("runs", "runs", "Runs."),
    ]


@pytest.mark.parametrize(
    ("count", "ids"),
    [(1, ["a"]), (2, ["a", "b.__init__.h"]), (3, ["a", "a.C.f", "b.__init__.h.inner"]), (9, None)],
)
def test_a_few_of_them_lie_at_even_distances(library, count, ids):
    assert [passage.id for passage in spread(count)] == (ids or [passage.id for passage in passages()])


def test_a_sample_is_a_parquet_file_with_three_columns(library, tmp_path):
    path = tmp_path / "deep" / "rows.parquet"
    assert write_sample(path, 4) == 4
    table = pq.read_table(path)
    assert table.column_names == ["id", "module", "text"]
    assert table.num_rows == 4
    assert table.slice(0, 1).to_pylist() == [{"id": "a", "module": "a", "text": "Module a."}]


def test_the_same_python_gives_the_same_file(library, tmp_path):
    write_sample(tmp_path / "a.parquet", 5)
    write_sample(tmp_path / "b.parquet", 5)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_an_existing_file_is_not_overwritten(library, tmp_path):
    path = tmp_path / "thesis.parquet"
    path.write_text("two years of work")
    with pytest.raises(SampleExists) as caught:
        write_sample(path, 5)
    assert str(caught.value) == f"{path}: exists already. Choose another file with -o, or remove this one first."
    assert path.read_text() == "two years of work"


def test_a_python_without_its_sources_is_told(tmp_path, monkeypatch):
    standard_library_at(tmp_path, monkeypatch)
    with pytest.raises(NoPassages) as caught:
        spread(3)
    assert str(caught.value) == (
        f"{tmp_path}: no Python sources found, so there are no docstrings to sample. Use a dataset of your own."
    )


def test_this_pythons_own_library_gives_thousands_of_real_passages():
    before = set(sys.modules)
    found = list(passages())
    assert {name for name in set(sys.modules) - before if not name.startswith("encodings.")} == set()
    assert len(found) > 3000
    assert len({passage.id for passage in found}) > 0.9 * len(found)
    assert sum(len(re.findall(r"\w+", passage.text)) >= 40 for passage in found) > 500
