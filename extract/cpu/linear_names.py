"""The linears of a decoder by name, such as "5.down", and sets of them as a recipe writes them: "5" is a whole layer.

A linear here is one product of the packed decoder: queries, keys and values are one, so are gate and up. Knows neither
weights nor precisions.
"""

import difflib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

LINEARS = ("qkv", "o", "gate_up", "down")
"""Of each layer, in the order in which they are computed."""

MOST_SHOWN = 3


def linear_names(num_layers: int) -> list[str]:
    """All linears, in the order in which they are computed."""
    return [f"{layer}.{linear}" for layer in range(num_layers) for linear in LINEARS]


def is_name(name: str) -> bool:
    """Whether it could name a layer or a linear of some decoder."""
    layer, dot, linear = name.partition(".")
    return layer.isascii() and layer.isdigit() and str(int(layer)) == layer and (not dot or linear in LINEARS)


def linears_of(names: Iterable[str], num_layers: int) -> frozenset[str]:
    """The linears that layers and linears name.

    Raises:
        KeyError: with the first name that this decoder does not have.
    """
    known = set(linear_names(num_layers))
    found: set[str] = set()
    for name in names:
        ones = {f"{name}.{linear}" for linear in LINEARS} if "." not in name else {name}
        if not ones <= known:
            raise KeyError(name)
        found |= ones
    return frozenset(found)


def short_names(linears: AbstractSet[str], num_layers: int) -> tuple[str, ...]:
    """The fewest names for a set of linears, in order: a layer whose linears are all there is named alone."""
    found: list[str] = []
    for layer in range(num_layers):
        own = [name for name in linear_names(layer + 1)[-len(LINEARS) :] if name in linears]
        found += [str(layer)] if len(own) == len(LINEARS) else own
    return tuple(found)


def nearest(name: str, num_layers: int) -> str:
    """In words, which names there are instead of one that is not."""
    layers = [str(layer) for layer in range(num_layers)]
    near = difflib.get_close_matches(name, [*linear_names(num_layers), *layers], n=MOST_SHOWN, cutoff=0.5)
    known = f"layers 0 to {num_layers - 1} and their linears {', '.join(f'N.{linear}' for linear in LINEARS)}"
    return f"{known}; nearest: {', '.join(near)}" if near else known
