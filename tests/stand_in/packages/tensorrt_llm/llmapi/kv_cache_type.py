"""The kinds of cache from 1.2 on; before, there is no such module."""

import enum

from stand_in.state import at_least

if not at_least("1.2"):
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)


class KVCacheType(str, enum.Enum):  # noqa: UP042
    """Kinds of cache."""

    CONTINUOUS = "continuous"
    PAGED = "paged"
    DISABLED = "disabled"
