"""A ranking as people read it, within 100 columns."""

from extract.cpu.linear_names import LINEARS
from extract.fidelity_check.ranking_results import Confirmed, Damage, LayerRanking, Step
from extract.fidelity_check.results import Interval

WORST = 12
"""Linears that are listed with their intervals."""


def ranking_text(found: LayerRanking) -> str:
    """Head, damage by layer, the worst linears, the way to the set, what was chosen and what it is worth."""
    figure = "relative error" if found.no_head is not None else "KL, nats"
    lines = [
        f"engine     {found.engine} (id {found.engine_id[:16]}, {found.arithmetic} kernels)",
        f"reference  {found.checkpoint} in {found.reference}, each row alone",
        f"rows       {found.rows}",
        f"           {found.rank_rows:,} rank, {found.search_rows:,} search, {found.held_rows:,} confirm",
        "",
        f"alone in int8, all else in {found.rest} ({figure}):",
        *_by_layer(found),
        "",
        f"most harm for what they cost{'':<6}{figure:>14}  {'95 % interval':<22}{'products':>9}",
        *(_worst(one) for one in found.linears[:WORST]),
    ]
    if found.kl_budget is not None:
        lines += ["", f"sets in bfloat16, all else in int8, for a mean KL of at most {found.kl_budget:g}:"]
        lines += [step_text(step) for step in found.path]
    lines += ["", *_confirmed(found), ""]
    if found.no_head is not None:
        lines.append(f"no head    only states are compared: {found.no_head}")
    lines += [f"note       {note}" for note in found.notes]
    if found.kl_budget is not None:
        lines.append(f"chosen     {_chosen(found)}")
    if found.recipe is not None:
        lines.append(f"recipe     {found.recipe}: extract build CHECKPOINT -o ENGINE --recipe {found.recipe}")
    lines.append(f"took       {found.seconds:,.0f} s")
    return "\n".join(lines)


def step_text(step: Step) -> str:
    """One set that was measured, on one line."""
    sign = {"start": "none", "add": "+", "drop": "-"}[step.change]
    names = ", ".join(step.names[:3]) + (f" and {len(step.names) - 3} more" if len(step.names) > 3 else "")
    kept = "" if step.kept else ", too far: kept"
    return (
        f"{step.num_linears:>4} linears, {step.cost:>4.0%} of products  {step.kl.mean:>9.2e}  {_interval(step.kl):<22}"
        f"{sign} {names}{kept}".rstrip()
    )


def _by_layer(found: LayerRanking) -> list[str]:
    """One line a layer: the whole of it as measured, and each linear."""
    known = {one.name: one for one in (*found.linears, *found.layers)}
    lines = [f"{'layer':<7}{'whole':>10}" + "".join(f"{linear:>10}" for linear in LINEARS)]
    for layer in range(len(found.layers)):
        names = (str(layer), *(f"{layer}.{linear}" for linear in LINEARS))
        lines.append(f"{layer:<7}" + "".join(f"{_figure(known[name]).mean:>10.1e}" for name in names))
    return lines


def _worst(one: Damage) -> str:
    figure = _figure(one)
    return f"{one.name:<34}{figure.mean:>14.2e}  {_interval(figure):<22}{one.cost:>9.1%}"


def _confirmed(found: LayerRanking) -> list[str]:
    with_head = found.no_head is None
    head = f"{'rows that confirm':<20}{'linears':>8}{'products':>10}"
    head += f"{'KL, nats':>11}  {'95 % interval':<21}{'same':>7}" if with_head else f"{'rel error':>11}"
    return [f"{head}{'tokens/s':>10}", *(_engine(one) for one in found.confirmed)]


def _engine(one: Confirmed) -> str:
    name = "chosen, mixed" if one.name == "chosen" else one.name
    line = f"{name:<20}{one.num_linears:>8,}{one.cost:>10.1%}"
    if one.kl is None or one.top1 is None:
        line += f"{one.rel_error.mean:>11.2e}"
    else:
        line += f"{one.kl.mean:>11.2e}  {_interval(one.kl):<21}{one.top1.mean:>7.1%}"
    line += f"{one.tokens_per_s:>10,.0f}"
    return line if one.expected_tokens_per_s is None else f"{line} ({one.expected_tokens_per_s:,.0f} by its products)"


def _chosen(found: LayerRanking) -> str:
    if found.chosen is None:
        return "nothing: no set that was tried is near enough"
    looks = f" (confirmed at look {found.looks})" if found.looks > 1 else ""
    return (", ".join(found.chosen) if found.chosen else "nothing: int8 alone is near enough") + looks


def _figure(one: Damage) -> Interval:
    return one.rel_error if one.kl is None else one.kl


def _interval(interval: Interval) -> str:
    return f"[{interval.low:.2e}, {interval.high:.2e}]"
