"""Names bound from C++."""

import enum

from stand_in.state import at_least


class KVCacheType(enum.Enum):
    """Kinds of cache; a build takes this one up to 1.1."""

    CONTINUOUS = "CONTINUOUS"
    PAGED = "PAGED"
    DISABLED = "DISABLED"

    if at_least("0.20"):

        @classmethod
        def from_string(cls, name):
            """By name."""
            return cls[name.upper()]
