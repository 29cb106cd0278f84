"""Tensors of the network, and the few operations that the stand-in's models are made of."""

import tensorrt as trt

from tensorrt_llm._common import default_net
from tensorrt_llm._utils import str_dtype_to_trt, trt_dtype_to_str


class Tensor:
    """A tensor of the network; `shape` has -1 for tokens and sequences."""

    def __init__(
        self,
        name=None,
        dtype=None,
        shape=None,
        dim_range=None,
        is_network_input=True,
        location=trt.TensorLocation.DEVICE,
        network=None,
        trt_tensor=None,
    ):
        self.name, self.dtype, self.location = name, dtype, location
        self.is_network_input = is_network_input
        self.letters = list(shape)
        self.network = network or default_net()
        self.network.declare(self, self.letters)
        if is_network_input:
            self.network.add_input(self, dim_range)

    @property
    def dtype_name(self):
        """The type as a string."""
        return trt_dtype_to_str(self.dtype)

    @property
    def shape(self):
        """As TensorRT says it."""
        return tuple(-1 if isinstance(side, str) else side for side in self.letters)

    def mark_output(self, name=None, dtype=None):
        """Make this tensor an output called `name` of type `dtype`; marking it twice leaves the later name."""
        if isinstance(dtype, str):
            dtype = str_dtype_to_trt(dtype)
        assert dtype is None or isinstance(dtype, trt.DataType), dtype
        default_net()._mark_output(self, name or self.name or self.key, dtype)


def _result(op, inputs, dtype, letters, /, **settings):
    tensor = Tensor(dtype=dtype, shape=letters, is_network_input=False)
    default_net().add(op, inputs, tensor, **settings)
    return tensor


def cast(input, dtype):
    """The tensor in another type."""
    dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
    return input if input.dtype is dtype else _result("cast", [input], dtype, input.letters)


def gather_last_token_logits(hidden_states, last_token_ids, remove_input_padding):
    """Rows `last_token_ids` - 1 of packed states; the input itself if there are no ids."""
    if last_token_ids is None:
        return hidden_states
    assert remove_input_padding, "the stand-in has packed inputs only"
    letters = [*last_token_ids.letters, *hidden_states.letters[1:]]
    return _result("gather", [hidden_states, last_token_ids], hidden_states.dtype, letters)


def linear(input, name, parameter):
    """Times a weight [out, in]."""
    default_net().parameters[name] = parameter.value
    letters = [*input.letters[:-1], parameter.value.shape[0]]
    return _result("linear", [input], input.dtype, letters, weights=[name])


def decoder(inputs, config, parameters, widths, takes_positions):
    """The whole decoder as one operation: token ids and what attention needs -> states of the final norm [T, H]."""
    names = sorted(parameters)
    default_net().parameters.update({name: parameters[name].value for name in names})
    return _result(
        "decoder",
        list(inputs.values()),
        str_dtype_to_trt(config.dtype),
        ["T", config.hidden_size],
        weights=names,
        names=list(inputs),
        dtype=config.dtype,
        hf_config=config.stand_in_hf_config,
        widths=widths,
        takes_positions=takes_positions,
        num_layers=config.num_hidden_layers,
    )
