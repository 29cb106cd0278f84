"""The network under construction."""

import contextlib

from stand_in.program import Node, Value

_NETWORKS = []


class Network:
    """Operations in order, and which of their tensors are marked as outputs."""

    def __init__(self, plugin_config, strongly_typed=True):
        self.plugin_config = plugin_config
        self.strongly_typed = strongly_typed
        self.inputs, self.profiles, self.values, self.nodes = {}, {}, {}, []
        self.parameters, self.marked = {}, {}

    def add_input(self, tensor, profile):
        """Declare an input with its smallest, best and largest shape."""
        self.inputs[tensor.key] = self.values[tensor.key]
        self.profiles[tensor.key] = profile

    def add(self, op, inputs, output, **settings):
        """Append an operation whose result is `output`."""
        self.nodes.append(Node(op, [tensor.key for tensor in inputs], output.key, settings))

    def declare(self, tensor, shape):
        """A new tensor of the graph gets its key."""
        tensor.key = tensor.name if tensor.name and tensor.is_network_input else f"tensor_{len(self.values)}"
        self.values[tensor.key] = Value(tensor.dtype_name, list(shape))

    def _mark_output(self, tensor, name, dtype):
        from tensorrt_llm.functional import cast

        if dtype is not None and dtype != tensor.dtype:
            tensor = cast(tensor, dtype)
        taken = [key for key, other in self.marked.items() if other == name and key != tensor.key]
        if taken:
            raise RuntimeError(f"stand-in TensorRT: two outputs are named {name!r}")
        tensor.name = name
        self.marked[tensor.key] = name


@contextlib.contextmanager
def net_guard(network):
    """Make a network the one that operations are added to."""
    _NETWORKS.append(network)
    try:
        yield network
    finally:
        _NETWORKS.pop()
