"""TOML tables become frozen dataclasses, or an error says which key is wrong, what it is and what it may be."""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.commits import Commit
from extract.engine.contract import Contract
from extract.engine.recipe import Recipe, load_recipe, override
from extract.errors import BadValue, ExtractError, UnknownKey, UnreadableSpec
from extract.settings import parse, read_toml
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    size: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Car:
    wheels: tuple[Wheel, ...]
    color: Literal["red", "green"] = "red"
    seats: int | None = None
    weight: float = 1.0
    tags: tuple[str, ...] = ()
    path: str | tuple[str, ...] = "road"
    sold: bool = False
    spare: Wheel = field(default_factory=lambda: Wheel(size=1))
    extras: dict[str, Any] = field(default_factory=dict)
    prices: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError("weight: more than 0")


KEYS = sorted(one.name for one in dataclasses.fields(Car))


def refused(table: Any, cls: type[Any] = Car) -> str:
    with pytest.raises(ExtractError) as caught:
        parse(cls, table, "car.toml")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_table_with_nested_tables_lists_and_all_types():
    table = {
        "wheels": [{"size": 3}, {"size": 4, "name": "rear"}],
        "color": "green",
        "seats": 5,
        "weight": 2,
        "tags": ["a", "b"],
        "path": ["x", "y"],
        "sold": True,
        "spare": {"size": 2},
        "extras": {"radio": [1, {}]},
        "prices": {"EUR": 9},
    }
    car = parse(Car, table, "car.toml")
    assert car == Car(
        wheels=(Wheel(size=3), Wheel(size=4, name="rear")),
        color="green",
        seats=5,
        weight=2.0,
        tags=("a", "b"),
        path=("x", "y"),
        sold=True,
        spare=Wheel(size=2),
        extras={"radio": [1, {}]},
        prices={"EUR": 9},
    )
    assert isinstance(car.weight, float)


def test_what_is_left_out_takes_its_default_and_null_stands_for_no_value():
    assert parse(Car, {"wheels": [], "seats": None}, "") == Car(wheels=())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"wheels": [], "colour": "red"}, "car.toml: unknown key \"colour\". Did you mean 'color'?"),
        (
            {"wheels": [], "zzz": 1},
            'car.toml: unknown key "zzz". Known keys: color, extras, path, prices, seats, sold, spare, tags, weight, '
            "wheels.",
        ),
        ({"wheels": [{"size": 1, "nam": ""}]}, "car.toml [wheels[0]]: unknown key \"nam\". Did you mean 'name'?"),
        ({"wheels": [], "spare": {"sise": 1}}, "car.toml [spare]: unknown key \"sise\". Did you mean 'size'?"),
        ({}, "car.toml: wheels is missing, expected a list of tables."),
        ({"wheels": [{}]}, "car.toml [wheels[0]]: size is missing, expected a whole number."),
        ({"wheels": {}}, "car.toml: wheels is {}, expected a list of tables."),
        ({"wheels": [3]}, "car.toml: wheels[0] is 3, expected a table."),
        ({"wheels": [], "spare": []}, "car.toml: spare is [], expected a table."),
        ({"wheels": [], "color": "blue"}, 'car.toml: color is "blue", expected one of "red", "green".'),
        ({"wheels": [], "color": ["red"]}, 'car.toml: color is [\'red\'], expected one of "red", "green".'),
        ({"wheels": [], "seats": "5"}, 'car.toml: seats is "5", expected a whole number.'),
        ({"wheels": [], "seats": 5.0}, "car.toml: seats is 5.0, expected a whole number."),
        ({"wheels": [], "seats": True}, "car.toml: seats is true, expected a whole number."),
        ({"wheels": [], "seats": 2**63}, "car.toml: seats is 9223372036854775808, expected a whole number."),
        ({"wheels": [], "weight": None}, "car.toml: weight is null, expected a number."),
        ({"wheels": [], "weight": False}, "car.toml: weight is false, expected a number."),
        ({"wheels": [], "weight": 0}, "car.toml: weight is 0.0, expected more than 0."),
        ({"wheels": [], "sold": 1}, "car.toml: sold is 1, expected true or false."),
        ({"wheels": [], "tags": "a"}, 'car.toml: tags is "a", expected a list of strings.'),
        ({"wheels": [], "tags": ["a", 1]}, "car.toml: tags is ['a', 1], expected a list of strings."),
        ({"wheels": [], "path": 3}, "car.toml: path is 3, expected a string or a list of strings."),
        ({"wheels": [], "extras": 3}, "car.toml: extras is 3, expected a table."),
        ({"wheels": [], "prices": {"EUR": "9"}}, "car.toml: prices is {'EUR': '9'}, expected a table."),
        ({"wheels": [], "x" * 200: 1}, f'car.toml: unknown key "{"x" * 77}...". Known keys: {", ".join(KEYS)}.'),
        ([], "car.toml: this table is [], expected a table of keys."),
        (None, "car.toml: this table is null, expected a table of keys."),
        ({"wheels": [], "seats": "5" * 200}, f'car.toml: seats is "{"5" * 76}..., expected a whole number.'),
    ],
)
def test_a_mistake_is_named_whole(table, message):
    assert refused(table) == message


class TestReadToml:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"a = ", "not valid TOML: Invalid value (at end of document)."),
            (b"a = 1\na = 2\n", "not valid TOML: Cannot overwrite a value (at line 2, column 6)."),
            (b"a = '\xff'", "not UTF-8 text: invalid start byte at byte 5."),
            (b"a = " + b"1" * 5000, "not valid TOML: Exceeds the limit"),
            (b"a = " + b"[" * 100_000, "not valid TOML: nested too deeply."),
        ],
    )
    def test_a_file_that_does_not_parse_is_named_with_the_place(self, content, problem, tmp_path):
        path = tmp_path / "job.toml"
        path.write_bytes(content)
        with pytest.raises(UnreadableSpec) as caught:
            read_toml(path)
        assert str(caught.value).startswith(f"{path}: {problem}")

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(UnreadableSpec) as caught:
            read_toml(tmp_path / "job.toml")
        assert str(caught.value) == f"{tmp_path}/job.toml: no such file."

    def test_a_directory(self, tmp_path):
        with pytest.raises(UnreadableSpec) as caught:
            read_toml(tmp_path)
        assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory."


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tables_of(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables that use the keys of `cls`, at every depth, with values that seldom fit them."""
    choices = {}
    for name, hint in typing.get_type_hints(cls).items():
        options = [hint, *typing.get_args(hint)]
        nested = [tables_of(option) for option in options if dataclasses.is_dataclass(option)]
        literals = [st.sampled_from(typing.get_args(o)) for o in options if typing.get_origin(o) is Literal]
        tables = [st.lists(one, max_size=2) | one for one in nested]
        choices[name] = st.one_of(JSON_VALUES, *tables, *literals)
    return st.fixed_dictionaries({}, optional=choices)


@pytest.mark.parametrize("cls", [JobSpec, Recipe, Commit, Contract, Car], ids=lambda cls: cls.__name__)
def test_no_value_crashes_the_parser(cls):
    @settings(deadline=None)
    @given(tables_of(cls) | JSON_VALUES)
    def check(table: Any) -> None:
        try:
            found = parse(cls, table, "x.toml")
        except ExtractError as error:
            assert error.exit_code == 2
            assert len(str(error)) < 700
        else:
            assert isinstance(found, cls)

    check()


@settings(deadline=None)
@given(st.text())
def test_no_text_crashes_the_reader(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        parse(JobSpec, read_toml(path), "any.toml")
    except ExtractError as error:
        assert error.exit_code == 2


class TestRecipe:
    def test_a_recipe_is_a_toml_file(self, tmp_path):
        path = tmp_path / "r.toml"
        path.write_text('dtype = "float32"\nmax_input_tokens = 64\narchitectures = ["LlamaForCausalLM"]\n')
        assert load_recipe(path) == Recipe(dtype="float32", max_input_tokens=64, architectures=("LlamaForCausalLM",))

    def test_an_unknown_key_of_a_recipe_is_refused(self, tmp_path):
        (tmp_path / "r.toml").write_text("max_token = 5\n")
        with pytest.raises(UnknownKey) as caught:
            load_recipe(tmp_path / "r.toml")
        assert str(caught.value) == f"{tmp_path}/r.toml: unknown key \"max_token\". Did you mean 'max_tokens'?"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_input_tokens": 0}, "options: max_input_tokens is 0, expected a whole number, 1 or more."),
            ({"max_sequences": 8193}, "options: max_sequences is 8193, expected 1 to 8192."),
            ({"max_tokens": 1_048_577}, "options: max_tokens is 1048577, expected 1 to 1048576."),
            (
                {"dtype": "int4"},
                'options: dtype is "int4", expected one of "auto", "float32", "bfloat16", "float16", "int8", "fp8".',
            ),
        ],
    )
    def test_an_option_outside_its_range_is_refused(self, options, message):
        with pytest.raises(BadValue) as caught:
            override(Recipe(), **options)
        assert str(caught.value) == message

    def test_options_that_are_not_given_leave_the_recipe(self):
        recipe = Recipe(dtype="float32", max_tokens=99)
        assert override(recipe, dtype=None, layout="dense") == dataclasses.replace(recipe, layout="dense")


def test_parsing_what_json_made_of_it_gives_the_same():
    car = Car(wheels=(Wheel(size=3),), tags=("a",), prices={"EUR": 1})
    assert parse(Car, json.loads(json.dumps(dataclasses.asdict(car))), "") == car


@pytest.mark.parametrize(
    "cls", [JobSpec, SourceSpec, TextSpec, StatesSpec, RunSpec, Recipe], ids=lambda cls: cls.__name__
)
def test_settings_are_frozen_have_slots_and_take_keywords_only(cls):
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)
    assert all(one.kw_only for one in dataclasses.fields(cls))


def test_the_path_in_a_message_is_the_one_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableSpec) as caught:
        read_toml(Path("a/job.toml"))
    assert str(caught.value) == "a/job.toml: no such file."
