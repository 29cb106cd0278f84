"""A comparison as people read it, within 100 columns."""

from extract.fidelity_check.results import FidelityReport, Group, Interval, Spread


def fidelity_text(found: FidelityReport) -> str:
    """Head, figures over all tokens, groups, what to make of it."""
    own = "the engine's own checkpoint" if found.own_checkpoint else "not the checkpoint that the engine was made from"
    lines = [
        f"engine     {found.engine} (id {found.engine_id[:16]}, {found.precision}, {found.arithmetic} kernels)",
        f"reference  {found.checkpoint} in {found.reference}, each row alone",
        f"           {own}",
        f"rows       {found.num_rows:,} rows, {found.num_tokens:,} tokens: {found.rows}",
        f"intervals  95 %, from {found.num_resamples:,} resamples of the rows (seed {found.seed})",
        "",
        f"{'all tokens':<20}{'mean':>10}  {'95 % interval':<22}{'median':>10}{'1 in 100':>10}{'worst':>10}",
        _spread("relative error", found.rel_error, ".2e"),
        _spread("cosine", found.cosine, ".6f"),
    ]
    if found.kl is not None and found.top1 is not None:
        lines.append(_spread("KL, nats", found.kl, ".2e"))
        lines.append(f"{'same first choice':<20}{found.top1.mean:>10.2%}  {_interval(found.top1, '.2%')}")
    lines += ["", *_groups("position", found.by_position), "", *_groups("row length", found.by_length), ""]
    lines.append(_what_differs(found))
    if found.num_non_finite:
        lines.append(f"broken     {found.num_non_finite:,} states are not finite; they are in no other figure")
    lines.append(
        f"worst row  differs by {found.worst_row:.1e} (largest value); the contract's bound is {found.bound:.1e}"
    )
    if found.no_head is not None:
        lines.append(f"no head    only states are compared: {found.no_head}")
    if found.max_kl is not None and found.kl is not None:
        lines.append(f"target     {_target(found.kl.mean, found.max_kl)}")
    lines += [f"note       {note}" for note in found.notes]
    lines.append(f"took       {found.seconds:,.0f} s")
    if found.written:
        lines.append("written    into the engine's contract; its id is the same")
    return "\n".join(lines)


def _spread(name: str, spread: Spread, form: str) -> str:
    cells = "".join(f"{value:>10{form}}" for value in (spread.median, spread.tail, spread.worst))
    return f"{name:<20}{spread.mean.mean:>10{form}}  {_interval(spread.mean, form):<22}{cells}"


def _interval(interval: Interval, form: str) -> str:
    return f"[{interval.low:{form}}, {interval.high:{form}}]"


def _groups(title: str, groups: tuple[Group, ...]) -> list[str]:
    with_head = any(group.kl is not None for group in groups)
    figure = "KL, nats" if with_head else "rel error"
    head = f"{title:<10}{'rows':>6}{'tokens':>9}{'rel error':>11}{'cosine':>10}"
    head += f"{'KL, nats':>10}" if with_head else ""
    head += f"  {f'95 % ({figure})':<21}" + (f"{'same':>8}" if with_head else "") + "  against all"
    lines = [head.rstrip()]
    for group in groups:
        line = f"{group.name:<10}{group.num_rows:>6,}{group.num_tokens:>9,}"
        line += f"{group.rel_error.mean:>11.2e}{group.cosine.mean:>10.6f}"
        if group.kl is not None and group.top1 is not None:
            line += f"{group.kl.mean:>10.2e}  {_interval(group.kl, '.2e'):<21}{group.top1.mean:>8.1%}"
        else:
            line += f"  {_interval(group.rel_error, '.2e'):<21}"
        lines.append(f"{line}  {'' if group.verdict == 'all' else group.verdict}".rstrip())
    return lines


def _what_differs(found: FidelityReport) -> str:
    figure = "relative error" if found.kl is None else "KL"
    return f"noise      the group's {figure} cannot be told from that of all tokens with these rows"


def _target(mean: Interval, target: float) -> str:
    side = "above" if mean.mean > target else "at most"
    within = "; the target lies within the interval: noise" if mean.holds(target) else ""
    return f"mean KL {mean.mean:.2e} is {side} {target:g}{within}"
