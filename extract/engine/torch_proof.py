"""Decide by trial, on the checkpoint at hand, which layout gives the plain model's numbers.

Plain means: the same weights, the family's own attention, each row alone, no padding, no cache. A layout is taken when
replacing one sequence leaves all others as they were, when a sequence's place in the longest pass makes no difference,
and when every row equals the plain one. Packed is tried first, dense second; a family that neither gets right is
refused. No list of families is consulted: a config can make any family behave like another. (The one exception is the
bound of families whose float32 is known to be uncertain.)
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from extract.engine.contract import Proof
from extract.engine.families import float32_bound
from extract.engine.torch_attention import PACKED_ATTENTION
from extract.engine.torch_decoder import Layout, TorchDecoder, vocab_size
from extract.engine.torch_final_norm import FinalNorm, family_of, find_final_norm
from extract.engine.torch_float32 import in_float32
from extract.engine.torch_head import head_input
from extract.engine.torch_trial import Draw, Rows, plain_rows, relative_error, try_layout
from extract.errors import CheckpointRefused, ExtractError

HALF_BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error of a row against the plain model in the same precision, where that is not float32."""

NOISE_MARGIN = 2.0
"""A row may also differ by this many times what the plain model's own rounding moves a row, but see `MOST_NOISE`."""

MOST_NOISE = 10.0
"""However much rounding moves a row, it may differ by at most this many times the usual bound."""

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

    template = (
        "{family}: the model itself fails on rows of up to {longest} tokens: {problem}. "
        "Choose a smaller --max-input-tokens, or check that config.json belongs to these weights."
    )


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
    decide_in_float32: bool = True,
) -> ProofResult:
    """Find the layout that is right for `model`, a loaded base model with its own attention set.

    A half-precision model is decided on in float32, where rounding hides nothing, and then measured as it is.

    Args:
        model: left as it came, with its own attention and the same bits.
        max_input_tokens: longest sequence of the engine.
        max_tokens: token budget of a pass; the moved sequence is tried at the end of a pass of this size.
        vocab: token ids 0 to vocab - 1 are drawn; `None` is all that the embedding knows.
        seed: of the draw.
        layout: "dense" and "packed" try only that one.
        device: where the engine will run.
        allow_no_final_norm: take the model's output as it is where no final norm is found.
        tolerance: bound of the relative error; `None` is the bound of the model's type and family.
        decide_in_float32: false where the weights do not fit in float32; the decision is then weaker.

    Raises:
        NoFinalNorm: see `find_final_norm`.
        PlainModelFails: the model cannot run rows of this length at all.
        NotCausal: later tokens change earlier states.
        NotExact: no layout that was tried is right.
    """
    prover = _Prover(
        model=model.to(device).eval(),
        device=device,
        max_input_tokens=max_input_tokens,
        max_tokens=max_tokens,
        vocab=vocab_size(model) if vocab is None else vocab,
        seed=seed,
        allow_no_final_norm=allow_no_final_norm,
        tolerance=tolerance,
    )
    layouts: tuple[Layout, ...] = ("packed", "dense") if layout == "auto" else (layout,)
    if decide_in_float32 and _dtype_of(model) in HALF_BOUNDS:
        with in_float32(model):
            decided = prover.decide(layouts)
        return replace(prover.decide((decided.layout,), decided=True), reasons=decided.reasons)
    return prover.decide(layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prover:
    """The settings of one proof. Its two runs (float32, own precision) draw the same rows."""

    model: nn.Module
    device: str | torch.device
    max_input_tokens: int
    max_tokens: int
    vocab: int
    seed: int
    allow_no_final_norm: bool
    tolerance: float | None

    def decide(self, layouts: tuple[Layout, ...], *, decided: bool = False) -> ProofResult:
        """The first of `layouts` that is right in the precision that the model has now.

        `decided`: float32 has shown that sequences do not touch each other, so rounding may now move them.
        """
        family, draw = family_of(self.model), Draw(self.vocab, self.seed)
        usual = _usual_bound(self.model, family) if self.tolerance is None else self.tolerance
        probe = draw.row(min(8, self.max_input_tokens)).to(self.device)
        norm = find_final_norm(self.model, probe, allow_no_final_norm=True)
        plain = TorchDecoder(self.model, layout="dense", device=self.device, final_norm=norm)
        try:
            _check_causal(plain, draw, self.max_input_tokens, family, usual)
            if norm.how == "none" and not self.allow_no_final_norm:
                find_final_norm(self.model, probe)  # raises: consent is asked for only where the rest is right
            lengths = (min(length, self.max_input_tokens) for length in (*PROBE_LENGTHS, self.max_input_tokens))
            rows = plain_rows(plain, [draw.row(length) for length in lengths], self.max_tokens)
            seen_by_head = head_input(plain, probe)
        except (ExtractError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            raise PlainModelFails(family=family, longest=self.max_input_tokens, problem=problem) from error
        finally:
            plain.close()

        bound = usual if self.tolerance is not None else min(max(usual, NOISE_MARGIN * rows.noise), MOST_NOISE * usual)
        reasons: list[str] = []
        for layout in layouts:
            against, limit = (
                packed_limits(self.model.config, self.max_input_tokens) if layout == "packed" else (None, None)
            )
            if against is not None:
                reasons.append(f"packed: {against}")
                continue
            try:
                proof = self._tried(layout, rows, draw, min(limit or self.max_tokens, self.max_tokens), norm)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except ExtractError as error:
                reasons.append(f"{layout}: {error}")
                continue
            except Exception as error:  # whatever a family's own code raises here, this layout is not for it
                reasons.append(f"{layout}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if proof.neighbour <= (bound if decided else usual) and proof.moved <= bound and proof.plain <= bound:
                return ProofResult(
                    layout=layout,
                    attention=PACKED_ATTENTION if layout == "packed" else plain.own_attention,
                    proof=proof,
                    bound=bound,
                    final_norm=norm,
                    head_input=seen_by_head,
                    limit_max_tokens=limit,
                    reasons=tuple(reasons),
                )
            reasons.append(
                f"{layout}: relative error {proof.plain:.1e} against the plain model, {proof.moved:.1e} when moved, "
                f"{proof.neighbour:.1e} when a neighbour changes"
            )
        raise NotExact(family=family, bound=bound, reasons=". ".join(reasons))

    def _tried(self, layout: Layout, rows: Rows, draw: Draw, max_tokens: int, norm: FinalNorm) -> Proof:
        decoder = TorchDecoder(self.model, layout=layout, device=self.device, final_norm=norm)
        try:
            return try_layout(decoder, rows, draw, self.max_input_tokens, max_tokens)
        finally:
            decoder.close()


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


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The type of the weights as they are now."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _usual_bound(model: nn.Module, family: str) -> float:
    return HALF_BOUNDS.get(_dtype_of(model), float32_bound(family))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [found, *(value for value in found.values() if isinstance(value, dict))]
