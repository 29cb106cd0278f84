"""A token batch -> the micro-batches that one thread each runs, with shared tokens computed once."""

from dataclasses import dataclass

from extract.cpu.kernels import Sequences
from extract.records import Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Tokens that one thread carries through all layers.

    Attributes:
        input_ids: int32 [n], the tokens to compute.
        positions: int32 [n], each one's position in its row.
        sequences: queries (all n tokens) and keys of every layer but the last one of a pooled kind.
        wanted: int32 [w], rows whose state is asked for; `None`: all n.
        wanted_sequences: queries (the w wanted rows, in their order, one sequence each) and keys of the last layer;
            `None` where `wanted` is.
        first_output: place of its first state among the outputs of the pass.
    """

    input_ids: Int32
    positions: Int32
    sequences: Sequences
    wanted: Int32 | None
    wanted_sequences: Sequences | None
    first_output: int

    @property
    def num_outputs(self) -> int:
        """States that this micro-batch gives."""
        return len(self.input_ids if self.wanted is None else self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """How one token batch is computed.

    Attributes:
        kept: computed first, alone; its keys and values of each layer are kept for the others (`None`: nothing is).
        micro_batches: independent of each other once `kept` is done.
        num_computed: tokens computed in all.
        num_outputs: states computed in all.
        output_index: int32 [T] for kind "tokens" and "mean", else [B]: which output is each token's (sequence's) state;
            `None`: output i is state i.
    """

    kept: MicroBatch | None
    micro_batches: tuple[MicroBatch, ...]
    num_computed: int
    num_outputs: int
    output_index: Int32 | None
