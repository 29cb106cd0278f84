"""How classes of settings behave: dataclasses up to 1.1, validated models that swallow unknown names from 1.2 on."""

import copy

from stand_in.facts import fields
from stand_in.state import at_least


class ValidationError(ValueError):
    """A value that does not fit its field."""


def make_default(default, factories):
    """The value of a default in the facts."""
    if isinstance(default, dict):
        return factories[default.get("factory") or default["expr"]]()
    return copy.copy(default)


class _FieldsOf:
    """Names of the fields where introspection looks for them."""

    def __init__(self, prefix=""):
        self.prefix = prefix

    def __get__(self, instance, owner):
        return {self.prefix + name: default for name, default in fields(owner.facts_module, owner.__name__).items()}


class Plain:
    """As a dataclass: unknown keywords are refused, any attribute may be set."""

    __dataclass_fields__ = _FieldsOf()

    def __init__(self, **given):
        known = fields(self.facts_module, type(self).__name__)
        unknown = sorted(set(given) - set(known))
        if unknown:
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {unknown[0]!r}")
        for name, default in known.items():
            value = given[name] if name in given else make_default(default, self.factories())
            setattr(self, name, value)

    @classmethod
    def factories(cls):
        """Text of a symbolic default -> what makes it."""
        return {}


class Validated:
    """As a model with validation: unknown names vanish without a word, in the constructor and in an assignment."""

    validate_assignment = False
    model_fields = _FieldsOf()

    def __init__(self, **given):
        for name, default in self.known().items():
            value = make_default(default, self.factories())
            if name in given:
                value = self.check(name, given[name])
            object.__setattr__(self, name, value)

    def __setattr__(self, name, value):
        if name in self.known():
            object.__setattr__(self, name, self.check(name, value) if self.validate_assignment else value)

    @classmethod
    def known(cls):
        """Field -> default."""
        return fields(cls.facts_module, cls.__name__)

    @classmethod
    def factories(cls):
        """Text of a symbolic default -> what makes it."""
        return {}

    @classmethod
    def check(cls, name, value):
        """The value as the field keeps it. Raises ValidationError."""
        default = cls.known()[name]
        kind = bool if isinstance(default, bool) else int if isinstance(default, int) else None
        if kind is not None and type(value) is not kind:
            raise ValidationError(f"{cls.__name__}.{name}: {value!r} is not of type {kind.__name__}")
        return value


Settings = Validated if at_least("1.2") else Plain
