"""Stand-in of the vendor package `tensorrt_llm`: our own code. See `stand_in`.

Importing it is what registers the plugins without which an engine does not load.
"""

import sys

from stand_in.state import STATE

__version__ = STATE.release

if STATE.noisy:
    sys.stdout.write(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}\n")
