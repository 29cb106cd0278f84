"""A crash campaign: random faults at random moments on tiny jobs, and what must hold after each of them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "object_store"))  # rigs of stores
