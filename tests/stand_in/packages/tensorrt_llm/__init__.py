"""Stand-in of the vendor package `tensorrt_llm`: our own code. See `stand_in`.

Importing it is what registers the plugins without which an engine does not load.
"""

from stand_in.state import STATE

__version__ = STATE.release
