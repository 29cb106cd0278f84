"""What an engine of the stand-in holds, and how it is run: a short list of named operations and their weights.

Bytes: a magic word, the length of a JSON text, the text, and the weights as safetensors. No pickle. The decoder itself
is one operation: transformers' own base model, one sequence at a time; what the vendor's graph is made of inside shows
only as the widths of its tensors, which decide whether an engine can be built at all.
"""

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

MAGIC = b"STANDIN1"
FP8_MAX = 448.0


@dataclass
class Node:
    """One operation: `output` = `op`(`inputs`)."""

    op: str
    inputs: list[str]
    output: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Value:
    """Type and shape of a tensor; a shape names T (tokens) and B (sequences) and gives numbers for the rest."""

    dtype: str
    shape: list[int | str]


@dataclass
class Program:
    """An engine.

    Attributes:
        about: release, versions and card it was built for, and the limits of the build.
        inputs: name -> value, in the engine's order.
        profiles: input name -> smallest, best and largest shape.
        outputs: name -> tensor of the graph.
        values: every tensor of the graph.
        weights: by name; FP8 ones have a scale beside them.
    """

    about: dict[str, Any]
    inputs: dict[str, Value]
    profiles: dict[str, list[list[int]]]
    outputs: dict[str, str]
    values: dict[str, Value]
    nodes: list[Node]
    weights: dict[str, torch.Tensor]

    def to_bytes(self) -> bytes:
        """As `from_bytes` reads it; operations and weights that no output needs are left out."""
        nodes = self.needed()
        names = {name for node in nodes for name in node.settings.get("weights", ())}
        weights = {name: tensor.contiguous() for name, tensor in self.weights.items() if name in names}
        head = {
            "about": self.about,
            "inputs": {name: vars(value) for name, value in self.inputs.items()},
            "profiles": self.profiles,
            "outputs": self.outputs,
            "values": {name: vars(value) for name, value in self.values.items()},
            "nodes": [vars(node) for node in nodes],
        }
        text = json.dumps(head).encode()
        return MAGIC + struct.pack("<Q", len(text)) + text + save(weights)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Program":
        """The program in an engine file. Raises RuntimeError."""
        data = bytes(data)
        if data[: len(MAGIC)] != MAGIC:
            raise RuntimeError("stand-in TensorRT: deserialisation failed: not an engine")
        start = len(MAGIC) + 8
        (length,) = struct.unpack("<Q", data[len(MAGIC) : start])
        head = json.loads(data[start : start + length])
        return cls(
            about=head["about"],
            inputs={name: Value(**value) for name, value in head["inputs"].items()},
            profiles=head["profiles"],
            outputs=head["outputs"],
            values={name: Value(**value) for name, value in head["values"].items()},
            nodes=[Node(**node) for node in head["nodes"]],
            weights=load(data[start + length :]),
        )

    def needed(self) -> list[Node]:
        """The operations that an output depends on."""
        wanted, found = set(self.outputs.values()), []
        for node in reversed(self.nodes):
            if node.output in wanted:
                wanted.update(node.inputs)
                found.append(node)
        return found[::-1]

    def sizes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """What T and B are for these input shapes. Raises ValueError if they contradict each other."""
        found: dict[str, int] = {}
        for name, shape in shapes.items():
            for letter, number in zip(self.inputs[name].shape, shape, strict=True):
                if isinstance(letter, str) and found.setdefault(letter, number) != number:
                    raise ValueError(f"{name}: {letter} is {number}, another input says {found[letter]}")
        return found

    def shape(self, tensor: str, sizes: dict[str, int]) -> tuple[int, ...]:
        """A tensor's shape; -1 where `sizes` does not say."""
        return tuple(sizes.get(side, -1) if isinstance(side, str) else side for side in self.values[tensor].shape)


def dequantised(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as they are multiplied with: FP8 times its scale, everything in `dtype`."""
    found = {}
    for name, tensor in weights.items():
        if name.endswith("scaling_factor"):
            continue
        scale = weights.get(f"{name.removesuffix('weight')}weights_scaling_factor")
        found[name] = tensor.to(dtype) if scale is None else (tensor.float() * scale).to(dtype)
    return found


class Decoder:
    """The operation "decoder": token ids -> states of the final norm, each sequence by itself."""

    def __init__(self, node: Node, weights: dict[str, torch.Tensor]) -> None:
        from transformers import AutoConfig, AutoModel

        settings = node.settings
        config = dict(settings["hf_config"])
        config = AutoConfig.for_model(config.pop("model_type"), **config)
        config.use_cache = False
        dtype = getattr(torch, settings["dtype"])
        with torch.random.fork_rng():
            self.model = AutoModel.from_config(config, dtype=dtype).eval().requires_grad_(False)
        names = [name for name in settings["weights"] if name in weights]
        own = dequantised({name: weights[name] for name in names}, dtype)
        self.model.load_state_dict({name.removeprefix("transformer."): value for name, value in own.items()})
        self.takes_positions = settings["takes_positions"]
        self.vocab_size = config.vocab_size

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """[T, H] for packed ids [T]."""
        found, place = [], 0
        for length in lengths:
            part = slice(place, place + length)
            place += length
            extra = {"position_ids": positions[None, part].long()} if self.takes_positions else {}
            found.append(self.model(input_ids=ids[None, part].long(), use_cache=False, **extra).last_hidden_state[0])
        return torch.cat(found)
