"""Quantisation."""

from stand_in.state import at_least

if at_least("1.0"):
    from tensorrt_llm.quantization.stand_in_calibration import quantize_and_export

    __all__ = ["quantize_and_export"]
