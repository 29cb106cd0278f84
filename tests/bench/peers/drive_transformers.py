"""transformers, as a person writes it: `AutoModel`, sdpa, batches of padded rows, states cut out of the padding.

Also the reference: float32, one row at a time, so that neither padding nor batching can be wrong. With `head` the model
is `AutoModelForCausalLM` and the states are `hidden_states[-1]`: what most answers on the web advise, with a head's
work and every layer's states for nothing.
"""

from collections.abc import Sequence
from typing import Any

from peers.protocol import Ids, Kind, Rows, fixed_batches, of_kind, padded, serve


class Transformers:
    """Settings: checkpoint, dtype, threads, head. Options: size (rows of a batch), sort."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Nothing is made beforehand."""

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        kind = transformers.AutoModelForCausalLM if settings.get("head") else transformers.AutoModel
        model = kind.from_pretrained(
            settings["checkpoint"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
        )
        self.head = bool(settings.get("head"))
        self.model = model.requires_grad_(False).eval()
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        import torch

        lengths = [len(sequence) for sequence in sequences]
        found: list[Any] = [None] * len(sequences)
        with torch.inference_mode():
            for members in fixed_batches(lengths, options["size"], sort=options.get("sort", False)):
                input_ids, mask = (torch.from_numpy(array) for array in padded(sequences, members))
                if self.head:
                    output = self.model(input_ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
                    states = output.hidden_states[-1]
                else:
                    states = self.model(input_ids, attention_mask=mask, use_cache=False).last_hidden_state
                for place, row in enumerate(members):
                    found[row] = of_kind(states[place], lengths[row], kind)
        return found

    def rows(self, result: Any) -> Rows:
        return [row.float().numpy() for row in result]


if __name__ == "__main__":
    serve(Transformers())
