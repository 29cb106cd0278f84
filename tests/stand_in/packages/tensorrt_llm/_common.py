"""The current network, and the check of the token budget."""

from tensorrt_llm import network


def default_net():
    """The network that operations are added to."""
    assert network._NETWORKS, "Use builder to create network first, and use `set_network` or `net_guard` to set it"
    return network._NETWORKS[-1]


def check_max_num_tokens(
    max_num_tokens,
    opt_num_tokens,
    max_batch_size,
    max_input_len,
    max_seq_len,
    max_beam_width,
    remove_input_padding,
    enable_context_fmha,
    tokens_per_block,
    multiple_profiles,
):
    """Clip the token budget to what the sequences can hold, and fill in the best number of tokens."""
    max_num_tokens = min(max_num_tokens, max_seq_len * max_batch_size)
    if opt_num_tokens is None:
        opt_num_tokens = min(max_batch_size * max_beam_width, max_num_tokens)
    return max_num_tokens, min(opt_num_tokens, max_num_tokens)
