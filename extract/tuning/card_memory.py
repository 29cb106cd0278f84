"""What a curve takes of a card: measured by torch's allocator, and expected by our own arithmetic, side by side.

The two are shown together because the arithmetic decides, without a card, what a plan and a recipe promise: where they
differ by much, it is the arithmetic that is wrong.
"""

from typing import Any

from extract.cpu.architecture import read_architecture
from extract.engine.recipe import MAX_TOKENS
from extract.tuning.engines import Engine


def start() -> None:
    """Forget the peak so far."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> int | None:
    """Most bytes that tensors took at once since `start`; `None` without a card."""
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def expected(engine: Engine, pass_tokens: int) -> int:
    """Bytes of weights and passes of so many tokens, by arithmetic."""
    memory = _model(engine)
    return int(memory.weight_bytes + memory.pass_bytes(pass_tokens))


def most_tokens(engine: Engine) -> int:
    """Tokens of the largest pass that kernels can count, whatever memory a card has."""
    from extract.cuda.memory import MAX_ELEMENTS

    return min(MAX_TOKENS, MAX_ELEMENTS // int(_model(engine).widest))


def _model(engine: Engine) -> Any:
    from extract.cuda.memory import memory_model
    from extract.cuda.opening import can_fuse

    contract = engine.contract
    return memory_model(
        read_architecture(engine.directory),
        contract.precision.activations,
        backend="varlen" if contract.runtime.attention == "varlen" else "plain",
        max_positions=contract.limits.max_input_tokens,
        fused=contract.runtime.compile != "none" and can_fuse(),
    )
