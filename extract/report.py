"""Results as people read them and as JSON, on stdout. Every command's result goes through `emit`.

Knows the results' shapes but imports none of the modules that make them, so that showing help stays cheap.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from extract.errors import OutOfSpace
from extract.progress import duration

if TYPE_CHECKING:
    from extract.derivation import Derived
    from extract.embedding import Embedded
    from extract.engine.build_plan import BuildPlan
    from extract.engine.contract import Contract, Fidelity
    from extract.engine.families import Family
    from extract.exporting.export import Exported
    from extract.inspection import Inspection
    from extract.jobs import PlannedJob
    from extract.quantizing import Quantized
    from extract.runners.finalizing import Finalized
    from extract.runners.stripes import StripeSummary
    from extract.runners.summary import Summary, WorkerPart
    from extract.spec import StatesSpec
    from extract.status import Status
    from extract.verification import Verification

T = TypeVar("T")


class NotPrinted(OutOfSpace):
    """The result of a command that did its work could not be written to stdout."""

    template = "the command is done, but its result cannot be written to stdout: {problem}."


def emit(result: T, text: Callable[[T], str], as_json: bool) -> None:
    """Print a result on stdout: one JSON document, or the text that `text` makes of it.

    Raises:
        NotPrinted: stdout is a file on a full disk, say. A closed pipe stays a `BrokenPipeError`.
    """
    out = sys.stdout
    if out is None:  # closed by who started us
        return
    unicode = (out.encoding or "").lower().startswith("utf")
    shown = json.dumps(_plain(result), indent=1, ensure_ascii=not unicode, default=str) if as_json else text(result)
    try:
        out.write(shown + "\n")
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # or Python tries, and fails, to flush it at exit
        raise NotPrinted(problem=error.strerror) from None


def plan_text(found: "PlannedJob") -> str:
    """A plan."""
    cost, engine, states = found.estimate, found.engine, found.spec.states
    about = "" if cost.exact else "about "
    rows = "a stream of unknown length" if cost.num_rows is None else f"{cost.num_rows:,}"
    shape = "every token's state" if states.kind == "tokens" else f"one state a row ({states.kind})"
    sample = "all rows read" if cost.exact else f"from {cost.sampled_rows:,} sampled rows"
    lines = [
        f"job        {found.job}",
        f"engine     {engine['checkpoint']} ({engine['architecture']}), {engine['precision']} on {engine['device']}, "
        f"{engine['layout']}",
        f"output     {shape}, width {engine['width']:,}, {states.dtype}, {_compression(found)}",
        *_layers(states),
        f"limits     {found.spec.text.max_input_tokens:,} tokens a row; {found.spec.run.max_tokens:,} tokens, "
        f"{found.spec.run.max_sequences:,} sequences a pass",
        *_passes(engine["limits"]),
        f"rows       {rows}"
        + (f" in {cost.num_shards:,} shards of {cost.rows_per_shard:,}" if cost.num_shards else ""),
        f"outcomes   {_counts(cost.outcomes)}  ({sample})",
        f"tokens     {about}{cost.num_tokens:,} of {cost.num_tokens_original:,}",
        f"bytes      about {_size(cost.num_bytes)}; {_size(cost.free_bytes)} free",
    ]
    if cost.seconds is not None:
        lines.append(
            f"time       about {duration(cost.seconds)} at the {engine['tokens_per_s']:,.0f} tokens/s seen at build"
        )
    if cost.doubled_bos:
        lines.append(f"warning    {cost.doubled_bos:,} rows begin with two beginning-of-sequence tokens")
    if cost.example is not None:
        example = cost.example
        lines += [
            f"example    row {example.row}, {example.outcome}, {len(example.input_ids)} tokens",
            f"  text     {_cut(repr(example.text), 200)}" if example.text is not None else "  text     (ids given)",
            f"  ids      {_ends(list(example.input_ids))}",
        ]
        if example.pieces:
            lines.append(f"  pieces   {_ends([repr(piece) for piece in example.pieces])}")
    return "\n".join(lines)


def _layers(states: "StatesSpec") -> list[str]:
    if not states.layers:
        return []
    lines = [
        f"layers     {', '.join(map(str, states.layers))} beside it, of the same shape and type: the residual stream "
        "after so many decoder layers"
    ]
    if states.dtype == "float16":
        lines.append(
            "note       a residual stream may exceed float16's 65,504, and its row then ends as non_finite; "
            "--dtype bfloat16 holds it"
        )
    return lines


def summary_text(found: "Summary") -> str:
    """The end of a run."""
    total = found.totals
    lines = [f"complete   {found.path}: {total.num_rows:,} rows in {total.num_shards:,} shards (job {found.job})"]
    lines += _totals_lines(total)
    if found.num_shards_made:
        shares = ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in found.stage_shares.items())
        lines.append(
            f"this run   {found.num_shards_made:,} shards, {found.tokens_computed:,} tokens in "
            f"{duration(found.seconds)}: {found.tokens_per_s:,.0f} tokens/s ({shares})"
        )
    else:
        lines.append("this run   nothing to do, every shard was committed before")
    lines += _workers(found.workers)
    lines.append(f"next       extract verify {found.path}    |    python: extract.open_output({found.path!r})")
    return "\n".join(lines)


def embedded_text(found: "Embedded") -> str:
    """Embeddings: what was taken from where, and the end of the run."""
    lines = [f"{one.name:<16} {_cut(repr(one.value), 200)}  ({one.origin})" for one in found.settings]
    return "\n".join([*lines, *found.notes, summary_text(found.summary)])


def stripe_text(found: "StripeSummary") -> str:
    """The end of one worker of an array job."""
    done = found.num_shards - found.num_shards_left
    lines = [
        f"worker     {found.worker_index} of {found.worker_count}: {done:,} of its {found.num_shards:,} shards are "
        f"committed in {found.path} (job {found.job})"
    ]
    if found.num_shards_made:
        lines.append(
            f"this run   {found.num_shards_made:,} shards, {found.num_rows:,} rows, {found.tokens_computed:,} tokens "
            f"in {duration(found.seconds)}: {found.tokens_per_s:,.0f} tokens/s"
        )
    else:
        lines.append("this run   made no shard")
    if found.num_shards_left:
        lines.append(f"left       {found.num_shards_left:,} shards that another process holds")
    lines += _workers(found.workers)
    lines.append(f"next       extract finalize {found.path}    when all workers have ended")
    return "\n".join(lines)


def finalized_text(found: "Finalized") -> str:
    """A job that is complete now."""
    total = found.totals
    return "\n".join(
        [
            f"complete   {found.path}: {total.num_rows:,} rows in {total.num_shards:,} shards (job {found.job})",
            *_totals_lines(total),
            f"next       extract verify {found.path}    |    python: extract.open_output({found.path!r})",
        ]
    )


def _workers(parts: "tuple[WorkerPart, ...]") -> list[str]:
    return [
        f"worker {part.worker:<3} {part.node}, {part.device}: {part.num_shards:,} shards, {part.num_rows:,} rows, "
        f"{part.tokens_per_s:,.0f} tokens/s, idle {100 * part.idle_share:.0f} %"
        + (f", started {part.num_starts} times" if part.num_starts > 1 else "")
        for part in parts
    ]


def status_text(found: "Status") -> str:
    """The state of an output directory."""
    total = found.done
    shards = "?" if found.num_shards is None else f"{found.num_shards:,}"
    rows = "?" if found.num_rows is None else f"{found.num_rows:,}"
    state = "complete" if found.complete else f"incomplete: {found.problem}"
    lines = [
        f"job        {found.job} in {found.path}: {state}",
        f"shards     {total.num_shards:,} of {shards}, rows {total.num_rows:,} of {rows}",
        *_totals_lines(total),
        f"busy       {_busy(found.busy_seconds)}",
        f"disk       {_size(found.free_bytes)} free; {found.num_temporary} temporary files",
    ]
    if not found.complete:
        lines.append("next       the same `extract run` command again goes on")
    return "\n".join(lines)


def _busy(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return "not in what was read (commit records say it, a manifest does not)"
    return ", ".join(f"{stage} {duration(spent)}" for stage, spent in seconds.items()) or "0 s"


def build_plan_text(found: "BuildPlan") -> str:
    """What a build would make."""
    precision = found.dtype if found.weights == found.dtype else f"{found.weights} products, {found.dtype} states"
    of = "every token's state" if found.states == "tokens" else "the last token's state"
    lines = [
        f"engine     {found.checkpoint} ({found.architecture}), {precision}, by {found.runtime} on {found.device}",
        f"output     {of}, width {found.hidden_size:,}; cache {found.cache}",
        f"limits     {found.max_input_tokens:,} tokens a row; batches of {found.max_tokens:,} tokens, passes of "
        f"{found.pass_tokens:,} tokens and {found.max_sequences:,} sequences",
        f"bound by   {found.binding}",
    ]
    if found.width is not None and found.element_limit is not None:
        lines.append(
            f"widest     {found.widest}: {found.width:,} elements a token, so TensorRT takes at most "
            f"{found.element_limit:,} tokens"
        )
    memory = {name: size for name, size in found.memory.items() if name != "total"}
    total = found.memory.get("total")
    lines += [
        f"{'memory' if not place else '':<11}{name:<12}{_gib(size):>10}"
        for place, (name, size) in enumerate(memory.items())
    ]
    if total is not None:
        lines.append(f"{'':<11}{'total':<12}{_gib(total):>10} of {_gib(found.card_bytes or 0)}, by estimate")
    if found.disk_bytes is not None:
        lines.append(f"{'disk':<11}{'weights':<12}{_gib(found.disk_bytes):>10}")
    if found.host_bytes is not None:
        lines.append(f"host       {_gib(found.host_bytes)} page-locked beside the card")
    if found.tiers:
        lines.append(f"tiers      {', '.join(f'{budget:,}' for budget in found.tiers)} tokens a pass (--tiers)")
    return "\n".join(lines)


def quantized_text(found: "Quantized") -> str:
    """A quantised checkpoint."""
    return "\n".join(
        [
            f"checkpoint {found.path}: {found.name} with {found.weights} linears, the rest in {found.dtype}, "
            f"{_size(found.num_bytes)}",
            f"calibrated {found.num_rows:,} rows of {found.calibration}; cache {found.cache}",
            f"next       extract build {found.path} --runtime tensorrt-llm -o ENGINE",
        ]
    )


def tiers_text(built: Mapping[Path, "Contract"]) -> str:
    """Engines of one checkpoint, by the size of their passes."""
    lines = [f"{'tokens a pass':>14} {'on the card':>12} {'tokens/s':>10}  engine"]
    for path, contract in built.items():
        limits = contract.limits
        memory = "?" if limits.memory_bytes is None else _gib(limits.memory_bytes)
        lines.append(f"{limits.pass_tokens or 0:>14,} {memory:>12} {contract.measured.tokens_per_s:>10,.0f}  {path}")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def _passes(limits: Mapping[str, Any]) -> list[str]:
    """How a runtime splits batches, where it does."""
    if limits["pass_tokens"] is None:
        return []
    memory = "" if limits["memory_bytes"] is None else f"; {_gib(limits['memory_bytes'])} on the card"
    return [f"passes     of up to {limits['pass_tokens']:,} tokens, bound by {limits['binding']}{memory}"]


def _next_token(fidelity: "Fidelity") -> str:
    if fidelity.kl_mean is None or fidelity.top1 is None:
        return ""
    return f"; next token: KL {max(fidelity.kl_mean, 0.0):.1e}, same first choice {fidelity.top1:.1%}"


def _measured(fidelity: "Fidelity") -> list[str]:
    """What `extract fidelity --write` found later."""
    seen = fidelity.measured
    if seen is None:
        return []
    line = f"measured   relative error {seen.rel_error_mean:.1e} on average over {seen.num_tokens:,} tokens of "
    line += f"{seen.num_rows:,} rows against {seen.checkpoint} in {seen.reference}"
    if seen.kl_mean is not None:
        line += f"; next token: KL {seen.kl_mean:.1e} [{seen.kl_low:.1e}, {seen.kl_high:.1e}], same first choice "
        line += f"{seen.top1:.1%}"
    return [line]


def _stored(contract: "Contract") -> str:
    """How the weights of an FP8 engine of our own decoder lie on the disk."""
    precision = contract.precision
    if contract.runtime.decoder != "own" or precision.activations != "fp8":
        return ""
    return " as fp8" if precision.weights == "fp8" else f" in {precision.weights}, rounded to fp8 by each load"


def contract_text(contract: "Contract", path: Path, kernels: str | None = None) -> str:
    """What an engine is, and which kernels of our own would compute here (`None`: none would)."""
    checkpoint, limits, tokenizer = contract.checkpoint, contract.limits, contract.tokenizer
    size = sum(file.size for file in contract.files)
    weights = sum(file.size for file in contract.files if file.name.endswith((".safetensors", ".engine")))
    lines = [
        f"engine     {path} (id {contract.engine_id[:16]}, {_size(size)}, of which weights {_size(weights)}"
        f"{_stored(contract)}, no head)",
        f"checkpoint {checkpoint.name} ({checkpoint.kind}, sha256 {checkpoint.sha256[:12]}): "
        f"{checkpoint.architecture}, {checkpoint.num_layers} layers, hidden size {checkpoint.hidden_size:,}, "
        f"stored in {checkpoint.dtype}",
        f"runs on    {contract.device.type} ({contract.device.name}"
        f"{', ' + contract.device.instruction_set if contract.device.instruction_set else ''}), "
        f"{contract.precision.described}, {contract.runtime.name} {contract.runtime.version}, "
        f"{contract.runtime.layout} layout",
        *([] if kernels is None else [f"kernels    {kernels}"]),
        f"limits     {limits.max_input_tokens:,} tokens a row, {limits.max_sequences:,} sequences and "
        f"{limits.max_tokens:,} tokens a {'pass' if limits.pass_tokens is None else 'batch'} (set by "
        f"{limits.binding}); cache {contract.cache}, {contract.generated_tokens} generated tokens",
        *_passes(asdict(limits)),
        f"state      output of {contract.output.module}, after the final norm, width {contract.output.width:,}; "
        f"the head's input is {contract.output.head_input}",
        f"tokenizer  {tokenizer.kind}"
        + (f", adds {list(tokenizer.prefix_ids)} ... {list(tokenizer.suffix_ids)}" if tokenizer.kind != "none" else ""),
        f"fidelity   relative error {contract.fidelity.rel_error_max:.1e} (worst row), cosine "
        f"{contract.fidelity.cosine_min:.6f} (worst token) against {contract.fidelity.reference} over "
        f"{contract.fidelity.num_tokens:,} tokens; bound {contract.fidelity.bound:.1e}{_next_token(contract.fidelity)}",
        *_measured(contract.fidelity),
        f"proof      neighbour {contract.proof.neighbour:.1e}, moved {contract.proof.moved:.1e}, "
        f"plain {contract.proof.plain:.1e}",
        f"speed      {contract.measured.tokens_per_s:,.0f} tokens/s at build",
    ]
    lines += [f"note       {note}" for note in checkpoint.notes]
    return "\n".join(lines)


def output_text(found: "Inspection") -> str:
    """What an output directory holds."""
    lines = [
        f"output     {found.path}: {found.num_rows:,} source rows, {found.num_rows_out:,} rows in {found.num_shards:,} "
        f"shards, {_size(found.num_bytes)} (job {found.job})",
        "columns",
        *(f"  {name:<22} {kind}" for name, kind in found.columns.items()),
        "metadata",
        *(f"  {key:<22} {_cut(_one_line(value), 160)}" for key, value in found.metadata.items()),
    ]
    if found.row is not None:
        lines.append("row")
        for key, value in found.row.items():
            shown = _ends(value) if isinstance(value, list) else _cut(repr(value), 160)
            lines.append(f"  {key:<22} {shown}")
    return "\n".join(lines)


def sample_text(found: Mapping[str, Any]) -> str:
    """A written sample."""
    return f"{found['path']}: {found['rows']:,} rows, columns {', '.join(found['columns'])}"


def verification_text(found: "Verification") -> str:
    """A passed verification."""
    state = "complete" if found.complete else "correct so far, not complete"
    lines = [
        f"verified   {found.path}: {state}; {found.num_rows:,} source rows, {found.num_rows_out:,} rows in "
        f"{found.num_shards:,} shards, {_size(found.num_bytes)}",
        "checked    hashes, sizes, schema, row order and count, outcomes, states per row, finite values"
        + (", tiling, manifest" if found.complete else ""),
    ]
    if found.recomputed:
        lines.append(
            f"recomputed {found.recomputed:,} rows with the plain model: largest relative error {found.worst:.1e}, "
            f"bound {found.recompute_bound:.1e}"
        )
    lines += [f"note       {note}" for note in found.notes]
    return "\n".join(lines)


def derived_text(found: "Derived") -> str:
    """An output made from another one."""
    return "\n".join(
        [
            f"complete   {found.path}: made from {found.made_from} without the model (job {found.job})",
            f"this run   {found.num_shards_made:,} shards in {duration(found.seconds)}",
            *_totals_lines(found.totals),
            f"next       extract verify {found.path}",
        ]
    )


def exported_text(found: "Exported") -> str:
    """An output as another tool reads it."""
    without = found.left_out_without_states
    lines = [
        f"complete   {found.path}: {found.rows:,} rows of {found.made_from} as {found.kind}, {_size(found.num_bytes)}",
        f"left out   {sum(without.values()):,} rows without states"
        + (f" ({_counts(without)})" if without else "")
        + f", {found.left_out_not_chosen:,} that were not asked for",
    ]
    mask = found.record.get("loss_mask")
    if mask is not None:
        lines.append(f"loss mask  {mask['learned']:,} of {mask['tokens']:,} tokens, from {mask['from']}")
        if mask["unknown_rows"]:
            lines.append(
                f"warning    {mask['unknown_rows']:,} rows have a mask of zeros: the chat template writes them "
                "differently as a whole than turn by turn"
            )
    if "states_left_over" in found.record:
        lines.append(f"left over  {found.record['states_left_over']:,} states at the ends of shards")
    lines += [f"this run   {found.parts_made:,} shards in {duration(found.seconds)}", "python"]
    return "\n".join([*lines, *(f"  {line}" for line in found.reading.splitlines())])


def families_text(families: Mapping[str, "Family"]) -> str:
    """The table of families."""
    counts: dict[str, int] = {}
    lines = []
    for family in families.values():
        counts[family.layout] = counts.get(family.layout, 0) + 1
        lines.append(f"{family.model_type:<28} {family.layout:<8} {family.bound:.0e}  {family.why}".rstrip())
    head = f"{'model_type':<28} {'layout':<8} {'bound':<6} why or condition"
    return "\n".join([head, *lines, ", ".join(f"{count} {layout}" for layout, count in sorted(counts.items()))])


def _totals_lines(total: Any) -> list[str]:
    kept = total.num_tokens_original
    lines = [
        f"outcomes   {_counts(total.outcomes)}",
        f"tokens     {total.num_tokens:,}" + (f" of {kept:,}" if kept > total.num_tokens else ""),
        f"bytes      {_size(total.num_bytes)} in {total.num_shards:,} files",
    ]
    if total.overflowed:
        lines.append(
            f"warning    {total.overflowed:,} rows have states too large for the stored type: they are non_finite. "
            "Store float32 or bfloat16 instead"
        )
    if total.doubled_bos:
        lines.append(f"warning    {total.doubled_bos:,} rows begin with two beginning-of-sequence tokens")
    return lines


def _compression(found: "PlannedJob") -> str:
    states = found.spec.states
    return f"zstd {states.compression_level}" if states.compression == "zstd" else f"compression {states.compression}"


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in outcomes.items()) or "no rows"


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _one_line(text: str) -> str:
    return " | ".join(text.splitlines())


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _ends(items: list[Any], shown: int = 8) -> str:
    if len(items) <= 2 * shown:
        return " ".join(map(str, items))
    return f"{' '.join(map(str, items[:shown]))} ... {' '.join(map(str, items[-shown:]))}"


def _plain(value: Any) -> Any:
    """As JSON knows values: numbers that are not finite, as a carried column may hold them, become null."""
    if hasattr(value, "as_json"):
        return _plain(value.as_json())
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
