"""Every layer runs, once, in its order, and what it adds to the residual stream is added once.

A model whose layers add a known constant each says in its states which of them ran; a model without one of its layers,
or with two of them exchanged, says how far a mistake by one would be.
"""

import number_rig
import numpy as np
import pytest
import rig
from number_rig import EXACT, SUBJECTS, worst

IDS = rig.random_sequences([1, 5, 20], seed=12)


def constant_layers(directory, family, **settings):
    """A checkpoint whose layer n adds 8 + 2n to dimension 2n of the stream (attention) and 9 + 2n to the next (MLP)."""
    import torch
    from transformers import AutoModelForCausalLM

    rig.tiny_checkpoint(directory, family, **settings)
    model = AutoModelForCausalLM.from_pretrained(directory)
    names = {
        "llama": ("o_proj", "down_proj"),
        "gpt2": ("attn.c_proj", "mlp.c_proj"),
        "gpt_neox": ("dense", "dense_4h_to_h"),
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
            for place, linear in enumerate(names[family]):
                if layer is not None and name.rpartition(".")[0].endswith(f".{linear}"):
                    parameter.zero_()
                    if name.endswith(".bias"):
                        parameter[2 * layer + place] = 8.0 + 2 * layer + place
        model.base_model.get_input_embeddings().weight.fill_(1.0)
        for name, parameter in model.named_parameters():
            if name.endswith("wpe.weight"):
                parameter.zero_()
            elif name.split(".")[-2] in ("norm", "ln_f", "final_layer_norm"):
                parameter.fill_(float(name.endswith("weight")))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("subject", ["llama-own", "llama-transformers", "gpt2-transformers", "gpt_neox-transformers"])
def test_the_states_hold_what_each_of_three_layers_adds_exactly_once(tmp_path, subject):
    family, _, decoder = subject.partition("-")
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    checkpoint = constant_layers(tmp_path / "checkpoint", family, **biases)
    engine = number_rig.build_engine(checkpoint, tmp_path / "engine", decoder=decoder)
    stream = np.ones(64)
    stream[:6] += np.arange(8.0, 14.0)
    if family != "llama":
        stream -= stream.mean()
    state = stream / np.sqrt((stream**2).mean())
    for states in number_rig.states_of(engine, IDS, tmp_path / "job"):
        assert np.abs(states - state).max() <= 1e-4


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_layer_is_left_out_exchanged_or_run_twice(subjects, tmp_path, subject):
    import torch
    from transformers import AutoModel

    found = subjects.states(subject, IDS, tmp_path)
    assert worst(found, subjects.expected(subject, IDS)) <= EXACT
    model = AutoModel.from_pretrained(subjects.checkpoint(subject), attn_implementation="eager").eval()
    (name,) = (name for name, child in model.named_children() if isinstance(child, torch.nn.ModuleList))
    layers, kinds = list(getattr(model, name)), model.config.to_dict().get("layer_types")
    for order in ((1, 2), (0, 2), (0, 1), (1, 0, 2), (0, 2, 1), (0, 1, 2, 2), (0, 0, 1, 2)):
        setattr(model, name, torch.nn.ModuleList(layers[index] for index in order))
        model.config.num_hidden_layers = len(order)
        if kinds:
            model.config.layer_types = [kinds[index] for index in order]
        assert number_rig.errors(found, rig.reference_states(model, IDS)).max() > 0.01, order
