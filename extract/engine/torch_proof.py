"""Decide by trial, on the checkpoint at hand, which layout gives the plain model's numbers.

Plain means: the same weights, the family's own attention, each row alone, no padding, no cache. A layout is taken when
replacing one sequence leaves all others as they were, when a sequence's place in the longest pass makes no difference,
and when every row equals the plain one. Packed is tried first, dense second; a family that neither gets right is
refused. No list of families is consulted: a config can make any family behave like another. (The one exception is the
bound of families whose float32 is known to be uncertain.)
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from extract.engine.contract import Proof
from extract.engine.families import float32_bound
from extract.engine.torch_attention import PACKED_ATTENTION
from extract.engine.torch_decoder import Layout, TorchDecoder, vocab_size
from extract.engine.torch_final_norm import FinalNorm, family_of, find_final_norm
from extract.engine.torch_head import head_input
from extract.engine.torch_trial import Draw, Rows, relative_error, try_layout
from extract.errors import CheckpointRefused, ExtractError

HALF_BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error of a row against the plain model in the same precision, where that is not float32."""

PROBE_LENGTHS = (3, 17, 1, 128, 5, 64, 64, 2, 17, 31)
"""Lengths of the rows that are compared with the plain model, each cut at the engine's limit. Not sorted on purpose."""


class NotCausal(CheckpointRefused):
    """A later token changes the states of earlier ones."""

    template = (
        "{family}: not a causal decoder: changing later tokens moved the states of earlier ones by {found:.1e} "
        "(relative), {bound:.0e} expected at most. Such a model is not extracted."
    )


class PlainModelFails(CheckpointRefused):
    """The family's own code cannot run a row that the engine would have to take."""

    template = "{family}: the model itself fails on rows of up to {longest} tokens: {problem}"


class NotExact(CheckpointRefused):
    """No layout gives the plain model's numbers."""

    template = "{family}: no layout reproduces the plain model within {bound:.0e}. {reasons}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """Which layout was proven, and what was seen on the way."""

    layout: Layout
    attention: str
    """Name of the attention implementation that runs."""
    proof: Proof
    bound: float
    """What `proof.moved` and `proof.plain` were held to."""
    final_norm: FinalNorm
    head_input: str
    """"identical", or how the head's input differs from the state."""
    limit_max_tokens: int | None
    """Most tokens that one pass may hold with this layout, where the family sets such a limit."""
    reasons: tuple[str, ...]
    """Why layouts tried before this one were not taken."""


def prove(
    model: nn.Module,
    *,
    max_input_tokens: int,
    max_tokens: int,
    vocab: int | None = None,
    seed: int = 0,
    layout: Literal["auto", "packed", "dense"] = "auto",
    device: str | torch.device = "cpu",
    allow_no_final_norm: bool = False,
    tolerance: float | None = None,
) -> ProofResult:
    """Find the layout that is right for `model`, a loaded base model with its own attention set.

    Args:
        model: left as it came, with its own attention.
        max_input_tokens: longest sequence of the engine.
        max_tokens: token budget of a pass; the moved sequence is tried at the end of a pass of this size.
        vocab: token ids 0 to vocab - 1 are drawn; `None` is all that the embedding knows.
        seed: of the draw.
        layout: "dense" and "packed" try only that one.
        device: where the engine will run.
        allow_no_final_norm: take the model's output as it is where no final norm is found.
        tolerance: bound of the relative error; `None` is the bound of the model's type and family.

    Raises:
        NoFinalNorm: see `find_final_norm`.
        PlainModelFails: the model cannot run rows of this length at all.
        NotCausal: later tokens change earlier states.
        NotExact: no layout that was tried is right.
    """
    family = family_of(model)
    bound = _bound_of(model, family) if tolerance is None else tolerance
    draw = Draw(vocab_size(model) if vocab is None else vocab, seed)
    probe = draw.row(min(8, max_input_tokens)).to(device)
    final_norm = find_final_norm(model.to(device).eval(), probe, allow_no_final_norm=True)
    plain = TorchDecoder(model, layout="dense", device=device, final_norm=final_norm)
    try:
        _check_causal(plain, draw, max_input_tokens, family, bound)
        if final_norm.how == "none" and not allow_no_final_norm:
            find_final_norm(model, probe)  # raises: consent is asked for only where the rest is right
        ids = [draw.row(min(length, max_input_tokens)) for length in (*PROBE_LENGTHS, max_input_tokens)]
        rows = Rows(ids, [plain.states(row, [0, len(row)]) for row in ids])
        seen_by_head = head_input(plain, probe)
    except (ExtractError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise PlainModelFails(family=family, longest=max_input_tokens, problem=problem) from error
    finally:
        plain.close()

    reasons: list[str] = []
    tried: tuple[Layout, ...] = ("packed", "dense") if layout == "auto" else (layout,)
    for candidate in tried:
        limit = None
        if candidate == "packed":
            against, limit = packed_limits(model.config, max_input_tokens)
            if against is not None:
                reasons.append(f"packed: {against}")
                continue
        budget = max_tokens if limit is None else min(limit, max_tokens)
        try:
            proof = _tried(model, candidate, rows, draw, max_input_tokens, budget, final_norm, device)
        except ExtractError as error:
            reasons.append(f"{candidate}: {error}")
            continue
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a family's own code raises here, this layout is not for it
            reasons.append(f"{candidate}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if proof.neighbour <= bound and proof.moved <= bound and proof.plain <= bound:
            return ProofResult(
                layout=candidate,
                attention=PACKED_ATTENTION if candidate == "packed" else str(plain.own_attention),
                proof=proof,
                bound=bound,
                final_norm=final_norm,
                head_input=seen_by_head,
                limit_max_tokens=limit,
                reasons=tuple(reasons),
            )
        reasons.append(
            f"{candidate}: relative error {proof.plain:.1e} against the plain model, {proof.moved:.1e} when moved, "
            f"{proof.neighbour:.1e} when a neighbour changes"
        )
    raise NotExact(family=family, bound=bound, reasons=". ".join(reasons))


def packed_limits(config: Any, max_input_tokens: int) -> tuple[str | None, int | None]:
    """What a config says against packing: a reason to leave it, and the most tokens that a pass may then hold."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if original < max_input_tokens:
            # Its frequencies follow the longest row of a pass, so rows would depend on their neighbours.
            return f"{kind} rope changes at {original} tokens, rows may have {max_input_tokens}", None
    # Llama 4 scales queries of layers without rope by the token's place in the row, not by its position.
    if getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale"):
        return None, int(config.floor_scale) - 1
    return None, None


def _tried(
    model: nn.Module,
    layout: Layout,
    rows: Rows,
    draw: Draw,
    max_input_tokens: int,
    max_tokens: int,
    final_norm: FinalNorm,
    device: str | torch.device,
) -> Proof:
    decoder = TorchDecoder(model, layout=layout, device=device, final_norm=final_norm)
    try:
        return try_layout(decoder, rows, draw, max_input_tokens, max_tokens)
    finally:
        decoder.close()


def _check_causal(plain: TorchDecoder, draw: Draw, max_input_tokens: int, family: str, bound: float) -> None:
    length = min(max_input_tokens, 32)
    kept = length // 2
    if kept == 0:
        return
    row = draw.row(length)
    changed = torch.cat([row[:kept], draw.row(length - kept)])
    before, after = (plain.states(ids, [0, length])[:kept] for ids in (row, changed))
    found = relative_error(after, before)
    if found > bound:
        raise NotCausal(family=family, found=found, bound=bound)


def _bound_of(model: nn.Module, family: str) -> float:
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return HALF_BOUNDS.get(dtype, float32_bound(family))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [found, *(value for value in found.values() if isinstance(value, dict))]
