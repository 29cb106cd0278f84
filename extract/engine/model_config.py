"""config.json: is it a decoder, does transformers know it, does it need code of its own?

transformers asks on the terminal whether to run a checkpoint's code, guesses a missing model_type from the directory's
name, and builds an encoder as readily as a decoder. All three are settled here, before any weight is read. The classes
of transformers are only looked up, in the function that needs them: importing them imports torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from extract.engine.quiet_transformers import quiet_transformers
from extract.errors import CheckpointRefused

CONFIG = "config.json"
_BIDIRECTIONAL = ("cpmant", "xlm", "xlnet")
_ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


class NotACheckpoint(CheckpointRefused):
    """A directory without a config that says what the weights are."""

    template: ClassVar[str] = "{path}: not a checkpoint: {problem}. {advice}"


class UnknownModelType(CheckpointRefused):
    """An architecture that the installed transformers does not have."""

    template: ClassVar[str] = (
        '{path}: model_type is "{model_type}", which transformers {version} does not know.{hint} '
        "Check whether the checkpoint's own page names a version of transformers."
    )


class NeedsOwnCode(CheckpointRefused):
    """An architecture that exists only as code inside the checkpoint."""

    template: ClassVar[str] = (
        '{path}: model_type "{model_type}" needs code of its own (trust_remote_code, auto_map in config.json), which '
        "extract never runs, and transformers {version} has no class of its own for it."
    )


class NotADecoder(CheckpointRefused):
    """A model that reads text in another way than a decoder does."""

    template: ClassVar[str] = (
        '{path}: not a decoder: "{model_type}" is {found}, a causal language model is expected. '
        "Hidden states are extracted from decoders only."
    )


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory, as it stands.

    Raises:
        NotACheckpoint: it is missing, does not parse, names its own weight file, or has no model_type.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise _without_config(directory)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotACheckpoint(path=directory, problem=f"{CONFIG} is not JSON ({error})", advice=_AGAIN) from None
    if not isinstance(config, dict):
        raise NotACheckpoint(path=directory, problem=f"{CONFIG} is not a JSON object", advice=_AGAIN)
    if not isinstance(config.get("model_type"), str):
        problem = f"{CONFIG} has no model_type"
        raise NotACheckpoint(path=directory, problem=problem, advice="A model is never guessed from a file's name.")
    if config.get("transformers_weights"):
        problem = f"{CONFIG} redirects the weights to {config['transformers_weights']!r}"
        raise NotACheckpoint(path=directory, problem=problem, advice="Remove the key transformers_weights.")
    return config


def check_decoder(directory: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse what is not a decoder of the installed transformers; return notes.

    Raises:
        UnknownModelType, NeedsOwnCode, NotADecoder: as they say.
        NotACheckpoint: transformers refuses the config's values.
    """
    with quiet_transformers():
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
    model_type, version = str(config["model_type"]), transformers.__version__
    has_code = bool(config.get("auto_map"))
    if model_type not in CONFIG_MAPPING_NAMES:
        if has_code:
            raise NeedsOwnCode(path=directory, model_type=model_type, version=version)
        saved = config.get("transformers_version")
        hint = f" It was saved by transformers {saved}." if saved else ""
        raise UnknownModelType(path=directory, model_type=model_type, version=version, hint=hint)
    loaded = load_config(directory)
    text = loaded.get_text_config(decoder=True)
    if loaded.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise NotADecoder(path=directory, model_type=model_type, found="an encoder-decoder")
    wrapper = text is not loaded
    known = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not known and not (wrapper and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        found = f"a {type(loaded).__name__.removesuffix('Config')} model without a language model head"
        raise NotADecoder(path=directory, model_type=model_type, found=found)
    if text.model_type in _BIDIRECTIONAL:
        raise NotADecoder(
            path=directory, model_type=text.model_type, found="a model whose states depend on later tokens"
        )
    if text.model_type in _ENCODERS and not config.get("is_decoder", False):
        raise NotADecoder(path=directory, model_type=text.model_type, found="an encoder (is_decoder is not set)")
    notes = []
    if wrapper:
        notes.append(f"text decoder ({text.model_type}) of a {model_type} model; its other parts are not read")
    if has_code:
        notes.append(f"auto_map: the checkpoint's own code is not run, transformers' {model_type} is used")
    return tuple(notes)


def load_config(directory: Path) -> Any:
    """The config object of a directory as transformers builds it, without running code from it.

    Raises:
        NotACheckpoint: transformers refuses its values; the reason is passed on.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        problem = f"transformers refuses its {CONFIG} ({reason.rstrip('.')})"
        raise NotACheckpoint(path=directory, problem=problem, advice="Compare it with the publisher's.") from error


_AGAIN = "Copy the checkpoint again."


def _without_config(directory: Path) -> NotACheckpoint:
    names = sorted(path.name for path in directory.iterdir())
    problem = f"it holds no {CONFIG}"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "consolidated.safetensors" in names or "params.json" in names:
        problem += ", only its publisher's own layout (consolidated.safetensors, params.json)"
        advice = "Take the checkpoint in the layout that transformers reads."
    elif ggufs:
        advice = f"Give the GGUF file itself: {directory / ggufs[0]}"
    elif any((directory / name / CONFIG).is_file() for name in names):
        inner = next(name for name in names if (directory / name / CONFIG).is_file())
        advice = f"Did you mean {directory / inner}?"
    else:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
        advice = f"Found there: {shown}."
    return NotACheckpoint(path=directory, problem=problem, advice=advice)
