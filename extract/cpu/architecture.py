"""What one decoder of the common families is, in numbers and switches: the parameters of `extract.cpu.decoder`.

Stands in an engine directory as `decoder.json`, written at build time. Knows no weights and no arithmetic. A config
that cannot be said in these words has no architecture: the build then takes transformers' own model.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from extract.canonical import canonical_json
from extract.errors import EngineRefused, ExtractError
from extract.settings import parse

ARCHITECTURE_FILE = "decoder.json"
MAX_ARCHITECTURE_BYTES = 16 * 2**20

Activation = Literal["silu", "gelu_tanh", "gelu"]
HeadNorm = Literal["none", "head", "projection"]
Norms = Literal["pre", "sandwich", "post"]


class DamagedArchitecture(EngineRefused):
    """The description of an engine's decoder is not what a build wrote."""

    template = "{path}: {problem}. Build the engine again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """One table of rotary positions over the first `2 * len(inv_freq)` channels of a head, in halves.

    Attributes:
        inv_freq: radians per position of each channel pair; exactly the float32 values of transformers.
        scaling: cosines and sines are multiplied by it (yarn).
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How one layer differs from the others.

    Attributes:
        rotary: index into `Architecture.rotary`; `None` is no positions at all.
        window: a query sees only keys at positions > its own - window; `None` is all before it.
    """

    rotary: int | None
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder.

    Attributes:
        family: transformers' `model_type`; it decides how the weights are named.
        norm_eps: added to the mean square in every RMSNorm.
        norm_plus_one: RMSNorm multiplies by 1 + weight.
        norms: where a layer has norms. pre: before attention and MLP; post: after them, on the branch; sandwich: both.
        head_norm: an RMSNorm on queries and keys before rotary positions: none, over each head, over the projection.
        attention_scale: multiplies query times key.
        softcap: scores become softcap * tanh(score / softcap).
        embedding_scale: multiplies the embedding.
        residual_scale: multiplies each branch before it is added to the residual stream.
        qkv_bias, output_bias, mlp_bias: which linears have one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    attention_scale: float
    layers: tuple[LayerKind, ...]
    rotary: tuple[Rotary, ...]
    norms: Norms = "pre"
    norm_plus_one: bool = False
    head_norm: HeadNorm = "none"
    softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


def write_architecture(directory: Path, architecture: Architecture) -> None:
    """Write `decoder.json`."""
    (directory / ARCHITECTURE_FILE).write_bytes(canonical_json(asdict(architecture)) + b"\n")


def read_architecture(directory: Path) -> Architecture:
    """Read `decoder.json`, whose hash the contract holds.

    Raises:
        DamagedArchitecture: missing, absurdly large, not JSON, or not a decoder.
    """
    path = directory / ARCHITECTURE_FILE
    try:
        if path.stat().st_size > MAX_ARCHITECTURE_BYTES:
            raise DamagedArchitecture(path=path, problem=f"{path.stat().st_size:,} bytes, absurdly many")
        found = parse(Architecture, json.loads(path.read_bytes()), str(path))
    except DamagedArchitecture:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedArchitecture(path=path, problem=f"cannot be read ({error})") from None
    except ExtractError as error:
        raise DamagedArchitecture(path=path, problem=str(error).removeprefix(f"{path}: ").rstrip(".")) from None
    sizes = (found.vocab_size, found.hidden_size, found.num_heads, found.num_kv_heads, found.head_dim)
    if min(*sizes, found.intermediate_size) < 1:
        raise DamagedArchitecture(path=path, problem="a size that is not 1 or more")
    for number, layer in enumerate(found.layers):
        if layer.rotary is not None and not 0 <= layer.rotary < len(found.rotary):
            raise DamagedArchitecture(
                path=path, problem=f"layer {number} asks for a table of positions that is not there"
            )
    return found
