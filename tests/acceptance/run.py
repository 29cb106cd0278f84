"""The acceptance run on a card: `python tests/acceptance/run.py FOLDER` after `make_reference.py FOLDER`.

Builds small engines with the installed TensorRT-LLM and asks what no documentation answers: are the states right for
several rows of unequal length, is the last row of every token's output the output after the gather bit for bit, do
logits stay what they are when our output is added, does an engine without a head give the same states, and does the
executor's. Prints a line for each and ends with one line of JSON. Exit codes: 0 all right or skipped with the reason,
1 something is wrong.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

LENGTHS = (1, 7, 128, 50)
DTYPE = "float16"
TOLERANCE = 3e-2
"""Relative to the largest value of a row. Random weights make the most of every rounding: float16 gives about 1e-2."""


@dataclasses.dataclass
class Check:
    """One question and its answer."""

    question: str
    right: bool
    seen: str


def reason_to_skip() -> str | None:
    """Why there is nothing to accept here; `None`: there is."""
    from extract.errors import ExtractError
    from extract.tensorrt.cuda_card import claim_card
    from extract.tensorrt.gate import check_vendor

    try:
        check_vendor("build", "run")
        claim_card(None, "the acceptance run").close()
    except ExtractError as error:
        return str(error)
    return None


def accept(folder: Path) -> Iterator[Check]:
    """Build, run and compare."""
    from extract.engine.replay import states_of
    from extract.engine.runtimes import load_runtime

    work = folder / "engines"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    reference = load_runtime(folder / "engine")
    rows = _rows(reference.contract.checkpoint.vocab_size)
    expected = states_of(reference, rows)
    reference.close()

    tokens = _build(folder, work / "tokens", keep_head=True)
    yield Check("an engine is built, and its own proof holds", True, _proof(tokens))
    runtime = load_runtime(work / "tokens")
    together = states_of(runtime, rows)
    alone = [states_of(runtime, [row])[0] for row in rows]
    yield _near("4 rows of 1, 7, 128 and 50 tokens in one pass equal the reference", together, expected)
    yield _near("each row by itself equals the reference", alone, expected)
    every = runtime.hidden_states(_batch(rows), "tokens")
    last_rows = every[np.cumsum([len(row) for row in rows]) - 1]
    pooled = runtime.hidden_states(_batch(rows), "last")
    runtime.close()
    yield _equal("the last token's states, taken on the card, are rows of every token's", pooled, last_rows)

    _build(folder, work / "last", states="last")
    runtime = load_runtime(work / "last")
    gathered = runtime.hidden_states(_batch(rows), "last")
    runtime.close()
    yield _equal("the output after the gather, without a head, equals those rows bit for bit", gathered, last_rows)

    _build(folder, work / "headless")
    runtime = load_runtime(work / "headless")
    without = runtime.hidden_states(_batch(rows), "tokens")
    runtime.close()
    yield _equal("every token's states without a head equal those with it bit for bit", without, every)

    _build_plain(folder, work / "plain")
    with_output, plain = _logits(work / "tokens", rows, tokens), _logits(work / "plain", rows, tokens)
    yield _equal("logits with our output equal those of the vendor's own engine bit for bit", with_output, plain)

    sizes = {name: (work / name / "rank0.engine").stat().st_size for name in ("tokens", "headless")}
    yield Check(
        "an engine without a head is smaller",
        sizes["headless"] < sizes["tokens"],
        f"{sizes['headless']:,} bytes against {sizes['tokens']:,}",
    )
    yield from _paged(folder, work, rows, expected)


def _paged(folder: Path, work: Path, rows: list[list[int]], expected: list[Any]) -> Iterator[Check]:
    """The executor; a release without additional outputs in its bindings has none of it."""
    from extract.engine.replay import states_of
    from extract.engine.runtimes import load_runtime
    from extract.errors import ExtractError
    from extract.tensorrt.gate import check_vendor

    question = "the executor, with a paged cache and one token, gives the reference's states"
    try:
        check_vendor("executor")
    except ExtractError as error:
        yield Check(question, True, f"not in this release: {error}")
        return
    _build(folder, work / "paged", cache="paged")
    runtime = load_runtime(work / "paged")
    yield _near(question, states_of(runtime, rows), expected)
    runtime.close()


def _build(folder: Path, output: Path, **settings: Any) -> Any:
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    recipe = Recipe(runtime="tensorrt-llm", dtype=DTYPE, max_sequences=16, pass_tokens=1024, **settings)
    return build(folder / "checkpoint", output, recipe, reference=folder / "engine")


def _build_plain(folder: Path, output: Path) -> None:
    """The vendor's own class, as nobody changed it, with the same settings."""
    from tensorrt_llm.models import MODEL_MAP

    from extract.engine.recipe import Recipe
    from extract.engine.tensorrt_builder import limits_on, open_source
    from extract.tensorrt import vendor_build
    from extract.tensorrt.cuda_card import claim_card
    from extract.tensorrt.gate import check_vendor

    recipe = Recipe(runtime="tensorrt-llm", dtype=DTYPE, max_sequences=16, pass_tokens=1024, keep_head=True)
    source = open_source(folder / "checkpoint", recipe)
    card = claim_card(None, "the acceptance run")
    try:
        limits = limits_on(card, source, recipe)
        release = check_vendor("build").tensorrt_llm
        output.mkdir()
        vendor_build.convert(source.path, DTYPE, output / "checkpoint", release)
        with mock.patch.object(vendor_build, "marked_class", lambda architecture, **_: MODEL_MAP[architecture]):
            vendor_build.build_engine(
                output / "checkpoint", recipe, source.shape, limits, output, output / "checkpoint", release
            )
    finally:
        card.close()


def _logits(directory: Path, rows: list[list[int]], contract: Any) -> np.ndarray:
    """float32 [B, V] of an engine with a head, run by hand."""
    import torch
    from tensorrt_llm._utils import trt_dtype_to_torch
    from tensorrt_llm.runtime.session import Session, TensorInfo

    from extract.tensorrt.cuda_card import claim_card
    from extract.tensorrt.engine_inputs import INPUTS, fixed_inputs, pass_values

    card = claim_card(None, directory)
    try:
        session = Session.from_serialized_engine((directory / "rank0.engine").read_bytes())
        engine, batch, stream = session.engine, _batch(rows), card.stream()
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        listed = tuple(name for name in names if name in INPUTS)
        inputs = dict(
            fixed_inputs(
                listed,
                num_layers=contract.checkpoint.num_layers,
                max_input_tokens=contract.limits.max_input_tokens,
            )
        )
        for name in (name for name in listed if name not in inputs):
            value = torch.from_numpy(pass_values(batch)[name].astype(INPUTS[name].dtype))
            if INPUTS[name].place == "card":
                staged = card.pinned(tuple(value.shape), value.dtype)
                staged.copy_(value)
                inputs[name] = card.empty(tuple(value.shape), value.dtype)
                stream.copy(inputs[name], staged)
                stream.synchronize()
            else:
                inputs[name] = value
        given = [
            TensorInfo(name=name, dtype=engine.get_tensor_dtype(name), shape=tuple(tensor.shape))
            for name, tensor in inputs.items()
        ]
        outputs = {
            info.name: card.empty(tuple(info.shape), trt_dtype_to_torch(info.dtype))
            for info in session.infer_shapes(given)
        }
        assert session.run(inputs, outputs, stream.handle)
        logits = card.pinned(tuple(outputs["logits"].shape), outputs["logits"].dtype)
        stream.copy(logits, outputs["logits"])
        stream.synchronize()
        return np.array(logits.float().numpy())
    finally:
        card.close()


def _rows(vocabulary: int) -> list[list[int]]:
    draw = np.random.Generator(np.random.PCG64(1))
    return [draw.integers(0, vocabulary, length).tolist() for length in LENGTHS]


def _batch(rows: list[list[int]]) -> Any:
    from extract.records import TokenBatch

    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    ids = np.concatenate([np.array(row, np.int32) for row in rows])
    return TokenBatch(input_ids=ids, cu_seqlens=bounds, members=np.arange(len(rows), dtype=np.int64))


def _near(question: str, found: list[Any], expected: list[Any]) -> Check:
    errors = [
        float(np.abs(one - other).max() / np.abs(other).max()) for one, other in zip(found, expected, strict=True)
    ]
    return Check(
        question,
        max(errors) <= TOLERANCE,
        f"largest relative error {max(errors):.1e}, at most {TOLERANCE:.0e} expected",
    )


def _equal(question: str, found: np.ndarray, expected: np.ndarray) -> Check:
    different = int((found != expected).sum()) if found.shape == expected.shape else -1
    seen = "equal" if different == 0 else f"{different:,} of {expected.size:,} values differ"
    return Check(question, different == 0, seen)


def _proof(contract: Any) -> str:
    proof, seen = contract.proof, contract.fidelity
    return (
        f"tensorrt-llm {contract.runtime.version}, TensorRT {contract.runtime.tensorrt}, {contract.device.name}: "
        f"neighbour {proof.neighbour:.1e}, moved {proof.moved:.1e}, relative error {seen.rel_error_max:.1e}"
    )


def main(folder: Path) -> int:
    """Print what was seen; returns the exit code."""
    skipped = reason_to_skip()
    if skipped is not None:
        print(f"skipped: {skipped}")
        print(json.dumps({"skipped": skipped}))
        return 0
    checks = []
    for check in accept(folder):
        print(f"{'ok   ' if check.right else 'WRONG'} {check.question}: {check.seen}", flush=True)
        checks.append(check)
    right = all(check.right for check in checks)
    print(json.dumps({"right": right, "checks": [dataclasses.asdict(check) for check in checks]}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
