"""What a pass takes of a card's memory, as numbers: a pure function of the architecture, asked before weights load.

Terms are the tensors that are alive together in `extract.cuda.decoder`, where most of them are: in attention, at the
gate of the MLP, and in means. What it adds for torch and the driver is a round sum on the safe side. From the same
numbers follow the largest pass that a card takes (`pass_tokens`), the refusal of a card that is too small or too full,
and what a plan shows.
"""

from dataclasses import dataclass

from extract.cpu.architecture import Architecture
from extract.cuda.attention import PLAIN_SCORES, Backend
from extract.cuda.passes import MAX_KEYS_PER_TOKEN

RESERVED_BYTES = 3 * 2**29
"""The driver's context, the libraries' workspaces and small tensors: 1.5 GiB."""
USABLE = 0.92
"""Part of what is left that tensors can fill; the rest is lost between them."""
LARGEST_PASS = 65_536
"""Tokens of a pass beyond which products gain nothing: two hundred tiles of rows for each multiprocessor."""
PASS_STEP = 1024
"""Passes are multiples of it, where there is room for one."""
MAX_ELEMENTS = 2**31 - 1
"""No tensor of a pass has more, so that every kernel may count in 32 bits."""
STATES_IN_FLIGHT = 3
"""Passes whose states are on the card at once: being computed, and on their way down."""

_SIZES = {"float32": 4, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory of an engine on a card.

    Attributes:
        weight_bytes: everything that stays.
        token_bytes: of one computed token of a pass, at the worst moment.
        key_bytes: of one gathered key, where prefixes are shared.
        state_bytes: of one token's states, the other layers' among them, as long as they are on the card.
        fixed_bytes: that a pass takes whatever its size.
        widest: elements of the widest tensor, a token.
    """

    weight_bytes: int
    token_bytes: int
    key_bytes: int
    state_bytes: int
    fixed_bytes: int
    widest: int

    def pass_bytes(self, tokens: int) -> int:
        """Of passes of so many tokens, beside the weights."""
        each = self.token_bytes + MAX_KEYS_PER_TOKEN * self.key_bytes + STATES_IN_FLIGHT * self.state_bytes
        return self.fixed_bytes + tokens * each

    def needed_bytes(self, tokens: int) -> int:
        """Free memory that a card must have for weights and passes of so many tokens."""
        return RESERVED_BYTES + round((self.weight_bytes + self.pass_bytes(tokens)) / USABLE)

    def pass_tokens(self, free_bytes: int, max_tokens: int) -> int:
        """Tokens of the largest pass that `free_bytes` take, at most `max_tokens`; 0 where not even one token fits."""
        room = (free_bytes - RESERVED_BYTES) * USABLE - self.weight_bytes - self.fixed_bytes
        each = self.pass_bytes(1) - self.fixed_bytes
        most = min(int(room // each), max_tokens, LARGEST_PASS, MAX_ELEMENTS // self.widest)
        if most > PASS_STEP:
            most -= most % PASS_STEP
        return max(most, 0)


def memory_model(
    architecture: Architecture,
    precision: str,
    *,
    backend: Backend,
    max_positions: int,
    fused: bool,
    share: bool = True,
    num_layers: int = 0,
) -> MemoryModel:
    """Memory of a decoder.

    Args:
        architecture: what it computes.
        precision: "float32", "bfloat16" or "fp8".
        backend: of attention.
        max_positions: longest sequence.
        fused: regions are compiled; otherwise their steps are float32 tensors of their own.
        share: passes may share prefixes.
        num_layers: layers whose states are asked for beside the final ones.
    """
    a = architecture
    product, other = _SIZES[precision], max(2, _SIZES[precision])
    hidden, inner, query, kv = a.hidden_size, a.intermediate_size, a.query_width, a.kv_width
    scale = 4 if precision == "fp8" else 0
    stream, read = 4 * hidden, hidden * product + scale
    projected = (query + 2 * kv) * other
    attention = stream + read + projected + (2 * query + kv) * other + query * product + scale + hidden * other
    mlp = 2 * (stream + read) + 2 * inner * other + inner * product + scale  # who called the layer still has its inputs
    added = 3 * (stream + read) + hidden * other
    if not fused:  # norms, rotary positions and gates step by step
        attention += 12 * (query + kv)
        mlp += (20 if precision == "fp8" else 16) * inner
        added += 12 * hidden
    fixed = 0
    if backend == "plain":  # padded queries, keys and values of some sequences, and their scores
        scores = min(PLAIN_SCORES, a.num_heads * max_positions**2 * 8192)
        fixed = scores * (12 if a.softcap is not None else 4)
        attention += (2 * query + 2 * a.num_heads * a.head_dim) * 2 * other
    return MemoryModel(
        weight_bytes=weight_bytes(a, precision, max_positions),
        token_bytes=max(attention, mlp, added, 2 * hidden * (other + 4)),  # the last: means of shared states
        key_bytes=2 * kv * other + 4 if share else 0,
        state_bytes=hidden * other * (1 + num_layers),
        fixed_bytes=fixed,
        widest=max(2 * inner, query + 2 * kv, hidden, MAX_KEYS_PER_TOKEN * kv if share else 0),
    )


def weight_bytes(architecture: Architecture, precision: str, max_positions: int) -> int:
    """Bytes of all weights on the card; embeddings, norms and biases are never FP8."""
    a = architecture
    product, other = _SIZES[precision], max(2, _SIZES[precision])
    outputs = a.query_width + 2 * a.kv_width + a.hidden_size + 2 * a.intermediate_size + a.hidden_size
    elements = a.hidden_size * (2 * a.query_width + 2 * a.kv_width + 3 * a.intermediate_size)
    scales = 4 * outputs if precision == "fp8" else 0
    biases = other * (
        a.qkv_bias * (a.query_width + 2 * a.kv_width)
        + a.output_bias * a.hidden_size
        + a.mlp_bias * (2 * a.intermediate_size + a.hidden_size)
    )
    head_norms = {"none": 0, "head": 2 * a.head_dim, "projection": a.query_width + a.kv_width}[a.head_norm]
    norms = 4 * (a.hidden_size * (4 if a.norms == "sandwich" else 2) + head_norms)
    tables = sum(2 * 4 * max_positions * len(rotary.inv_freq) for rotary in a.rotary)
    layer = elements * product + scales + biases + norms
    return a.vocab_size * a.hidden_size * other + len(a.layers) * layer + 4 * a.hidden_size + tables
