"""What an export is asked to be: the target, which rows, and what some targets need to be told."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from extract.errors import BadValue, SpecError
from extract.records import OUTCOMES
from extract.spec import ValueType

Kind = Literal["parquet", "npy", "safetensors", "hf", "lance", "speculators", "specforge", "saelens"]

DRAFTERS = ("speculators", "specforge")
"""Targets with one sample a row, a loss mask, and states of several layers."""

ONLY_FOR: dict[str, tuple[Kind, ...]] = {
    "layers": ("speculators", "specforge", "saelens"),
    "loss_mask": ("speculators", "specforge"),
    "engine": ("speculators", "specforge"),
    "context": ("saelens",),
    "hook": ("saelens",),
    "rows_per_file": ("safetensors",),
}
"""Options that mean something to some targets alone."""


class OptionDoesNotApply(SpecError):
    """An option that would change nothing is refused, so that none is believed to work."""

    template = "--{option} does not apply to --to {kind}, only to {kinds}. Leave it out."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One export.

    Attributes:
        kind: the target.
        outcomes: only rows that ended so; all by default.
        rows: only these positions of the source, such as "0-99,250".
        cast: another stored type.
        unfinished: take what is committed of an output that is not complete.
        layers: for drafters: which stored states, in order; "final" is the state after the final norm. For SAELens: the
            one whose states are cached.
        loss_mask: for drafters: "roles", "all" or the name of a carried column.
        engine: for drafters: where the engine lies now whose tokenizer tells the roles.
        context: for SAELens: tokens of a row.
        hook: for SAELens: name of the column.
        rows_per_file: for safetensors: most rows of a file.
    """

    kind: Kind
    outcomes: tuple[str, ...] = ()
    rows: str | None = None
    cast: ValueType | None = None
    unfinished: bool = False
    layers: tuple[str, ...] = ()
    loss_mask: str | None = None
    engine: str | None = None
    context: int | None = None
    hook: str | None = None
    rows_per_file: int | None = None

    def __post_init__(self) -> None:
        for key, found, known in (
            ("kind", self.kind, get_args(Kind)),
            ("cast", self.cast, (None, *get_args(ValueType))),
            *(("outcomes", outcome, OUTCOMES) for outcome in self.outcomes),
        ):
            if found not in known:
                expected = " or ".join(f'"{value}"' for value in known if value is not None)
                raise BadValue(where="export", key=key, found=f'"{found}"', expected=expected)
        for key in ("context", "rows_per_file"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise BadValue(where="export", key=key, found=value, expected="a whole number, 1 or more")
        for key, kinds in ONLY_FOR.items():
            if getattr(self, key) not in (None, ()) and self.kind not in kinds:
                raise OptionDoesNotApply(option=key.replace("_", "-"), kind=self.kind, kinds=_listed(kinds))

    def identity(self) -> dict[str, Any]:
        """What a later call must ask for again to go on: all but where the engine lies."""
        return {key: value for key, value in asdict(self).items() if key != "engine"}


def _listed(kinds: tuple[Kind, ...]) -> str:
    *first, last = kinds
    return f"{', '.join(first)} and {last}" if first else last
