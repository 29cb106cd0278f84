"""Every decoder family of transformers, small and random: the layout that the proof finds, and its numbers.

The reference is the family's own base model called directly on each row alone, without padding and without cache.
"""

import pytest
import torch
from family_zoo import NOT_BUILT, NOT_DECODERS, VOCAB, WRAPPERS, small_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from extract.engine.families import FAMILIES, float32_bound
from extract.engine.torch_decoder import TorchDecoder
from extract.engine.torch_proof import NotCausal, ProofResult, prove

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]

MAX_INPUT_TOKENS = 64
MAX_TOKENS = 512
LENGTHS = (1, 64, 2, 17, 3, 17, 31, 64, 5, 48)

HEAD_INPUT = {
    "inkling_text": "scaled by 0.0416667",
    "minicpm3": "scaled by 4",
    "modernbert-decoder": "transformed by lm_head.dense",
}
"""Families whose head does not read the state as it is."""

NORMS = {
    "openai-gpt": "last block's norm",
    "qwen4_exp_text": "none",
}
"""Families whose state does not come from a norm after the last block."""

REFUSED = [name for name, family in FAMILIES.items() if family.layout == "refused"]
DECODERS = [name for name in FAMILIES if name not in REFUSED]


def draw_rows(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


@torch.inference_mode()
def alone(model, row: torch.Tensor) -> torch.Tensor:
    return model(input_ids=row[None], use_cache=False)[0][0].clone()


def in_layout(model, proven: ProofResult, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each row's states out of as few passes as the layout allows."""
    decoder = TorchDecoder(model, layout=proven.layout, final_norm=proven.final_norm)
    states: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    members = [list(range(len(rows)))]
    if proven.layout == "dense":
        members = [[i for i, row in enumerate(rows) if len(row) == length] for length in sorted(set(LENGTHS))]
    for chosen in members:
        lengths = [len(rows[i]) for i in chosen]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        together = decoder.states(torch.cat([rows[i] for i in chosen]), bounds)
        for i, state in zip(chosen, together.split(lengths), strict=True):
            states[i] = state
    decoder.close()
    return states


def test_the_table_names_every_causal_model_of_transformers():
    known = set(FAMILIES) | set(NOT_BUILT) | NOT_DECODERS | WRAPPERS
    assert known == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(known) == len(FAMILIES) + len(NOT_BUILT) + len(NOT_DECODERS) + len(WRAPPERS)


def test_every_family_that_is_not_packed_says_why():
    assert [family.model_type for family in FAMILIES.values() if family.layout != "packed" and not family.why] == []


def test_every_other_bound_says_why():
    assert {name: family.bound for name, family in FAMILIES.items() if family.bound != 1e-5} == {
        "jetmoe": 1e-4,
        "minimax": 5e-5,
    }
    assert all(FAMILIES[name].why for name in ("jetmoe", "minimax"))
    assert [float32_bound(name) for name in ("jetmoe", "llama", "a family of tomorrow")] == [1e-4, 1e-5, 1e-5]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DECODERS)
def test_the_proof_finds_the_layout_of_the_table_and_every_row_equals_the_plain_model(model_type):
    model = small_model(model_type)
    rows = draw_rows()
    expected = [alone(model, row) for row in rows]

    proven = prove(
        model,
        max_input_tokens=MAX_INPUT_TOKENS,
        max_tokens=MAX_TOKENS,
        allow_no_final_norm=model_type == "qwen4_exp_text",
    )

    assert proven.layout == FAMILIES[model_type].layout, proven.reasons
    assert proven.head_input == HEAD_INPUT.get(model_type, "identical")
    assert proven.final_norm.how == NORMS.get(model_type, "final norm")
    assert proven.limit_max_tokens == (8191 if model_type == "llama4_text" else None)
    errors = [
        float((found - state).abs().max() / state.abs().max())
        for found, state in zip(in_layout(model, proven, rows), expected, strict=True)
    ]
    assert max(errors) <= float32_bound(model_type), errors


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DECODERS)
def test_earlier_tokens_matter_so_that_a_leak_would_show(model_type):
    model = small_model(model_type)
    row = draw_rows()[1]
    changed = row.clone()
    changed[-8:-1] = (row[-8:-1] + 1) % VOCAB
    before, after = alone(model, row), alone(model, changed)
    assert float((after[-1] - before[-1]).abs().max() / before.abs().max()) > 1e-3


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_is_not_causal_is_refused_by_name(model_type):
    with pytest.raises(NotCausal, match=f"^{model_type}: not a causal decoder"):
        prove(small_model(model_type), max_input_tokens=MAX_INPUT_TOKENS, max_tokens=MAX_TOKENS)
