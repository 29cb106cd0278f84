"""Our own packed decoder on a CPU: no padding, no head, no cache, and no transformers at run time."""
