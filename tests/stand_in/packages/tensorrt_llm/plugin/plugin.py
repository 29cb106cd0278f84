"""PluginConfig: which plugins and fusions a network uses."""

from stand_in.facts import fields
from stand_in.state import at_least

from tensorrt_llm.settings_of_release import Plain, Validated, ValidationError, _FieldsOf

UNDERSCORED = not at_least("1.1")
"""Fields are properties over names with an underscore, and the constructor takes nothing."""

PLUGIN_TYPES = ("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", None)


def _to_dict(config):
    return {name: vars(config)[name] for name in fields("tensorrt_llm.plugin.plugin", "PluginConfig")}


class _Resolving:
    """`auto` reads back as the model's type."""

    facts_module = "tensorrt_llm.plugin.plugin"

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return self.dtype if isinstance(value, str) and value == "auto" and name != "dtype" else value

    def is_context_fmha_enabled(self):
        """Whether attention of the context phase is the fused one."""
        return bool(self.context_fmha)


if at_least("1.2"):

    class PluginConfig(_Resolving, Validated):
        """Validated on every assignment; "enable" and "disable" are understood."""

        validate_assignment = True

        @classmethod
        def check(cls, name, value):
            default = cls.known()[name]
            is_flag = isinstance(default, bool) or name == "paged_kv_cache"
            if value in ("enable", "disable"):
                enabled = value == "enable"
                return enabled if is_flag else "auto" if enabled else None
            if name == "dtype" or is_flag or isinstance(default, int):
                kind = str if name == "dtype" else bool if is_flag else int
                if type(value) is not kind and not (name == "paged_kv_cache" and value is None):
                    raise ValidationError(f"PluginConfig.{name}: {value!r} is not of type {kind.__name__}")
            elif value not in PLUGIN_TYPES:
                raise ValidationError(f"PluginConfig.{name}: {value!r} is none of {PLUGIN_TYPES}")
            return value

        def model_dump(self):
            """As config.json has it."""
            return _to_dict(self)

else:

    class PluginConfig(_Resolving, Plain):
        """A dataclass; up to 1.0 its fields have an underscore before them and properties over them."""

        __dataclass_fields__ = _FieldsOf("_" if UNDERSCORED else "")

        def __init__(self, **given):
            if given and UNDERSCORED:
                raise TypeError(f"PluginConfig.__init__() got an unexpected keyword argument {next(iter(given))!r}")
            super().__init__(**given)

        def to_dict(self):
            """As config.json has it."""
            return _to_dict(self)

        @classmethod
        def from_dict(cls, config):
            """Known names of a mapping."""
            made = cls()
            made.update_from_dict(config)
            return made

        def update_from_dict(self, config):
            """Set the known names of a mapping."""
            for name in _to_dict(self):
                if name in config:
                    setattr(self, name, config[name])
