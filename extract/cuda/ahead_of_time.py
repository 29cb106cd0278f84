"""Compile a decoder's regions once, at build, into a file that any machine with the same card and torch runs at once.

What is compiled is what `torch.compile` would compile when an engine starts: the regions between products, for any
number of rows. Products and attention stay calls of torch's own kernels, which nothing could compile better, and so the
number of sequences never enters compiled code. The file holds no weights (see `extract.cuda.region_variants`), needs no
compiler where it is loaded, and is machine code: it is trusted as the contract that names its digest is.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from extract.cuda.region_variants import Layout, layout, leaves, pattern_of, regions_of, signature
from extract.cuda.regions import Region, same_code

FEWEST_ROWS = 2
"""Compiled code takes this many rows or more; a single row is run uncompiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One region with one layout of its inputs, as it was seen in a pass."""

    region: Region
    inputs: tuple[torch.Tensor, ...]


def compile_regions(variants: Mapping[str, Variant], path: Path, *, max_rows: int) -> None:
    """Compile regions for the device that they were seen on; half a minute each for the compiler, at most.

    Args:
        variants: from `seen_variants`.
        path: file to write; its name ends in `.pt2`.
        max_rows: most rows of a pass. It decides whether addresses fit in 32 bits: code for fewer rows is faster, and
            wrong beyond.
    """
    from torch._inductor.package.package import package_aoti

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        files = {name: _compile(variant, max_rows) for name, variant in variants.items()}
        package_aoti(str(path), files)


def seen_variants(decoder: nn.Module, run: Callable[[], object]) -> dict[str, Variant]:
    """The different ways in which passes call regions, by the name of their code.

    Args:
        decoder: it is left as it is.
        run: passes over the decoder that use every region in every way, with `FEWEST_ROWS` rows or more each time.
    """
    found: dict[tuple[str, Layout], Variant] = {}

    def look(region: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(region, Region) and all(isinstance(one, torch.Tensor) for one in inputs)
        rows = {one.shape[0] for one in inputs}
        assert len(rows) == 1 and min(rows) >= FEWEST_ROWS, f"{type(region).__name__}: inputs of {rows} rows"
        key = signature(region), layout(inputs)
        if key not in found:
            found[key] = Variant(region=region, inputs=tuple(one.detach() for one in inputs))

    hooks = [region.register_forward_pre_hook(look) for region in regions_of(decoder)]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    numbers: dict[str, int] = {}
    named: dict[str, Variant] = {}
    for (mark, _), variant in found.items():
        numbers[mark] = numbers.get(mark, -1) + 1
        named[f"{type(variant.region).__name__.lower()}_{mark}_{numbers[mark]}"] = variant
    return named


class _Opened(nn.Module):
    """A region whose weights are inputs."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = (region,)  # in a tuple it is no part of this module, so its weights are not counted as constants
        self._names = [name for name, _ in region.named_buffers()]

    def forward(self, buffers: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        weights = dict(zip(self._names, buffers, strict=True))
        return tuple(leaves(torch.func.functional_call(self._region[0], weights, inputs)))


def _compile(variant: Variant, max_rows: int) -> Any:
    """Files of one piece of code."""
    region, inputs = variant.region, tuple(_copy(one) for one in variant.inputs)
    max_rows = max(max_rows, len(inputs[0]))
    buffers = tuple(_copy(buffer) for buffer in region.buffers())
    with torch.no_grad():
        pattern = pattern_of(region(*inputs))
    rows = torch.export.Dim("rows", min=FEWEST_ROWS, max=max_rows)
    program = torch.export.export(
        _Opened(region),
        (buffers, inputs),
        dynamic_shapes=(tuple({} for _ in buffers), tuple({0: rows} for _ in inputs)),
        strict=False,
    )
    facts = {"signature": signature(region), "layout": layout(inputs), "output": pattern, "max_rows": max_rows}
    options = {"aot_inductor.package": True, "aot_inductor.metadata": {"region": json.dumps(facts)}} | same_code()
    graph = program.module(check_guards=False)
    arguments = program.example_inputs
    assert arguments is not None
    return torch._inductor.aot_compile(graph, *arguments, options=options)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor with these strides: what a pass saw under inference mode cannot be traced."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)
