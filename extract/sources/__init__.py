"""Where rows come from. `open_source` picks the implementation and imports only that one."""

from extract.sources.base import Source, SourceLayout
from extract.spec import SourceSpec

__all__ = ["Source", "SourceLayout", "open_source"]


def open_source(spec: SourceSpec) -> Source:
    """The source that `spec` names.

    Raises:
        SourceError: nothing there, an unknown format, a missing column; each message says what was found.
    """
    raise NotImplementedError
