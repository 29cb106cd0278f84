"""`load_tokenizer`: the tokenizer that transformers builds from a checkpoint's files, or `None` if there are none.

Always through AutoTokenizer: reading tokenizer.json directly loses the truncation side, added tokens and more that
stand in tokenizer_config.json. Whether the tokenizer fits the weights is for the caller to see.
"""

from pathlib import Path
from typing import Any, ClassVar

from extract.engine.checkpoint import Checkpoint
from extract.engine.quiet_transformers import quiet_transformers
from extract.errors import CheckpointRefused

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "vocab.bpe", "*.model", "*.tiktoken", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")


def tokenizer_files(directory: Path) -> list[Path]:
    """Every file of a directory that a tokenizer may be read from, by name."""
    patterns = (*VOCABULARIES, *_SETTINGS, "chat_template*")
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


class UnusableTokenizer(CheckpointRefused):
    """Tokenizer files are there, but make no tokenizer."""

    template: ClassVar[str] = (
        "{path}: the tokenizer cannot be used: {problem}. Fetch the tokenizer's files again, or remove them and give "
        "token ids as input."
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer (PreTrainedTokenizerBase), or `None` when it has no tokenizer files.

    Raises:
        UnusableTokenizer: files are there, but the vocabulary is missing, damaged, or needs code of its own.
    """
    directory = checkpoint.tokenizer_dir
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if checkpoint.kind == "gguf":
        options["gguf_file"] = checkpoint.path.name
        if "tokenizer.ggml.tokens" not in checkpoint.config:
            return None
    else:
        found = sorted(path.name for pattern in VOCABULARIES for path in directory.glob(pattern))
        settings = [name for name in _SETTINGS if (directory / name).is_file()]
        if not found and not settings:
            return None
        if not found:
            problem = f"{', '.join(settings)} without a vocabulary ({', '.join(VOCABULARIES)})"
            raise UnusableTokenizer(path=directory, problem=problem)
    from transformers import AutoTokenizer

    where = checkpoint.path if checkpoint.kind == "gguf" else directory
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    except Exception as error:  # the tokenizers package raises bare Exception
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300].rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own (trust_remote_code), which extract never runs"
        raise UnusableTokenizer(path=where, problem=reason) from error
    if not len(tokenizer):
        raise UnusableTokenizer(path=where, problem="its vocabulary is empty")
    return tokenizer
