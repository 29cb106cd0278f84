"""`open_checkpoint`: find a checkpoint, refuse what would load wrongly, and give it an identity.

Structural only: json, headers and hashes; weights are read by `decoder.load_decoder`. Everything that transformers
would paper over (random values for missing weights, an adapter left out, a cut file) is looked for before anything
expensive starts. The identity is a digest of names and bytes, so the same checkpoint in another folder is the same.
"""

import json
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from extract.canonical import digest, file_digest
from extract.engine.gguf_file import HEAD, read_gguf
from extract.engine.gguf_settings import check_gguf
from extract.engine.hub_cache import NoSuchCheckpoint, fetch_from_hub, is_hub_name
from extract.engine.model_config import CONFIG, check_decoder, read_config
from extract.engine.quantization import check_quantization
from extract.engine.sentence_transformers import transformer_directory
from extract.engine.tensor_names import outside_decoder
from extract.engine.weights_files import StoredTensor, WeightFiles, find_weights
from extract.errors import CheckpointRefused

ADAPTER = "adapter_config.json"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class AdapterRefused(CheckpointRefused):
    """An adapter alone, or one beside full weights that would be left out in silence."""

    template: ClassVar[str] = (
        "{path}: {found} an adapter of {base}. Merge it first (peft: merge_and_unload, then save_pretrained) and give "
        "the merged checkpoint{otherwise}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was looked at and not refused.

    Attributes:
        path: directory with config and weights, or the GGUF file.
        name: as people call it: directory name, hub name, file name. Never an absolute path.
        kind: where it came from.
        files: weight and config files used.
        sha256: digest over names and contents of `files` (of the content alone for GGUF).
        config: config.json as it stands, or the GGUF file's metadata without arrays.
        model_type: the config's own; a wrapper's, not its text decoder's.
        architecture: the config's class name, or GGUF's architecture.
        dtype: torch name of the floating-point type that most of the decoder's weights are stored in; quantised ones,
            which are dequantised into it, do not count.
        tokenizer_dir: where tokenizer files would be.
        decoder_bytes: of the decoder's weights as stored, without head and towers (float32 for GGUF; for pickles the
            whole files, whose inside is not read).
        pickled: weights are `.bin` files.
        notes: what a user should know: dequantised, parts that are not applied, ...
    """

    path: Path
    name: str
    kind: Literal["directory", "hub", "gguf"]
    files: tuple[Path, ...]
    sha256: str
    config: dict[str, Any]
    model_type: str
    architecture: str
    dtype: str
    tokenizer_dir: Path
    decoder_bytes: int
    pickled: bool = False
    notes: tuple[str, ...] = ()


def open_checkpoint(source: str | Path, *, revision: str | None = None, allow_pickle: bool = False) -> Checkpoint:
    """Find and check a checkpoint; reads no tensor beyond hashing the files.

    Args:
        source: directory, `.gguf` file, or hub name (`org/name`), looked for in this order.
        revision: branch, tag or commit of a hub checkpoint.
        allow_pickle: accept weights that are there only as `.bin`.

    Raises:
        CheckpointRefused: one of its subclasses, named for the reason.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        problem, advice = "a file that is not a .gguf file", "Give the checkpoint's directory."
        raise NoSuchCheckpoint(name=source, problem=problem, advice=advice)
    if path.is_dir():
        return _open_directory(path, path.resolve().name, "directory", (), allow_pickle)
    name = str(source)
    if isinstance(source, Path) or not is_hub_name(name) or name.endswith(".gguf"):
        missing = "file" if name.endswith(".gguf") else "directory"
        advice = "Give a checkpoint directory, a .gguf file, or a hub name (org/name)."
        raise NoSuchCheckpoint(name=name, problem=f"no such {missing}", advice=advice)
    path, commit = fetch_from_hub(name, revision=revision, allow_pickle=allow_pickle)
    return _open_directory(path, name, "hub", (f"hub commit {commit}",), allow_pickle)


def _open_directory(
    directory: Path, name: str, kind: Literal["directory", "hub"], notes: tuple[str, ...], allow_pickle: bool
) -> Checkpoint:
    inner, pipeline_notes = transformer_directory(directory)
    _refuse_adapter(inner)
    config = read_config(inner)
    weights = find_weights(inner, allow_pickle=allow_pickle)
    quantization_notes = check_quantization(inner, config, weights.tensors)
    config_notes = check_decoder(inner, config)
    files = tuple(path for path in (*weights.files, weights.index, inner / CONFIG) if path is not None)
    decoder = _decoder_tensors(config, weights.tensors)
    architectures = config.get("architectures") or [config["model_type"]]
    return Checkpoint(
        path=inner,
        name=name,
        kind=kind,
        files=files,
        sha256=_identity(files),
        config=config,
        model_type=config["model_type"],
        architecture=str(architectures[0]),
        dtype=_dtype(config, decoder),
        tokenizer_dir=inner,
        decoder_bytes=_decoder_bytes(weights, decoder),
        pickled=weights.pickled,
        notes=(*notes, *pipeline_notes, *config_notes, *quantization_notes),
    )


def _open_gguf(path: Path) -> Checkpoint:
    header = read_gguf(path)
    notes = check_gguf(path, header)
    return Checkpoint(
        path=path,
        name=path.name,
        kind="gguf",
        files=(path,),
        sha256=file_digest(path),
        config=header.metadata,
        model_type=header.architecture,
        architecture=header.architecture,
        dtype="float32",
        tokenizer_dir=path.parent,
        decoder_bytes=4 * sum(tensor.num_elements for tensor in header.tensors if tensor.name != HEAD),
        notes=notes,
    )


def _refuse_adapter(directory: Path) -> None:
    path = directory / ADAPTER
    if not path.is_file():
        return
    try:
        base = json.loads(path.read_bytes()).get("base_model_name_or_path") or "a model that it does not name"
    except (ValueError, AttributeError, RecursionError):
        base = "a model that it does not name"
    if (directory / CONFIG).is_file():
        otherwise = f", or remove {ADAPTER} if the weights are merged already"
        raise AdapterRefused(
            path=directory, found=f"{ADAPTER} stands beside full weights,", base=base, otherwise=otherwise
        )
    raise AdapterRefused(path=directory, found="not a checkpoint, but", base=base, otherwise="")


def _decoder_tensors(config: dict[str, Any], tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """What will be loaded, judged by name: for sizes only, the loading itself is checked tensor by tensor."""
    text = config.get("text_config")
    num_layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    limit = num_layers if isinstance(num_layers, int) else 10**9
    return [tensor for tensor in tensors if outside_decoder(tensor.name, num_layers=limit) is None]


def _dtype(config: dict[str, Any], tensors: list[StoredTensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _FLOATS:
            sizes[_FLOATS[tensor.dtype]] += tensor.num_elements
    if sizes:
        return sizes.most_common(1)[0][0]
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _decoder_bytes(weights: WeightFiles, tensors: list[StoredTensor]) -> int:
    if weights.pickled:
        return sum(path.stat().st_size for path in weights.files)
    return sum(tensor.num_bytes for tensor in tensors)


def _identity(files: tuple[Path, ...]) -> str:
    """Digest over names and contents; files are hashed side by side, hashlib releases the lock."""
    with ThreadPoolExecutor(max_workers=min(8, len(files))) as pool:
        digests = pool.map(file_digest, files)
        return digest(dict(zip((path.name for path in files), digests, strict=True)))
