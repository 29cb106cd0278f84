"""Where rows come from. `open_source` picks the implementation and imports only that one."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from extract.sources.base import Source, SourceLayout, identity
from extract.spec import SourceSpec

if TYPE_CHECKING:
    from extract.sources.file_source import OpenFile
    from extract.sources.files import FileFormat

__all__ = ["Source", "SourceLayout", "identity", "open_source"]


def open_source(spec: SourceSpec, known: dict[str, Any] | None = None) -> Source:
    """The source that `spec` names; no column is looked at before `layout()`.

    `known` is the fingerprint of an earlier layout of the same source: a file whose size and modification time are as
    recorded there is not hashed again.

    Raises:
        SourceError: nothing there, an unknown format or several; each message says what was found.
    """
    if spec.rows is not None:
        from extract.selection import parse_selection
        from extract.sources.selected import SelectedRows

        selection = parse_selection(spec.rows)
        return SelectedRows(open_source(replace(spec, rows=None), known), selection, spec.rows)
    from extract.sources.formats import choose_format

    chosen = choose_format(spec)
    if chosen == "hf":
        from extract.sources.hf import open_dataset

        return open_dataset(spec)
    from extract.sources.file_source import FileSource
    from extract.sources.files import list_files

    files = list_files(spec.paths, chosen)
    return FileSource(spec=spec, format=chosen, files=files, open_file=_opener(chosen), known=known)


def _opener(format: "FileFormat") -> "OpenFile":
    match format:
        case "parquet":
            from extract.sources.parquet import open_parquet

            return open_parquet
        case "arrow":
            from extract.sources.arrow_ipc import open_arrow

            return open_arrow
        case "jsonl":
            from extract.sources.jsonl import open_jsonl

            return open_jsonl
