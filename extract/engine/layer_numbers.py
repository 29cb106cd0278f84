"""Which decoder layers a job asks for, as an engine numbers them: 0 is what enters the first one, -1 the last one.

Numbers are those of transformers' `output_hidden_states`, but for the last one: there it is the state after the final
norm, here the last layer's own output, because the normed state is stored anyway. Reads a contract and no weights.
"""

from collections.abc import Sequence

from extract.engine.contract import Contract
from extract.errors import SpecError


class LayersNotGiven(SpecError):
    """The engine's runtime puts out one tensor."""

    template = (
        "states.layers: an engine of {runtime} puts out the state after the final norm alone. Leave layers out, or "
        "build a torch engine of the checkpoint."
    )


class NoSuchDecoderLayer(SpecError):
    """A number that is no layer of the engine's model."""

    template = (
        "states.layers: {found} is none of this engine's layers. It has {expected}: say 1 to {expected}, 0 for the "
        "embeddings, or -1 (the last layer) to -{most}."
    )


class LayerTwice(SpecError):
    """The same layer under one or two numbers."""

    template = "states.layers: {found} and {other} are one layer of the engine's {expected}. Name it once."


def layer_numbers(asked: Sequence[int], contract: Contract) -> tuple[int, ...]:
    """The layers that are asked for, ascending, each 0 to the engine's number of layers.

    Raises:
        LayersNotGiven: an engine that gives none.
        NoSuchDecoderLayer: a number beyond the engine's layers.
        LayerTwice: two numbers for one layer.
    """
    if not asked:
        return ()
    if contract.runtime.name == "tensorrt-llm":
        raise LayersNotGiven(runtime=contract.runtime.name)
    count = contract.checkpoint.num_layers
    named: dict[int, int] = {}
    for number in asked:
        layer = number if number >= 0 else count + 1 + number
        if not 0 <= layer <= count:
            raise NoSuchDecoderLayer(found=number, expected=count, most=count + 1)
        if layer in named:
            raise LayerTwice(found=named[layer], other=number, expected=count)
        named[layer] = number
    return tuple(sorted(named))
