"""The layout stays true: imports go one way, heavy packages stay where they belong, error messages are whole.

Everything here is read from the source; nothing is imported except the exception classes.
"""

import ast
import importlib
import inspect
import re
import string
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import extract
from extract.errors import ExtractError

PACKAGE = Path(extract.__file__).parent

LAYERS = """
errors
canonical, problems, progress, records, settings
storage
store
storage.local_copies
assets, cpu.linear_names, packing, sample, selection, spec, whole_directory
claims, commits, patching, report, shards, sources
shard_owner
engine.contract, engine.recipe, engine.torch_memory, engine.torch_packed_pass, engine.torch_pooling
cpu, tensorrt
cuda
text, tuning.recipe_file
engine
job
record_sums
manifest, planning, shards.shard_file
training_views
completion, doctor, estimate, output, shard_windows, status, streaming_input
inspection, jobs, pipeline, recomputation, streaming
publishing, verification
derivation, fidelity_check, quantizing, report_page, runners, tuning
embedding, exporting, reprocessing
cli
__main__
"""
"""From the ground up. A module imports from lines above its own, and from its own package.

A package stands for all of its modules but those that a line of their own names.
"""

HEAVY = {
    "torch": r"engine\.torch_\w+|engine\.(decoder|device|gguf_import|plain|proven)|cpu\.portable\w*"
    r"|shards\.tensors|training_views\.torch_\w+|exporting\.\w+"
    r"|tensorrt\.(card|cuda_card|engine_inputs|executor_runtime|session_runtime)"
    r"|cuda\.\w+|tuning\.card_memory",
    "numba": r"cpu\.portable\w*",
    "llvmlite": r"cpu\.portable\w*",
    "matplotlib": r"tuning\.plot",
    "transformers": r"engine\.(torch_\w+|checkpoint_tokenizer|decoder|gguf_import|model_config|quiet_transformers)"
    r"|text\.(encoders|tokenizer_export)",
    "datasets": r"sources\.hf|exporting\.\w+",
    "gguf": r"engine\.gguf_\w+",
    "click": r"cli(\.\w+)?",
    "obstore": r"storage\.\w+",
    "tqdm": r"progress",
    "jinja2": r"text\.chat|report_page\.page",
    "plotly": r"report_page\.page",
    "tokenizers": r"text\.\w+",
    "safetensors": r"(engine|exporting)\.\w+",
    "zstandard": r"sources\.\w+|engine\.comparison",
    "huggingface_hub": r"engine\.(hub_cache|decoder|model_config)",
}
"""Which modules may import a package at all."""

AT_MODULE_LEVEL = {
    "torch": r"engine\.torch_\w+|training_views\.torch_\w+|cpu\.portable\w*"
    r"|cuda\.\w+|tensorrt\.(cuda_card|executor_runtime|session_runtime)",
    "numba": r"cpu\.portable\w*",
    "llvmlite": r"cpu\.portable\w*",
    "matplotlib": r"(?!)",
    "transformers": r"engine\.torch_\w+",
    "datasets": r"(?!)",
    "gguf": r"(?!)",
    "obstore": r"(?!)",
    "tqdm": r"(?!)",
    "jinja2": r"(?!)",
    "plotly": r"(?!)",
}
"""Which may do so at module level; the others inside the function that needs it."""

OPTIONAL = {
    "ray": r"runners\.ray_cluster",
    "tensorrt_llm": r"tensorrt\.\w+",
    "tensorrt": r"tensorrt\.\w+",
    "lance": r"exporting\.lance",
    "umap": r"report_page\.projection",
}
"""Which modules may import a package that need not be installed, always inside a function."""

LIGHT_PACKAGES = {"numpy", "pyarrow"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name without `extract.`; the package itself is ``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that a module imports; type checkers' imports are not counted."""
    todo: list[ast.AST] = list(modules()[name].body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("extract.") in modules() else str(node.module)
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo.extend(ast.iter_child_nodes(node))


def own_imports(name: str, *, lazy: bool = True) -> set[str]:
    """Modules of this package that a module imports."""
    found = {full.partition(".")[2] for full in imports(name, lazy=lazy) if full.partition(".")[0] == "extract"}
    return found & set(modules())


def packages(name: str, *, lazy: bool = True) -> set[str]:
    """Top-level packages, other than this one and the standard library's, that a module imports."""
    found = {full.partition(".")[0] for full in imports(name, lazy=lazy)}
    return found - {"extract"} - set(sys.stdlib_module_names)


LINES = [[entry.strip() for entry in line.split(",")] for line in LAYERS.split("\n") if line.strip()]
PLACES = {entry: number for number, line in enumerate(LINES) for entry in line}


def entry_of(name: str) -> str:
    """The entry of LAYERS that a module falls under: its own, or else its package's."""
    while name not in PLACES:
        assert "." in name, f"{name}: LAYERS does not say where it belongs"
        name = name.rpartition(".")[0]
    return name


class TestDirections:
    def test_every_line_of_the_layers_is_a_module_or_package(self):
        assert set(PLACES) <= set(modules())

    @pytest.mark.parametrize("name", [name for name in modules() if name])
    def test_imports_go_up_the_layers_only(self, name):
        place = PLACES[entry_of(name)]
        for other in own_imports(name) - {""}:
            same_package = other.partition(".")[0] == name.partition(".")[0]
            assert same_package or PLACES[entry_of(other)] < place, f"{name} imports {other}"

    @pytest.mark.parametrize(
        ("who", "never"),
        [
            (r"records|errors|canonical|settings", r"(?!errors$).*"),
            (r"spec", r"(?!(errors|settings)$).*"),
            (r"sources(\..*)?", r"engine.*|text.*|shards.*|job.*|pipeline|runners.*|cli.*"),
            (r"text(\..*)?", r"sources.*|shards.*|job.*|pipeline|runners.*|cli.*"),
            (
                r"shards\.(?!shard_file).*",
                r"shards\.shard_file|sources.*|engine.*|text.*|job.*|pipeline|runners.*|cli.*",
            ),
            (r"engine(\..*)?", r"sources.*|job.*|planning|pipeline|publishing|output|runners.*|cli.*|report"),
            (r"engine\.(contract|recipe)", r"engine\.(builder|decoder|torch_.*)|text.*"),
            (r"pipeline|packing|shard_windows", r"engine\.(?!contract).*|runners.*|cli.*"),
            (r"(?!cli|__main__).*", r"cli.*|report"),
        ],
    )
    def test_what_a_part_must_not_know(self, who, never):
        for name in filter(re.compile(rf"(?:{who})\Z").match, filter(None, modules())):
            for other in own_imports(name) - {""}:
                assert not re.fullmatch(never, other), f"{name} imports {other}"

    def test_no_module_level_import_goes_in_a_circle(self):
        graph = {name: own_imports(name, lazy=False) for name in modules()}
        while leaves := [name for name, others in graph.items() if not others & set(graph)]:
            for name in leaves:
                del graph[name]
        assert graph == {}


class TestHeavyPackages:
    @pytest.mark.parametrize("package", HEAVY)
    def test_only_these_modules_import_it(self, package):
        users = {name for name in modules() if package in packages(name)}
        assert users, f"nothing imports {package}"
        assert {name for name in users if not re.fullmatch(HEAVY[package], name)} == set()

    @pytest.mark.parametrize("package", OPTIONAL)
    def test_what_need_not_be_installed_is_imported_where_it_is_used(self, package):
        users = {name for name in modules() if package in packages(name)}
        assert users, f"nothing imports {package}"
        assert {name for name in users if not re.fullmatch(OPTIONAL[package], name)} == set()
        assert {name for name in users if package in packages(name, lazy=False)} == set()

    @pytest.mark.parametrize("package", AT_MODULE_LEVEL)
    def test_it_is_imported_inside_the_function_that_needs_it(self, package):
        users = {name for name in modules() if package in packages(name, lazy=False)}
        assert {name for name in users if not re.fullmatch(AT_MODULE_LEVEL[package], name)} == set()

    def test_nothing_else_is_imported(self):
        assert {package for name in modules() for package in packages(name)} == {*HEAVY, *OPTIONAL, *LIGHT_PACKAGES}

    def test_every_import_is_a_declared_dependency_and_the_other_way_round(self):
        import tomllib

        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        declared = {re.split(r"[<>=~]", line)[0].replace("-", "_") for line in project["dependencies"]}
        assert declared == {*HEAVY, *LIGHT_PACKAGES}


class TestModules:
    @pytest.mark.parametrize("name", modules())
    def test_a_module_opens_with_a_docstring(self, name):
        text = ast.get_docstring(modules()[name])
        assert text, name
        assert text.split("\n\n")[0].rstrip()[-1] in ".?`", name

    @pytest.mark.parametrize("name", [name for name in modules() if name and not name.endswith("__main__")])
    def test_no_module_is_named_like_the_standard_library_or_for_nothing(self, name):
        for part in name.split("."):
            assert part not in sys.stdlib_module_names
            assert not re.search(r"(^|_)(utils?|helpers?|common|managers?|misc|tools?|core)(_|$)", part)

    @pytest.mark.parametrize("name", modules())
    def test_nothing_is_printed_and_no_exception_is_swallowed_whole(self, name):
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{name}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(inner, (ast.Pass, ast.Continue)) for inner in node.body)
                assert not (broad and silent), f"{name}:{node.lineno}"

    @pytest.mark.parametrize("name", modules())
    def test_nothing_is_read_from_the_environment_when_a_module_is_imported(self, name):
        inside = {
            id(inner)
            for node in ast.walk(modules()[name])
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for inner in ast.walk(node)
        }
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.Attribute) and id(node) not in inside:
                assert node.attr not in ("environ", "getenv"), f"{name}:{node.lineno}"


CODES = {1, 2, 3, 4, 5, 6, 7, 8, 130}


def error_classes() -> list[type[ExtractError]]:
    """Every exception of the package."""
    for name in modules():
        if not name.endswith("__main__"):
            importlib.import_module(f"extract.{name}".rstrip("."))
    found, todo = [], [ExtractError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo += [sub for sub in cls.__subclasses__() if sub.__module__.startswith("extract.")]
    return sorted(set(found), key=lambda cls: (cls.__module__, cls.__name__))


def fields(template: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}


@pytest.fixture(scope="module")
def classes() -> dict[str, type[ExtractError]]:
    return {cls.__name__: cls for cls in error_classes()}


class TestErrors:
    def test_every_exception_has_a_name_of_its_own(self):
        names = [cls.__name__ for cls in error_classes()]
        assert len(names) > 100
        assert sorted(names) == sorted(set(names))

    def test_every_exception_has_a_documented_exit_code(self, classes):
        for cls in classes.values():
            assert cls.exit_code in CODES, cls
            bases = [
                base for base in cls.__mro__[1:] if base.__module__ == "extract.errors" and base is not ExtractError
            ]
            assert all(base.exit_code == cls.exit_code for base in bases), cls

    def test_every_exception_says_in_one_sentence_what_it_is(self, classes):
        for cls in classes.values():
            text = cls.__doc__
            assert text and inspect.getdoc(cls).split("\n\n")[0].endswith("."), cls

    def test_every_message_has_named_fields_and_ends_in_a_sentence_or_in_what_to_type(self, classes):
        for cls in classes.values():
            if cls.__module__ == "extract.errors" and "template" not in vars(cls):
                continue
            assert "" not in fields(cls.template), cls
            ending = r"[.]|\{\w+\}|extract \w+( [^.]*)?|--[\w-]+( [A-Z{][\w}]*)?"
            assert re.search(rf"({ending})$", cls.template), (cls, cls.template)

    def test_every_exception_is_raised_with_exactly_the_fields_of_its_template(self, classes):
        raised = set()
        for name, tree in modules().items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in classes:
                    given = {keyword.arg for keyword in node.keywords}
                    assert not node.args, f"{name}:{node.lineno}"
                    assert given == fields(classes[called].template), f"{name}:{node.lineno} {called}"
                    raised.add(called)
        unused = {cls for cls, found in classes.items() if cls not in raised and not found.__subclasses__()}
        assert unused == set()

    @pytest.mark.parametrize("name", modules())
    def test_no_exception_without_a_kind_is_raised(self, name):
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                assert ast.unparse(raised) not in ("Exception", "BaseException", "RuntimeError"), (
                    f"{name}:{node.lineno}"
                )
