"""An engine of our own decoder against its contract: exactly its weights, and the output that was promised.

What hashes cannot see: a contract and files that fit each other, written by a build that this package does not match.
"""

from pathlib import Path

from extract.cpu.architecture import Architecture
from extract.cpu.mapped_weights import WeightsFile
from extract.cpu.weights import WEIGHTS_FILE, tensor_shapes
from extract.engine.contract import Contract, EngineChanged, OutputDiffers


def check_engine(
    directory: Path, contract: Contract, architecture: Architecture, weights: WeightsFile, dtype: str
) -> None:
    """Compare weights and output with what an architecture has.

    Args:
        directory: of the engine, for the message.
        contract: its contract.
        architecture: what it computes.
        weights: what it holds.
        dtype: of the states that this decoder gives.

    Raises:
        EngineChanged: the file does not hold exactly the decoder's weights.
        OutputDiffers: the contract promises another output than this decoder has.
    """
    scaled = contract.precision.weights == "fp8"
    found, expected = set(weights.names), set(tensor_shapes(architecture, scaled=scaled))
    for field, names in (("missing keys", expected - found), ("unexpected keys", found - expected)):
        if names:
            raise EngineChanged(
                path=directory, name=WEIGHTS_FILE, field=field, found=sorted(names)[:3], expected="none"
            )
    for field, seen in {"module": "norm", "width": architecture.hidden_size, "dtype": dtype}.items():
        promised = getattr(contract.output, field)
        if seen != promised:
            raise OutputDiffers(path=directory, field=field, found=seen, expected=promised)
