"""Running a program on tensors: what the card computes for one pass.

Where the vendor checks nothing and would read memory that means something else, the outputs are NaN; where it would
touch memory that is not there, it is a device fault.
"""

import torch

from stand_in.card import DeviceFault
from stand_in.program import Decoder, Program, dequantised

CONTEXT_PHASE = 0
SHARED_MEMORY_BYTES = 48 * 1024
"""What a kernel has without asking for more; the one that sums lengths up keeps B + 1 of them there."""


class Execution:
    """A program ready to run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = program.needed()
        self.decoders = {node.output: Decoder(node, program.weights) for node in self.nodes if node.op == "decoder"}

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output of one pass, for inputs of the declared types and shapes."""
        program, values = self.program, dict(inputs)
        values = {name: tensor.clone() for name, tensor in values.items()}
        for node in self.nodes:
            given = [values[name] for name in node.inputs]
            if node.op == "decoder":
                named = dict(zip(node.settings["names"], given, strict=True))
                values[node.output] = self._decode(node.output, named, inputs)
            elif node.op == "gather":
                values[node.output] = _gather(*given)
            elif node.op == "linear":
                (name,) = node.settings["weights"]
                weight = dequantised({name: program.weights[name]}, given[0].dtype)[name]
                values[node.output] = given[0] @ weight.T
            elif node.op == "cast":
                values[node.output] = given[0].to(getattr(torch, program.values[node.output].dtype))
            else:
                raise AssertionError(node.op)
        return {name: values[tensor] for name, tensor in program.outputs.items()}

    def _decode(self, output: str, named: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        decoder, about = self.decoders[output], self.program.about
        if about["fp8_context_fmha"] and not about["use_cache"]:
            raise DeviceFault("an illegal memory access was encountered (stand-in: FP8 attention reads a null scale)")
        if named["host_context_progress"].any():
            raise DeviceFault("an illegal memory access was encountered (stand-in: host_context_progress is a pointer)")
        ids, lengths = named["input_ids"], named["context_lengths"].tolist()
        if int(ids.min()) < 0 or int(ids.max()) >= decoder.vocab_size:
            raise DeviceFault("an illegal memory access was encountered (stand-in: token id outside the vocabulary)")
        if 4 * (len(lengths) + 1) > SHARED_MEMORY_BYTES:
            raise DeviceFault(f"invalid argument (stand-in: {len(lengths):,} sequences need more shared memory)")
        sound = (
            lengths == named["host_context_lengths"].tolist()
            and min(lengths) > 0
            and sum(lengths) == len(ids)
            and max(lengths) <= about["max_input_len"]
            and bool((named["host_max_attention_window_sizes"] >= max(lengths)).all())
            and not named["host_sink_token_length"].any()
            and all(
                inputs[name].tolist() == lengths
                for name in ("sequence_length", "host_past_key_value_lengths")
                if name in inputs
            )
        )
        if not sound:
            width = self.program.values[output].shape[-1]
            dtype = getattr(torch, self.program.values[output].dtype)
            return torch.full((len(ids), int(width)), float("nan"), dtype=dtype)
        return decoder(ids, named["position_ids"], lengths)


def _gather(states: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
    rows = last_token_ids.long() - 1
    inside = (rows >= 0) & (rows < len(states))
    found = states[rows.clamp(0, len(states) - 1)]
    found[~inside] = float("nan")
    return found
