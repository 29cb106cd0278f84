"""Put compiled regions, made at build, in the place of the plain ones of a decoder: no compiler, no warm-up.

A region that is called in a way that was not compiled (one row, rows laid out otherwise) is computed by its plain
lines: slower by a little, never wrong. Code for another torch or another card is refused before it is opened.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from extract.cuda.ahead_of_time import FEWEST_ROWS
from extract.cuda.region_variants import Layout, layout, rebuilt, regions_of, signature
from extract.cuda.regions import Region
from extract.errors import EngineRefused


class CompiledForAnother(EngineRefused):
    """Compiled code that this machine cannot run."""

    template = (
        "{path}: its compiled code is for {field} {expected}, here is {found}. Build the engine again here: "
        "extract build CHECKPOINT -o ENGINE --compile ahead (or --compile jit, which compiles at every start)"
    )


class CompiledCodeUnreadable(EngineRefused):
    """torch cannot open the compiled code, or it is not for this decoder."""

    template = "{path}: the compiled code cannot be used: {problem}. Build the engine again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One loaded piece of code.

    Attributes:
        run: tensors in a list (emptied) -> tensors.
        output: how they nest, see `pattern_of`.
    """

    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    output: Any
    max_rows: int


def here(device: torch.device) -> dict[str, str]:
    """What compiled code depends on, as this machine has it."""
    found = {"torch": version("torch")}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["compute capability"] = f"{major}.{minor}"
    return found


def bind_regions(decoder: nn.Module, path: Path, expected: dict[str, str], device: torch.device) -> int:
    """Run the decoder's regions by compiled code from now on.

    Args:
        decoder: on its device.
        path: what `compile_regions` wrote.
        expected: `here` of the machine that wrote it.
        device: of the decoder.

    Returns:
        How many regions have code.

    Raises:
        CompiledForAnother: another torch, card or instruction set.
        CompiledCodeUnreadable: torch cannot open it, or a region has no code.
    """
    found = here(device)
    for field, value in expected.items():
        if found.get(field) != value:
            raise CompiledForAnother(path=path, field=field, expected=value, found=found.get(field, "none"))
    codes = load_codes(path, device)
    bound = 0
    for region in regions_of(decoder):
        variants = codes.get(signature(region))
        if variants is None:
            problem = f"it has none for {type(region).__name__} of this decoder"
            raise CompiledCodeUnreadable(path=path, problem=problem)
        region.forward = Compiled(region, variants)
        bound += 1
    return bound


def load_codes(path: Path, device: torch.device) -> dict[str, dict[Layout, Code]]:
    """All code of a file, by signature and layout of the inputs; raises `CompiledCodeUnreadable`."""
    from torch.export.pt2_archive._package import load_pt2

    index = -1 if device.index is None else device.index
    codes: dict[str, dict[Layout, Code]] = {}
    try:
        # Without the threaded mode's bookkeeping, which waits for the card before each second call of the same code.
        contents = load_pt2(str(path), run_single_threaded=True, device_index=index)
        for model in contents.aoti_runners.values():
            facts = json.loads(model.get_metadata()["region"])
            code = Code(run=model.loader.boxed_run, output=facts["output"], max_rows=int(facts["max_rows"]))
            codes.setdefault(facts["signature"], {})[_layout(facts["layout"])] = code
    except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise CompiledCodeUnreadable(path=path, problem=" ".join(str(error).split())[:200]) from error
    return codes


class Compiled:
    """A region's `forward` by compiled code, or by its plain lines where none fits."""

    def __init__(self, region: Region, variants: dict[Layout, Code]) -> None:
        self._plain = region.forward
        self._weights = list(region.buffers())
        self._variants = variants

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """As the region's own."""
        code = self._variants.get(layout(inputs))
        if code is None or not FEWEST_ROWS <= inputs[0].shape[0] <= code.max_rows:
            return self._plain(*inputs)
        return rebuilt(code.output, iter(code.run([*self._weights, *inputs])))


def _layout(table: Any) -> Layout:
    return tuple((str(dtype), tuple(shape), tuple(strides)) for dtype, shape, strides in table)
