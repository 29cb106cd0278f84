"""Names of quantisations."""

import enum

from stand_in.facts import entry

QuantAlgo = enum.StrEnum(
    "QuantAlgo", {name: name for name in entry("tensorrt_llm.quantization.mode", "QuantAlgo")["members"]}
)
