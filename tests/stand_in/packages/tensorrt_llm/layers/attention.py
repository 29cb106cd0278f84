"""What attention is told beside the states."""


class AttentionParams:
    """Lengths and kinds of the sequences."""

    def __init__(self, **tensors):
        self.tensors = tensors


class KeyValueCacheParams:
    """The cache's tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors
