"""The vendor's model class with one more output: the final norm's, under our name. No file of the vendor is changed.

The base class returns, beside the logits, the states before and after it gathers the last tokens. A subclass calls it,
marks the one that the recipe asks for, and returns what it was given; that survives everything that the vendor's build
does to a model. The head is dropped by letting the head module of this one model return its input: its weights are then
in no layer, and what is called `logits` is the gathered state.
"""

import functools
from typing import Any, Literal

from extract.errors import CheckpointRefused

OUTPUT_NAME = "extract_hidden_states"
"""Not `hidden_states_output`: earlier pipeline stages own that name."""

LATENT_ATTENTION = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""Architectures whose attention reads its keys out of a paged cache, always."""


class NotReached(CheckpointRefused):
    """The vendor's class for this architecture does not go through the base class's forward."""

    template = (
        "{architecture}: TensorRT-LLM {release} runs it by {cls}, {problem}, so its states cannot be put out. "
        "Build with --runtime torch."
    )


def marked_class(
    architecture: str,
    *,
    states: Literal["tokens", "last"],
    cache: Literal["none", "paged"],
    keep_head: bool,
    release: str,
) -> Any:
    """A subclass of the vendor's class for `architecture` whose engine has the output `OUTPUT_NAME`.

    Args:
        architecture: as in the vendor's config.
        states: [T, H] of every token, or [B, H] of each sequence's last one.
        cache: the engine's; one with a cache always keeps its head, which the vendor's executor needs.
        keep_head: leave the head in.
        release: the installed one, for messages.

    Raises:
        NotReached: no such class, or it has a forward of its own.
    """
    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM

    base = MODEL_MAP.get(architecture)
    refused = functools.partial(_refused, architecture, base, release)
    if base is None:
        raise refused("it does not know it")
    if not issubclass(base, DecoderModelForCausalLM):
        raise refused("which is no DecoderModelForCausalLM")
    if base.forward is not DecoderModelForCausalLM.forward:
        raise refused("which has a forward of its own")
    if architecture in LATENT_ATTENTION and cache == "none":
        raise refused("whose attention cannot be without a cache (--cache paged)")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not keep_head and cache == "none":
            self.lm_head.forward = _unchanged
        returned = DecoderModelForCausalLM.forward(self, *args, **kwargs)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise refused(f"whose forward returned {_described(returned)}, three tensors expected")
        _, last, every = returned
        chosen, other = (every, last) if states == "tokens" else (last, every)
        if other.name == OUTPUT_NAME:
            raise refused("and the installed package is patched to put out the other states (extract patch revert)")
        if chosen.name != OUTPUT_NAME:
            chosen.mark_output(OUTPUT_NAME, self.config.dtype)
        return returned

    return type(f"Marked{base.__name__}", (base,), {"forward": forward, "__doc__": base.__doc__})


def _refused(architecture: str, base: Any, release: str, problem: str) -> NotReached:
    cls = "no class" if base is None else base.__name__
    return NotReached(architecture=architecture, release=release, cls=cls, problem=problem)


def _unchanged(states: Any, *_: Any, **__: Any) -> Any:
    """What stands in for a dropped head."""
    return states


def _described(returned: Any) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
