"""What a directory of sentence-transformers says of its embeddings: pooling, unit length, prompts, the longest text.

Settings only, no tensors. Whatever there would change the numbers and is not applied here is refused by its name: an
embedding that lacks a projection, or is pooled in another way, looks as good as the right one. Keys that are not known
are taken for such.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from extract.engine.sentence_transformers import MODULES, BadModules
from extract.errors import CheckpointRefused
from extract.spec import OutputKind

PIPELINE_CONFIG = "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
_OLD_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_POOLS: dict[str, OutputKind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_OLD_POOLS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ORDER = ("Transformer", "Pooling", "Normalize")
_SAME_AS_LEFT_OUT = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_NOT_OF_NUMBERS = {"max_seq_length", "unpad_inputs", "modality_config"}
_OPTIONS = {
    "model": {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code"},
    "processor": {"model_max_length", "padding_side", "use_fast", "trust_remote_code"},
    "config": {"trust_remote_code"},
}
"""Options of the parts' constructors that leave the states of a row alone (or, the length, are read here)."""
_NO_LENGTH = 10**6
"""Tokenizers without a limit name a number past this one."""


class NotApplied(CheckpointRefused):
    """Part of a pipeline of sentence-transformers that changes its embeddings and is not computed here."""

    template: ClassVar[str] = (
        "{path}: {found}, which extract does not apply, so the embeddings would be others than its own. {advice}"
    )


_ADVICE = "For the decoder's own states: extract build and extract run."


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings:
    """What a directory says; `None` where it says nothing.

    Attributes:
        pool: which state, or mean of states, a row's embedding is.
        include_prompt: whether a prompt's own states count in the pooling.
        normalize: scaled to unit length.
        prompts: texts put before a row, by name.
        default_prompt_name: the one that is used unless another is chosen.
        max_input_tokens: longer rows are truncated to it.
        origins: the file that each was read from, by attribute.
    """

    pool: OutputKind | None = None
    include_prompt: bool = True
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_input_tokens: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def read_embedding_settings(
    directory: Path, transformer: Path, *, pool: OutputKind | None = None
) -> EmbeddingSettings | None:
    """The settings of a directory that holds a `modules.json`; `None` of any other.

    Args:
        directory: of the whole pipeline.
        transformer: of the decoder within it.
        pool: a pooling that was chosen, so that the directory's own need not be one that there is here.

    Raises:
        NotApplied: something of the pipeline changes the numbers and is not computed here.
        BadModules: a file is not what it should be.
    """
    if not (directory / MODULES).is_file():
        return None
    pooling, normalizes = _modules(directory)
    origins = {"normalize": MODULES}
    include_prompt = True
    if pooling is not None:
        path = directory / pooling / "config.json"
        config = _table(path, required=True)
        include_prompt = config.get("include_prompt", True) is not False
        origins["pool"] = f"{pooling}/config.json"
        pool = pool or _pool(path, config)
    max_input_tokens, origins["max_input_tokens"] = _max_input_tokens(transformer)
    prompts, default = _prompts(directory / PIPELINE_CONFIG)
    return EmbeddingSettings(
        pool=pool,
        include_prompt=include_prompt,
        normalize=normalizes,
        prompts=prompts,
        default_prompt_name=default,
        max_input_tokens=max_input_tokens,
        origins=origins | {"prompts": PIPELINE_CONFIG},
    )


def _modules(directory: Path) -> tuple[str | None, bool]:
    """The directory of the pooling, and whether embeddings are normalised; refuses any other module and order."""
    path = directory / MODULES
    try:
        listed = [(str(one["type"]), str(one.get("path", ""))) for one in json.loads(path.read_bytes())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadModules(path=path, problem=f"not a list of modules ({error!r})") from None
    names = [kind.rpartition(".")[2] for kind, _ in listed]
    for (kind, folder), name in zip(listed, names, strict=True):
        if name not in _ORDER or not kind.startswith("sentence_transformers."):
            raise NotApplied(path=path, found=f"it lists a module {kind} ({folder or 'here'})", advice=_ADVICE)
        if name == "Normalize":
            config = _table(directory / folder / "config.json") if folder else {}
            changed = {key: value for key, value in config.items() if value not in (None, "sentence_embedding")}
            if changed:
                raise NotApplied(path=path, found=f"its Normalize is set to {changed}", advice=_ADVICE)
    if [_ORDER.index(name) for name in names] != sorted(_ORDER.index(name) for name in names) or (
        names.count("Pooling") > 1
    ):
        raise NotApplied(path=path, found=f"its modules are {', '.join(names)}", advice=_ADVICE)
    folders = dict(zip(names, (folder for _, folder in listed), strict=True))
    pooling = folders.get("Pooling")
    if pooling is not None and not (directory / pooling).resolve().is_relative_to(directory.resolve()):
        raise BadModules(path=path, problem=f'its pooling is in "{pooling}", which is not a directory here')
    return pooling, "Normalize" in names


def _pool(path: Path, config: Mapping[str, Any]) -> OutputKind:
    mode = config.get("pooling_mode") or [mode for key, mode in _OLD_POOLS.items() if config.get(key)] or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in _POOLS:
        found = f"its pooling is {' + '.join(map(str, modes))}"
        raise NotApplied(path=path, found=found, advice=f"Choose another with --pool, or not. {_ADVICE}")
    return _POOLS[modes[0]]


def _max_input_tokens(transformer: Path) -> tuple[int | None, str]:
    """The most tokens of a row, and the file that says so."""
    name = next(
        (name for name in (TRANSFORMER_CONFIG, *_OLD_TRANSFORMER_CONFIGS) if (transformer / name).is_file()),
        TRANSFORMER_CONFIG,
    )
    config = _table(transformer / name)
    for key, value in config.items():
        _check_key(transformer / name, key, value)
    options = config.get("processor_kwargs") or config.get("tokenizer_args") or {}
    for said in (config.get("max_seq_length"), options.get("model_max_length")):
        if isinstance(said, int) and said > 0:
            return said, name
    own = [
        (length, file)
        for file, key in (("tokenizer_config.json", "model_max_length"), ("config.json", "max_position_embeddings"))
        if isinstance(length := _table(transformer / file).get(key), int | float) and 0 < length < _NO_LENGTH
    ]
    if not own:
        return None, ""
    length, file = min(own)
    return int(length), file


def _check_key(path: Path, key: str, value: Any) -> None:
    if key in _NOT_OF_NUMBERS - {"modality_config"} or value in (None, False, {}, [], ""):
        return
    if _SAME_AS_LEFT_OUT.get(key) == value:
        return
    if key == "modality_config":
        text = value.get("text") if isinstance(value, dict) else None
        if isinstance(text, dict) and (text.get("method"), text.get("method_output_name")) == (
            "forward",
            "last_hidden_state",
        ):
            return
    part = {"tokenizer": "processor"}.get(key.partition("_")[0], key.partition("_")[0])
    if key.endswith(("_args", "_kwargs")) and part in _OPTIONS and isinstance(value, dict):
        others = {name for name, option in value.items() if option is not None} - _OPTIONS[part]
        if not others:
            return
        key = f"{key}.{min(others)}"
        value = value[min(others)]
    raise NotApplied(path=path, found=f"{key} is {json.dumps(value)[:120]}", advice=_ADVICE)


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    config = _table(path)
    for key, expected in (("model_type", "SentenceTransformer"), ("truncate_dim", None)):
        if config.get(key) not in (None, expected):
            raise NotApplied(path=path, found=f"{key} is {json.dumps(config[key])[:120]}", advice=_ADVICE)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise BadModules(path=path, problem="its prompts are not texts by name")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise BadModules(path=path, problem=f"its default_prompt_name {default!r} is none of its prompts")
    return {name: text or "" for name, text in prompts.items()}, default


def _table(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; empty where there is no such file and none is needed."""
    if not path.is_file() and not required:
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise BadModules(path=path, problem=f"cannot be read ({reason})") from None
    if not isinstance(table, dict):
        raise BadModules(path=path, problem="not a JSON object")
    return table
