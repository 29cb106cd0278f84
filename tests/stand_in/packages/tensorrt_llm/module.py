"""Modules: a tree of parameters that is called while a network is being built."""


class Parameter:
    """A weight; `value` is a torch tensor."""

    def __init__(self, value=None):
        self.value = value


class Module:
    """A node of the tree. Calling it looks `forward` up on the instance."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, *args, **kwargs):
        """Build the graph of this module."""
        raise NotImplementedError

    def named_children(self):
        """Modules directly below."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_parameters(self, prefix="", recurse=True):
        """Every weight with its dotted name."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
        if recurse:
            for name, child in self.named_children():
                yield from child.named_parameters(f"{prefix}{name}.")
