"""What is stored is the output of the final norm: not its input, not the logits, and the same whoever decodes.

Every norm's weight is spread over 0.2 to 3 (offsets from one in Gemma), so a norm that is left out, done twice or
borrowed from another family shows.
"""

import number_rig
import numpy as np
import pytest
import rig
from number_rig import BFLOAT16, BOTH_DECODERS, EXACT, SUBJECTS, worst

from extract.output import open_output

IDS = rig.random_sequences([1, 2, 9, 30, 60], seed=11)


def around_the_final_norm(checkpoint, ids):
    """The final norm itself, and what goes into it for each row alone: float32 [L, H]."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    names = ("norm", "ln_f", "final_layer_norm", "final_norm")
    (norm,) = (module for name, module in model.named_modules() if name in names)
    before: list[np.ndarray] = []
    norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0][0].numpy()))
    with torch.no_grad():
        for row in ids:
            model(torch.tensor([row]), use_cache=False)
    return norm, before


@pytest.mark.parametrize("subject", SUBJECTS)
def test_states_are_those_after_the_final_norm_and_times_the_head_the_models_logits(subjects, tmp_path, subject):
    import torch
    from transformers import AutoModelForCausalLM

    found = subjects.states(subject, IDS, tmp_path)
    assert worst(found, subjects.expected(subject, IDS)) <= EXACT
    _, before = around_the_final_norm(subjects.checkpoint(subject), IDS)
    assert number_rig.errors(found, before).min() > 0.1
    assert open_output(tmp_path / "out").schema.metadata[b"extract.position"] == b"post_final_norm"

    model = AutoModelForCausalLM.from_pretrained(subjects.checkpoint(subject), attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [model(torch.tensor([row]), use_cache=False).logits[0].numpy() for row in IDS]
        logits = [model.get_output_embeddings()(torch.tensor(states)).numpy() for states in found]
    softcap = getattr(model.config, "logits_soft_cap", None)
    if softcap is not None:
        logits = [softcap * np.tanh(one / softcap) for one in logits]
    assert worst(logits, expected) <= EXACT


@pytest.mark.parametrize("name", BOTH_DECODERS)
def test_both_decoders_write_the_same_states_under_the_same_words(subjects, tmp_path, name):
    kept = {}
    for decoder in ("own", "transformers"):
        kept[decoder] = subjects.states(f"{name}-{decoder}", IDS, tmp_path / decoder)
    assert worst(kept["own"], kept["transformers"]) <= 2 * EXACT
    own, other = (open_output(tmp_path / decoder / "out").schema for decoder in kept)
    assert own.equals(other)
    differ = {key for key in {*own.metadata, *other.metadata} if own.metadata.get(key) != other.metadata.get(key)}
    assert differ <= {b"extract.engine", b"extract.job"}


# --- flavours of norm -------------------------------------------------------------------------------------------------


def flavours(norm, states):
    """The states under every way that a norm's weight is read: plain, as an offset from one, centred."""
    import torch

    weight = norm.weight.detach()
    eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", 1e-6)
    x = torch.tensor(states)
    root = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    centred = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    return {
        "plain": (root * weight).numpy(),
        "offset": (root * (1 + weight)).numpy(),
        "centred": (centred * weight + getattr(norm, "bias", torch.zeros(()))).detach().numpy(),
    }


FLAVOUR = {"gemma3": "offset", "recurrent_gemma": "offset", "gpt2": "centred", "gpt_neox": "centred"}


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
@pytest.mark.parametrize("subject", ["llama-own", *SUBJECTS[4:6], *SUBJECTS[8:]])
def test_the_norm_is_the_familys_own_flavour_in_every_precision(subjects, tmp_path, subject, dtype):
    name, _, decoder = subject.partition("-")
    engine = subjects.engine(subject)
    if dtype != "float32":
        engine = number_rig.build_engine(subjects.checkpoint(name), tmp_path / "engine", decoder=decoder, dtype=dtype)
    found = number_rig.states_of(engine, IDS, tmp_path / "job")
    norm, before = around_the_final_norm(subjects.checkpoint(name), IDS)
    by_flavour = [flavours(norm, one) for one in before]
    found = np.concatenate(found)
    error = {}
    for flavour in ("plain", "offset", "centred"):
        expected = np.concatenate([one[flavour] for one in by_flavour])
        error[flavour] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    own = error.pop(FLAVOUR.get(name, "plain"))
    assert own <= (EXACT if dtype == "float32" else 0.06)
    assert min(error.values()) > max(0.05, 3 * own)
