"""Regions compiled once into a file give the plain decoder's states, for any number of rows, and only where they may.

Everything here is compiled for this machine's CPU by the functions that compile for a card; what only a card can show
is whether its kernels (Triton's) agree as the CPU's do.
"""

import gc
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_rig import batch, loaded, positions_of, runtime, states
from test_packed_decoder import LONGEST, ROWS, Tiny, distance, write_tiny

from extract.cuda import packaged_regions
from extract.cuda.ahead_of_time import compile_regions, seen_variants
from extract.cuda.packaged_regions import (
    Code,
    Compiled,
    CompiledCodeUnreadable,
    CompiledForAnother,
    bind_regions,
    here,
)
from extract.cuda.region_variants import layout, regions_of, signature
from extract.cuda.regions import Region, Round, fuse, same_code
from extract.cuda.runtime import CudaRuntime
from extract.cuda.trusted_code import CodeNotTrusted, check_trusted, trust
from extract.engine.contract import COMPILED_FILE

CPU = torch.device("cpu")
MAX_ROWS = 100_000


def passes(decoder: Any) -> Callable[[], object]:
    """Every token and last tokens, of a few sequences."""
    found = batch([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]])
    cu_seqlens = torch.from_numpy(found.cu_seqlens)
    inputs = torch.from_numpy(found.input_ids), positions_of(cu_seqlens), cu_seqlens

    def run() -> None:
        for last in (False, True):
            decoder(*inputs, 8, last=last)

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", {})


COMPILED = ("heads", "addandread", "gated")
"""Regions that are compiled here: ten seconds of a core each. Queries out of one product with keys, two tensors and an
operand with its scales come and go."""


@pytest.fixture(scope="module")
def compiled(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some regions of the FP8 decoder, compiled."""
    path = tmp_path_factory.mktemp("compiled") / COMPILED_FILE
    decoder = loaded(tiny, "fp8")
    every = seen_variants(decoder, passes(decoder))
    first = {name.partition("_")[0]: name for name in reversed(every)}
    compile_regions({first[kind]: every[first[kind]] for kind in COMPILED}, path, max_rows=MAX_ROWS)
    return path


def with_code(tiny: Tiny, path: Path) -> tuple[CudaRuntime, list[Region]]:
    """A runtime, and its regions that are compiled; the others stay plain."""
    found, codes = runtime(tiny, "fp8"), packaged_regions.load_codes(path, CPU)
    bound = [region for region in regions_of(found.decoder) if signature(region) in codes]
    for region in bound:
        region.forward = Compiled(region, codes[signature(region)])
    return found, bound


class TestVariants:
    def test_layers_share_code_whatever_their_weights_are(self, tiny: Tiny) -> None:
        decoder = loaded(tiny)
        first, second = decoder.layers[0], decoder.layers[1]
        assert signature(first.after_attention) == signature(second.after_attention)
        assert signature(first.query) != signature(first.key)
        variants = seen_variants(decoder, passes(decoder))
        assert len(variants) < len(list(regions_of(decoder))) / 2
        assert {signature(one.region) for one in variants.values()} == set(map(signature, regions_of(decoder)))

    def test_a_switch_or_a_size_makes_other_code(self, tiny: Tiny) -> None:
        region, other = loaded(tiny).layers[0].gated, loaded(tiny).layers[0].gated
        other.activation = "gelu"
        assert signature(region) != signature(other)
        assert signature(loaded(tiny, longest=30).layers[0].query) != signature(loaded(tiny).layers[0].query)
        assert signature(loaded(tiny, "bfloat16").embed) != signature(loaded(tiny).embed)

    def test_queries_beside_keys_and_queries_alone_are_two_variants(self, tiny: Tiny) -> None:
        decoder = loaded(tiny)
        names = [name for name in seen_variants(decoder, passes(decoder)) if name.startswith("heads_")]
        assert len(names) == 4


@pytest.mark.slow
class TestCompiled:
    @pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
    def test_its_states_are_the_plain_decoders(self, tiny: Tiny, compiled: Path, kind: str) -> None:
        found, _ = with_code(tiny, compiled)
        assert distance(states(found, kind=kind), states(runtime(tiny, "fp8"), kind=kind)) <= 2e-2

    @pytest.mark.parametrize("rows", [[[5]], [[5], [6]], [[5], [6], [7]], [[1] * LONGEST], [[1, 2]] * 33, ROWS * 4])
    def test_any_number_of_tokens_and_sequences_runs(self, tiny: Tiny, compiled: Path, rows: list[list[int]]) -> None:
        found, _ = with_code(tiny, compiled)
        assert distance(states(found, rows), states(runtime(tiny, "fp8"), rows)) <= 2e-2

    def test_compiled_code_runs_and_plain_lines_run_single_rows_and_other_layouts_alone(
        self, tiny: Tiny, compiled: Path
    ) -> None:
        found, bound = with_code(tiny, compiled)
        plain: list[tuple[str, int]] = []
        for region in bound:
            forward = region.forward
            assert isinstance(forward, Compiled)
            forward._plain = noting(plain, forward._plain, type(region).__name__)  # type: ignore[method-assign]
        states(found, ROWS)
        assert plain == []
        states(found, kind="last")  # queries of last tokens lie in a product of their own, which is not compiled here
        assert {name for name, _ in plain} == {"Heads"}
        plain.clear()
        states(found, [[5]])
        assert {rows for _, rows in plain} == {1} and len(plain) == len(bound)

    def test_the_file_holds_no_weights(self, tiny: Tiny, compiled: Path) -> None:
        decoder = loaded(tiny, "fp8")
        needles = [layer.after_attention.norm.weight.numpy().tobytes() for layer in decoder.layers]
        with zipfile.ZipFile(compiled) as file:
            for name in file.namelist():
                assert not any(needle in file.read(name) for needle in needles), name

    def test_code_that_lacks_a_region_of_the_decoder_is_refused(self, tiny: Tiny, compiled: Path) -> None:
        with pytest.raises(CompiledCodeUnreadable) as refused:
            bind_regions(loaded(tiny, "fp8"), compiled, here(CPU), CPU)
        assert str(refused.value) == (
            f"{compiled}: the compiled code cannot be used: it has none for Embed of this decoder. "
            "Build the engine again."
        )


def noting(seen: list[tuple[str, int]], run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def noted(*inputs: torch.Tensor) -> Any:
        seen.append((name, len(inputs[0])))
        return run(*inputs)

    return noted


def test_more_rows_than_code_was_compiled_for_are_run_plainly(tiny: Tiny) -> None:
    """Beyond them addresses may not fit in 32 bits."""
    region = loaded(tiny).embed
    called: list[int] = []
    ids = [torch.zeros(rows, dtype=torch.int32) for rows in (1, 2, 3, 4)]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        called.append(len(inputs[-1]))
        return [inputs[-1]]

    region.forward = Compiled(region, {layout((ids[0],)): Code(run=run, output="tensor", max_rows=3)})
    for one in ids:
        region(one)
    assert called == [2, 3]


def test_every_region_of_a_decoder_is_bound(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded(tiny)
    marks = set(map(signature, regions_of(decoder)))
    monkeypatch.setattr(packaged_regions, "load_codes", lambda path, device: {mark: {} for mark in marks})
    expected = states(runtime(tiny))
    found = runtime(tiny)
    assert bind_regions(found.decoder, tmp_path, here(CPU), CPU) == len(list(regions_of(decoder)))
    assert all(isinstance(region.forward, Compiled) for region in regions_of(found.decoder))
    assert np.array_equal(states(found), expected)


@pytest.mark.parametrize(("field", "value"), [("torch", "1.0"), ("compute capability", "12.0")])
def test_code_for_another_torch_or_card_is_refused_before_it_is_opened(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    monkeypatch.setattr(packaged_regions, "load_codes", None)
    with pytest.raises(CompiledForAnother) as refused:
        bind_regions(loaded(tiny), tmp_path, {**here(CPU), field: value}, CPU)
    found = here(CPU).get(field, "none")
    assert str(refused.value) == (
        f"{tmp_path}: its compiled code is for {field} {value}, here is {found}. Build the engine again here: "
        "extract build CHECKPOINT -o ENGINE --compile ahead (or --compile jit, which compiles at every start)"
    )


def test_a_file_that_is_no_code_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / COMPILED_FILE
    path.write_bytes(b"PK\3\4 and no more")
    with pytest.raises(CompiledCodeUnreadable) as refused:
        bind_regions(loaded(tiny), path, here(CPU), CPU)
    assert str(refused.value).startswith(f"{path}: the compiled code cannot be used: ")


def test_a_closed_runtime_gives_its_memory_back_at_once(tiny: Tiny) -> None:
    """The next engine may need it before anybody collects what refers to itself."""
    found = runtime(tiny)
    fuse(found.decoder.modules(), backend="eager")
    states(found, ROWS[:2])
    table = weakref.ref(found.decoder.embed.table)
    gc.collect()
    gc.disable()
    try:
        found.close()
        assert table() is None
    finally:
        gc.enable()


class TestTrust:
    DIGEST = "0123456789abcdef" * 4

    def test_code_of_elsewhere_is_refused_by_digest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("EXTRACT_TRUST_CODE", raising=False)
        with pytest.raises(CodeNotTrusted) as refused:
            check_trusted(tmp_path / "regions.pt2", self.DIGEST, tmp_path)
        assert "EXTRACT_TRUST_CODE=0123456789ab;" in str(refused.value)

    def test_code_that_was_made_here_runs_here(self, tmp_path: Path) -> None:
        trust(self.DIGEST, tmp_path)
        check_trusted(tmp_path, self.DIGEST, tmp_path)
        with pytest.raises(CodeNotTrusted):
            check_trusted(tmp_path, self.DIGEST[::-1], tmp_path)

    @pytest.mark.parametrize(
        ("named", "runs"),
        [
            (DIGEST, True),
            (DIGEST[:12], True),
            (f"ffff, {DIGEST[:12].upper()}", True),
            (DIGEST[:11], False),
            ("", False),
        ],
    )
    def test_code_that_the_user_named_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, runs: bool
    ) -> None:
        monkeypatch.setenv("EXTRACT_TRUST_CODE", named)
        if runs:
            check_trusted(tmp_path, self.DIGEST, tmp_path)
        else:
            with pytest.raises(CodeNotTrusted):
                check_trusted(tmp_path, self.DIGEST, tmp_path)


def test_the_compiler_never_chooses_the_order_of_a_sum_by_time() -> None:
    """Kernels that are timed against each other differ in their last bits."""
    assert same_code().get("deterministic") is True
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "compile", lambda forward, **options: given.update(options) or forward)
        fuse([Round(torch.bfloat16)])
    assert given["options"] == same_code() and given["backend"] == "inductor"
