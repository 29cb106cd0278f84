"""The models: ordinary decoders, one with a forward of its own, one that needs a cache, and one that is no decoder."""

from tensorrt_llm.functional import gather_last_token_logits
from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM, Linear, PretrainedModel, Transformer


class _OrdinaryDecoder(DecoderModelForCausalLM):
    transformer_class = Transformer

    def __init__(self, config):
        head = Linear("lm_head.weight", config.vocab_size, config.hidden_size)
        super().__init__(config, self.transformer_class(config), head)


class LLaMAForCausalLM(_OrdinaryDecoder):
    """Llama and what is built like it."""


class QWenForCausalLM(_OrdinaryDecoder):
    """Qwen."""


class _WithPositions(Transformer):
    takes_positions = True


class GPTForCausalLM(_OrdinaryDecoder):
    """GPT-2: learned positions, so that `position_ids` matter."""

    transformer_class = _WithPositions


class DeciLMForCausalLM(_OrdinaryDecoder):
    """A forward of its own, which returns two tensors only."""

    def forward(self, input_ids, position_ids=None, use_cache=False, last_token_ids=None, **params):
        """Logits, and the states after the gather."""
        hidden_states = self.transformer(
            input_ids, position_ids=position_ids, attention_params=params["attention_params"]
        )
        hidden_states = gather_last_token_logits(hidden_states, last_token_ids, True)
        lm_logits = self.lm_head(hidden_states)
        lm_logits.mark_output("logits", self.config.logits_dtype)
        return lm_logits, hidden_states


class DeepseekV2ForCausalLM(_OrdinaryDecoder):
    """Latent attention, which has no way without a cache."""

    def forward(self, input_ids, position_ids=None, use_cache=False, *args, **kwargs):
        """As the base class, with a cache."""
        assert use_cache, "MLA requires a paged KV cache"
        return super().forward(input_ids, position_ids, use_cache, *args, **kwargs)


class MambaForCausalLM(PretrainedModel):
    """No decoder in the sense of the base class."""
