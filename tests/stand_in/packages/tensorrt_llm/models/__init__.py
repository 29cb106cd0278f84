"""MODEL_MAP: architecture -> class. The classes that the stand-in does not have are left out."""

from stand_in.facts import entry

from tensorrt_llm.models import stand_in_decoders

MODEL_MAP = {
    architecture: getattr(stand_in_decoders, name)
    for architecture, name in entry("tensorrt_llm.models", "MODEL_MAP")["keys"].items()
    if hasattr(stand_in_decoders, name)
}
