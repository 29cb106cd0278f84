"""The results as text: a line for each thing measured, with the share of the limit that binds it."""

from typing import Any

UNITS = {"flops": 1e12, "bytes": 1e9}


def heading(about: dict[str, Any]) -> str:
    """What was measured on, and what to mistrust."""
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in about["versions"].items())
    lines = [
        f"device     {about.get('card', about['device'])}  {about['host']}, {about['host_memory_gib']} GiB",
        f"versions   Python {about['python']}, CUDA {about['cuda']}, {versions}",
        f"commit     {about['commit']}, {about['date']}",
    ]
    if "card" in about:
        smi = ", ".join(f"{name} {value}" for name, value in about["smi"].items())
        lines.insert(
            1,
            f"card       capability {about['compute_capability']}, {about['multiprocessors']} multiprocessors, "
            f"{about['free_gib']} of {about['memory_gib']} GiB free; {smi or 'no nvidia-smi'}",
        )
    lines += [f"warning    {warning}" for warning in about["warnings"]]
    return "\n".join(lines)


def part(name: str, found: dict[str, Any], parts: dict[str, Any]) -> str:
    """One part, as soon as it is done."""
    lines = [f"== {name} ({found['seconds']} s{_clock(found.get('card', {}))})"]
    if "failed" in found:
        return "\n".join([*lines, f"   failed: {found['failed']}"])
    kind = name.partition(":")[0]
    writers = {
        "numbers": _numbers,
        "products": _products,
        "copies": _copies,
        "ours": _ours,
        "transformers": _transformers,
    }
    lines += writers.get(kind, _plain)(found, name, parts)
    return "\n".join(lines)


def text(results: dict[str, Any]) -> str:
    """All of it."""
    parts = [part(name, found, results["parts"]) for name, found in results["parts"].items()]
    return "\n".join([heading(results["card"]), *parts, rest(results)])


def rest(results: dict[str, Any]) -> str:
    """What is missing here, and what time cut off."""
    lines = [f"missing    {name}: {reason}" for name, reason in results["missing"].items()]
    lines += [f"cut off    {what}" for what in results["cut_off"]]
    lines.append(f"in all     {results.get('seconds', '?')} s")
    return "\n".join(lines)


def _clock(seen: dict[str, float]) -> str:
    if not seen:
        return ""
    return (
        f"; {seen.get('clocks.sm', 0):.0f} MHz (least {seen.get('clocks.sm.least', 0):.0f}), "
        f"{seen.get('power.draw', 0):.0f} W, {seen.get('temperature.gpu', 0):.0f} C"
    )


def _numbers(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    lines = []
    for engine, seen in found["engines"].items():
        if "missing" in seen:
            lines.append(f"   {engine:24} not here: {seen['missing']}")
            continue
        word = "right" if seen["right"] else "WRONG: do not believe any speed below"
        lines.append(
            f"   {engine:24} relative error {seen['tokens']:.1e} every token, {seen['last']:.1e} last, "
            f"{seen['alone_against_together']:.1e} alone against together; at most {seen['bound']:.0e}: {word}"
            + (f" ({seen['note']})" if seen.get("note") else "")
        )
    return lines


def _products(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    lines = []
    for kind, seen in found.items():
        if not isinstance(seen, dict) or kind == "card":
            continue
        if "missing" in seen:
            lines.append(f"   {kind:10} not here: {seen['missing']}")
            continue
        lines.append(f"   {kind:10} square {seen['square']['best'] / 1e12:8.1f} TFLOP/s")
        for model, rates in seen["models"].items():
            if "missing" in rates:
                lines.append(f"   {kind:10} {model}: {rates['missing']}")
                continue
            each = ", ".join(f"{linear} {rate / 1e12:.1f}" for linear, rate in rates["flops"].items())
            lines.append(f"   {kind:10} {model:12} {each} TFLOP/s -> at most {rates['tokens_per_s']:,.0f} tokens/s")
    return lines


def _copies(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    return [
        f"   {way:28} {rate / 1e9:8.2f} GB/s" for way, rate in found.items() if isinstance(rate, float) and rate > 1e3
    ]


def _ours(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    model = name.partition(": ")[2]
    lines = [f"   skipped: {found['skipped']}"] if "skipped" in found else []
    for precision, seen in found.get("engines", {}).items():
        if "missing" in seen:
            lines.append(f"   {precision:9} not here: {seen['missing']}")
            continue
        if "failed" in seen:
            lines.append(f"   {precision:9} failed: {seen['failed']}")
        if "rates" not in seen:
            continue
        limit = ceiling(parts, model, precision)
        loaded = f"loaded in {seen['load_s']:.2f} s, first batch after {seen['first_batch_s']:.1f} s"
        passes = f"passes of {seen['pass_tokens']:,} tokens, batches of {seen['batch_tokens']:,}"
        lines.append(f"   {precision:9} {loaded}, {seen['weights_gib']:.2f} GiB of weights; {passes}")
        lines += [f"   {precision:9} {seen['note']}"] if seen.get("note") else []
        for label, rate in seen["rates"].items():
            share = f", {100 * rate / limit:5.1f} % of its products' ceiling" if limit and "shared" not in label else ""
            lines.append(f"   {precision:9} {label:30} {rate:12,.0f} tokens/s{share}")
        sweep = "  ".join(f"{int(size):,}: {rate:,.0f}" for size, rate in seen.get("by_pass_tokens", {}).items())
        if sweep:
            lines.append(f"   {precision:9} by tokens of a pass   {sweep}")
        sweep = "  ".join(f"{int(size):,}: {rate:,.0f}" for size, rate in seen.get("by_batch_tokens", {}).items())
        if sweep:
            lines.append(f"   {precision:9} by tokens of a batch  {sweep}")
        if seen.get("memory"):
            memory = seen["memory"]
            lines.append(
                f"   {precision:9} memory {memory['measured'] / 2**30:.2f} GiB at most, "
                f"{memory['expected'] / 2**30:.2f} GiB expected by the model of it"
            )
    return lines


def ceiling(parts: dict[str, Any], model: str, precision: str) -> float | None:
    """Tokens/s that this card's products allow a model."""
    kind = {"bfloat16": "bfloat16", "fp8": "fp8"}.get(precision)
    seen = parts.get("products", {}).get(kind, {}) if kind else {}
    rate = seen.get("models", {}).get(model, {}).get("tokens_per_s")
    return None if rate is None else float(rate)


def _transformers(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    lines = []
    for rows in ("full", "mixed"):
        seen = found.get(rows)
        if not seen:
            continue
        for way, rate in sorted(seen["ways"].items(), key=lambda one: -one[1])[:4]:
            lines.append(f"   {rows:6} {way:40} {rate:12,.0f} tokens/s")
        lines += [f"   {rows:6} {way}: not here: {why}" for way, why in seen["missing"].items()]
        if "tokens_per_s" not in seen:
            continue
        line = f"   {rows:6} transformers at its best {seen['tokens_per_s']:12,.0f} tokens/s"
        for precision, rate in found.get("ours", {}).get(rows, {}).items():
            line += f"; ours {precision} {rate:,.0f} ({rate / seen['tokens_per_s']:.2f} x)"
        lines.append(line)
    return lines


def _plain(found: dict[str, Any], name: str, parts: dict[str, Any]) -> list[str]:
    return [f"   {key:28} {_shown(value)}" for key, value in found.items() if key not in ("seconds", "card")]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)
