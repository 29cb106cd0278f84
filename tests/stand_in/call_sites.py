"""Uses of the vendor's packages in our code, read from its source: imports, calls with arguments, attributes.

Follows a name from its import through plain assignments, annotations and what is known of return values; what it cannot
follow it does not see, so settings given by name in a loop are for the version gate's own list to say.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent.parent / "extract"
READ = ("tensorrt/**/*.py", "engine/tensorrt_*.py")
BUILDER, PLUGIN, MODELS = "tensorrt_llm.builder", "tensorrt_llm.plugin.plugin", "tensorrt_llm.models.modeling_utils"
EXECUTOR, SESSION = "tensorrt_llm.bindings.executor", "tensorrt_llm.runtime.session"
FUNCTIONAL = "tensorrt_llm.functional"

MADE_BY = {
    (BUILDER, "build"): (BUILDER, "Engine"),
    ("tensorrt_llm.models.automodel", "AutoModelForCausalLM"): (MODELS, "DecoderModelForCausalLM"),
}
"""What a function, or a class's constructors, return, where it is not an object of that class."""

ATTRIBUTE_IS = {
    (BUILDER, "BuildConfig", "plugin_config"): (PLUGIN, "PluginConfig"),
    (MODELS, "PretrainedConfig", "quantization"): (MODELS, "QuantConfig"),
    (MODELS, "PretrainedConfig", "mapping"): ("tensorrt_llm.mapping", "Mapping"),
}

ALWAYS_MEANS = {
    "mark_output": (FUNCTIONAL, "Tensor"),
    "infer_shapes": (SESSION, "Session"),
    "enqueue_requests": (EXECUTOR, "Executor"),
    "await_responses": (EXECUTOR, "Executor"),
    "from_checkpoint": (MODELS, "DecoderModelForCausalLM"),
}
"""Methods that are the vendor's whatever the object is called."""

Name = tuple[str, str]


@dataclass(frozen=True)
class Use:
    """One use.

    Attributes:
        where: file and line.
        name: module and name.
        attribute: of that name or of an object of that class.
        arguments: of a call: the number of positional ones and the names of the others.
        parameters: names that a call may give, without being one.
        problem: why it cannot be judged.
    """

    where: str
    name: Name
    attribute: str | None = None
    arguments: tuple[int, tuple[str, ...]] | None = None
    parameters: tuple[str, ...] | None = None
    problem: str | None = None

    def __str__(self) -> str:
        said = ".".join([*self.name, *([self.attribute] if self.attribute else [])])
        if self.arguments is None:
            return said
        return f"{said}({', '.join([*'_' * self.arguments[0], *(f'{name}=' for name in self.arguments[1])])})"


@dataclass(frozen=True)
class Known:
    """What a variable holds: an imported name itself, or an object of that class."""

    name: Name
    is_object: bool


MODEL_MAP = Known(("tensorrt_llm.models", "MODEL_MAP"), False)


class Reader(ast.NodeVisitor):
    """Finds the uses in one module; follows variables through plain assignments and annotations."""

    def __init__(self, path: str) -> None:
        self.path, self.uses = path, list[Use]()
        self.scopes: list[dict[str, Known]] = [{}]
        self.tables: dict[str, list[Any]] = {}
        self.passed_on: list[set[str]] = [set()]

    def visit_Module(self, node: ast.Module) -> None:
        for function in filter(lambda part: isinstance(part, ast.FunctionDef), node.body):
            self.tables[function.name] = [part.value for part in ast.walk(function) if isinstance(part, ast.Return)]
        self.generic_visit(node)

    def use(self, node: ast.AST, name: Name, **more: Any) -> None:
        self.uses.append(Use(f"{self.path}:{getattr(node, 'lineno', 0)}", name, **more))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in ("tensorrt", "tensorrt_llm"):
                self.scopes[-1][alias.asname or alias.name.partition(".")[0]] = Known((alias.name, ""), False)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] in ("tensorrt", "tensorrt_llm"):
            for alias in node.names:
                name = (str(node.module), alias.name)
                self.use(node, name)
                self.scopes[-1][alias.asname or alias.name] = Known(name, False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scopes.append({})
        self.passed_on.append({rest.arg for rest in (node.args.vararg, node.args.kwarg) if rest is not None})
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            self.annotate(argument.arg, argument.annotation)
        self.generic_visit(node)
        self.scopes.pop()
        self.passed_on.pop()

    def annotate(self, variable: str, annotation: ast.expr | None) -> None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        known = self.known(annotation)
        if known is not None and not known.is_object:
            self.scopes[-1][variable] = Known(known.name, True)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.assign(target.id, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.assign(node.target.id, node.value)
            self.annotate(node.target.id, node.annotation)

    def assign(self, variable: str, value: ast.expr | None) -> None:
        known = self.known(value)
        self.scopes[-1].pop(variable, None)
        if known is not None:
            self.scopes[-1][variable] = known

    def visit_Call(self, node: ast.Call) -> None:
        callee, attribute = node.func, None
        known = self.known(callee)
        if known is None and isinstance(callee, ast.Attribute):
            attribute, known = callee.attr, self.known(callee.value)
            if known is None and attribute in ALWAYS_MEANS:
                known = Known(ALWAYS_MEANS[attribute], True)
        if known is not None and known.name[1] and not (known.is_object and attribute is None):
            rest = [part.value for part in node.args if isinstance(part, ast.Starred)]
            rest += [keyword.value for keyword in node.keywords if keyword.arg is None]
            names = [name for keyword in node.keywords for name in self.keywords(keyword)]
            if rest and all(isinstance(part, ast.Name) and part.id in self.passed_on[-1] for part in rest):
                self.use(node, known.name, attribute=attribute)  # what our function was given by the vendor
            elif any(isinstance(part, ast.Starred) for part in node.args) or None in names:
                self.use(node, known.name, attribute=attribute, problem="the arguments are not all written out")
            else:
                self.use(node, known.name, attribute=attribute, arguments=(len(node.args), tuple(map(str, names))))
        self.generic_visit(node)

    def keywords(self, keyword: ast.keyword) -> list[str | None]:
        """Names that a keyword stands for; a `**` of a function here that returns written-out tables can be read."""
        if keyword.arg is not None:
            return [keyword.arg]
        called = keyword.value.func if isinstance(keyword.value, ast.Call) else None
        tables = self.tables.get(called.id, []) if isinstance(called, ast.Name) else [keyword.value]
        if not tables or not all(isinstance(table, ast.Dict) for table in tables):
            return [None]
        keys = [key for table in tables for key in table.keys]
        return [key.value if isinstance(key, ast.Constant) else None for key in keys]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        known = self.known(node.value)
        if known is not None and (node.attr == "__version__" or not node.attr.startswith("__")):
            if known.name == ("tensorrt_llm", "") and node.attr == "__version__":
                return
            self.use(
                node, known.name if known.name[1] else (known.name[0], node.attr), attribute=self.below(known, node)
            )
        self.generic_visit(node)

    @staticmethod
    def below(known: Known, node: ast.Attribute) -> str | None:
        return node.attr if known.name[1] else None

    def known(self, node: ast.expr | None) -> Known | None:
        """What an expression is, if it comes from the vendor."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        got = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
        if (isinstance(got, ast.Subscript) or got is not node) and self.known(got.value) == MODEL_MAP:
            return Known((MODELS, "DecoderModelForCausalLM"), False)  # MODEL_MAP[...] or MODEL_MAP.get(...)
        if isinstance(node, ast.Attribute):
            owner = self.known(node.value)
            made = ATTRIBUTE_IS.get((*owner.name, node.attr)) if owner is not None and owner.is_object else None
            return None if made is None else Known(made, True)
        if isinstance(node, ast.Call):
            callee = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            owner = self.known(callee)
            if (
                owner is not None
                and not owner.is_object
                and owner.name[1][:1].isupper()
                and owner.name[1] != "MODEL_MAP"
            ):
                return Known(MADE_BY.get(owner.name, owner.name), True)
            return Known(MADE_BY[owner.name], True) if owner is not None and owner.name in MADE_BY else None
        return None


def uses_in(source: str, path: str = "made_up.py") -> list[Use]:
    """Every use in a module's source."""
    reader = Reader(path)
    reader.visit(ast.parse(source))
    return reader.uses


@cache
def our_uses() -> list[Use]:
    """Every use in our code."""
    paths = sorted({path for pattern in READ for path in PACKAGE.glob(pattern)})
    return [use for path in paths for use in uses_in(path.read_text(), str(path.relative_to(PACKAGE.parent)))]
