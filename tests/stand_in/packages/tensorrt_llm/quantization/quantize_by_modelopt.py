"""Quantising a checkpoint with calibration; 1.2 has the function one package higher up."""

from stand_in.state import at_least

if not at_least("1.2"):
    from tensorrt_llm.quantization.stand_in_calibration import quantize_and_export

    __all__ = ["quantize_and_export"]
