"""Which linears to keep in high precision for a divergence, held to rows that had no say in it."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from extract.cpu.kernels import HIGH
from extract.cpu.movable_runtime import MovableRuntime
from extract.errors import VerificationFailed
from extract.fidelity_check.dealt_rows import DealtRows
from extract.fidelity_check.ranking_results import LayerRanking, Step
from extract.fidelity_check.ranking_table import step_text
from extract.fidelity_check.results import Interval
from extract.fidelity_check.set_search import SetSearch
from extract.fidelity_check.set_trials import Trials

LOOKS = 3
"""At the rows that confirm: with each further look they have more of a say in what is chosen."""


class BudgetNotReached(VerificationFailed):
    """No set of linears in bfloat16 brings the divergence under what was asked for."""

    template = (
        "{engine}: with all linears in bfloat16 the mean KL of the next token is {found}, above the {budget:g} of "
        "--kl-budget. Build a float32 engine, or allow more."
    )


class BudgetNotConfirmed(VerificationFailed):
    """The sets that were chosen kept the budget on the rows that chose them, not on others."""

    template = (
        "{engine}: on the rows that confirm, the mean KL of the next token is {found}, above the {budget:g} of "
        "--kl-budget, after {looks} tries. Give more --rows, or allow more."
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The set that the search ended with, and whether it kept the budget on the rows that confirm."""

    tried: frozenset[str] | None = None
    confirmed: bool = False
    looks: int = 0
    path: tuple[Step, ...] = ()


def choose(
    runtime: MovableRuntime,
    rows: DealtRows,
    damage: Mapping[str, float],
    cost: Mapping[str, float],
    budget: float,
    say: Callable[[str], None],
) -> Choice:
    """Search; where the rows that confirm do not, search on with a stricter target.

    Args:
        runtime: in int8, with linears to move to bfloat16.
        rows: whose head is known.
        damage: of each linear alone, in nats.
        cost: of each linear, together 1.
        budget: the mean KL that is allowed, in nats.
        say: called with a line for each set that is measured.
    """

    def kl(part: Trials, chosen: AbstractSet[str]) -> Interval:
        seen = part.seen(runtime, chosen).kl
        assert seen is not None
        return seen

    say(f"searching linears to keep in {HIGH} for a mean KL of at most {budget:g}")
    search = SetSearch(lambda chosen: kl(rows.search, chosen), damage, cost, lambda step: say(step_text(step)))
    target = budget
    for look in range(LOOKS):
        reached = search.forward(target)
        if reached:
            search.prune(target)
        elif look == 0:
            return Choice(tried=search.chosen, path=tuple(search.path))
        held = kl(rows.held, search.chosen)
        say(f"on the rows that confirm: {held.mean:.2e} [{held.low:.2e}, {held.high:.2e}]")
        if held.mean <= budget or not reached:
            break
        target = search.kl.mean * budget / held.mean
    return Choice(search.chosen, held.mean <= budget, look + 1, tuple(search.path))


def check_budget(found: LayerRanking) -> None:
    """Hold a ranking to its budget.

    Raises:
        BudgetNotReached, BudgetNotConfirmed: no set was chosen.
    """
    if found.kl_budget is None or found.chosen is not None:
        return
    kl = found.path[-1].kl if found.looks == 0 else found.confirmed[1].kl
    assert kl is not None  # `rank_layers` refuses a budget without a head
    shown = f"{kl.mean:.2e} [{kl.low:.2e}, {kl.high:.2e}]"
    if found.looks == 0:
        raise BudgetNotReached(engine=found.engine, found=shown, budget=found.kl_budget)
    raise BudgetNotConfirmed(engine=found.engine, found=shown, budget=found.kl_budget, looks=found.looks)
