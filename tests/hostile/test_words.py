"""Every error class has its complete message in `messages.toml`, and comes as one message and never as a traceback."""

import importlib
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import word_cases
from command_line import extract as run_command
from command_line import spawn

import extract
from extract.errors import ExtractError

MESSAGES = tomllib.loads((Path(__file__).parent / "messages.toml").read_text(encoding="utf-8"))
HOW_TO_ADD = (
    "Give each a case in tests/hostile/word_cases.py (COMMANDS if a command can provoke it here, else FACTS with "
    "values as they occur) and its complete message in tests/hostile/messages.toml."
)


def name_of(cls: type) -> str:
    return f"{cls.__module__.removeprefix('extract.')}.{cls.__name__}"


def below(cls: type[ExtractError]) -> Iterator[type[ExtractError]]:
    for one in cls.__subclasses__():
        yield one
        yield from below(one)


@pytest.fixture(scope="module")
def classes() -> dict[str, type[ExtractError]]:
    """Every error class with words of its own, of all modules that can be imported here."""
    for module in pkgutil.walk_packages(extract.__path__, "extract."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue
    return {name_of(cls): cls for cls in below(ExtractError) if cls.template != ExtractError.template}


def test_every_error_class_has_a_case_and_a_complete_message(classes):
    cases = {*word_cases.COMMANDS, *word_cases.FACTS}
    without = sorted(name for name in classes if name not in cases or name not in MESSAGES)
    assert not without, f"error classes without their words: {', '.join(without)}. {HOW_TO_ADD}"
    gone = sorted((cases | {*MESSAGES}) - {*classes})
    assert not gone, (
        f"no such error classes any more: {', '.join(gone)}. Take them out of word_cases.py, messages.toml."
    )
    assert not {*word_cases.COMMANDS} & {*word_cases.FACTS}


@pytest.mark.parametrize("name", word_cases.FACTS)
def test_the_message_reads_as_it_is_written_down(name, classes):
    if name not in classes:
        pytest.skip("not a class of the modules that can be imported here")
    assert str(classes[name](**word_cases.FACTS[name])) == MESSAGES.get(name, f"missing. {HOW_TO_ADD}")


@pytest.fixture(scope="module")
def place(engines, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("words")
    word_cases.plant(directory, engines.engine("llama"), engines.checkpoint("llama"))
    return directory


@pytest.mark.parametrize("name", word_cases.COMMANDS)
def test_the_command_ends_with_the_message_and_the_code_of_its_class(name, classes, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    ended = run_command(capsys, *word_cases.COMMANDS[name].split())
    assert (ended.code, ended.out) == (classes[name].exit_code, "")
    message = ended.err[ended.err.index("extract: ") :]
    assert message == f"extract: {MESSAGES.get(name, f'missing. {HOW_TO_ADD}')}\n"
    assert not (place / "out").exists()


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_a_process_of_its_own_prints_one_message_for_a_fault_of_the_user_or_the_data(code, classes, place, monkeypatch):
    name = next(name for name in word_cases.COMMANDS if classes[name].exit_code == code)
    monkeypatch.chdir(place)
    ended = spawn(
        *word_cases.COMMANDS[name].split(), environment={"PYTHONPATH": str(Path(extract.__file__).parents[1])}
    )
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.splitlines()[-1] == f"extract: {MESSAGES[name]}"
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_short_and_whole(name):
    message = MESSAGES[name]
    assert len(message) < 600
    assert not re.search(r"[{}]|\bNone\b|  \.|\.\.$", message), "a field was left empty or unfilled"
