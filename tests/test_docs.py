"""What the pages say exists: links and headings, commands with their options, settings, names of the library."""

import ast
import doctest
import importlib
import re
import tomllib
import xml.etree.ElementTree

import click
import page_rig
import pytest
from page_rig import PAGES, ROOT

from extract.cli import COMMANDS, cli
from extract.engine.recipe import Recipe
from extract.settings import parse
from extract.spec import JobSpec

every_page = pytest.mark.parametrize("page", PAGES)


@every_page
def test_links_lead_to_files_and_headings_that_are_there(page: str):
    for target in page_rig.links(page_rig.read(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in page_rig.headings(file.read_text(encoding="utf-8")), target


def test_every_page_is_reached_from_the_map_of_the_documentation():
    linked = {target.partition("#")[0] for target in page_rig.links(page_rig.read("docs/README.md"))}
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert pages - {"README.md"} <= linked


@every_page
def test_commands_are_accepted_with_their_options(page: str):
    for block in page_rig.blocks(page_rig.read(page)):
        for words in page_rig.commands(block):
            if words[0] == "extract":
                accepts([re.sub(r"\$\(?\{?\w+\}?\)?", "1", word) for word in words[1:]])


@every_page
def test_commands_in_prose_are_commands_and_their_options_are_there(page: str):
    for words in page_rig.inline_commands(page_rig.read(page)):
        name = words[1]
        if name.startswith("-") or name == "...":
            continue
        assert name in COMMANDS, words
        command = cli.get_command(click.Context(cli), name)
        flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
        assert {word.split("=")[0] for word in words[2:] if word.startswith("-")} <= flags, words


@every_page
def test_programs_compile_and_their_imports_of_extract_exist(page: str):
    for block in page_rig.blocks(page_rig.read(page)):
        if block.language != "python":
            continue
        examples = doctest.DocTestParser().get_examples(block.text)
        for node in ast.walk(ast.parse("".join(one.source for one in examples) or block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "extract":
                for alias in node.names:
                    assert hasattr(importlib.import_module(node.module), alias.name), block.text
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "extract":
                assert hasattr(importlib.import_module("extract"), node.attr), block.text


@every_page
def test_settings_are_a_job_or_a_recipe(page: str):
    for block in page_rig.blocks(page_rig.read(page)):
        if block.language == "toml":
            table = tomllib.loads(block.text)
            if table.keys() & {"source", "text", "states", "run", "output"}:
                assert isinstance(parse(JobSpec, table, page), JobSpec)
            else:
                assert isinstance(parse(Recipe, table, page), Recipe)


def test_the_readme_stays_short():
    assert len(page_rig.read("README.md").splitlines()) <= 160, "long sections have pages of their own in docs/"


def test_pictures_are_small_and_the_drawing_parses():
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 300_000, picture.name
        if picture.suffix == ".svg":
            root = xml.etree.ElementTree.parse(picture).getroot()
            assert root.tag.endswith("svg")
            assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


def accepts(words: list[str]) -> None:
    """Parse a command line as the program would, and run nothing."""
    name, *rest = words
    assert name in COMMANDS, words
    whole = click.Context(cli, **cli.context_settings)  # a command keeps the names of --help that it is first asked by
    cli.get_command(whole, name).make_context(name, rest, parent=whole)
