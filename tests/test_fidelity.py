"""`extract fidelity`: its figures against transformers and plain numpy, how sure they are, and what is refused."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job_rig
import numpy as np
import pyarrow as pa
import pytest
import rig
from command_line import extract
from job_rig import LIMIT, Engines, parquet

from extract.engine.checkpoint import open_checkpoint
from extract.engine.contract import read_contract
from extract.engine.decoder import load_decoder
from extract.engine.next_token import next_tokens
from extract.engine.probe import as_rows
from extract.engine.torch_causal_head import CausalHead, causal_head
from extract.engine.torch_runtime import PlainModel
from extract.errors import CheckpointRefused, EngineRefused, SourceError, SpecError
from extract.fidelity_check.intervals import summarise
from extract.fidelity_check.measure import TooFar, check, fidelity
from extract.fidelity_check.results import FidelityReport
from extract.fidelity_check.table import fidelity_text
from extract.fidelity_check.token_figures import TokenFigures
from extract.report import contract_text
from extract.sample import Passage
from extract.spec import SourceSpec

ROWS = 24


class PlainRuntime:
    """A runtime that is no engine of ours: the plain model's states, as `change` makes them, through the protocol."""

    arithmetic = "plain"

    def __init__(self, engine: Path, checkpoint: Path, change: Any = lambda states: states) -> None:
        self.contract = read_contract(engine)
        self._plain = _plain(str(checkpoint))
        self._change = change

    def hidden_states(self, batch: Any, kind: str) -> np.ndarray:
        rows = as_rows(batch.input_ids, batch.lengths.tolist())
        states = [self._change(self._plain.states(ids.tolist())) for ids in rows]
        return np.concatenate([one[-1:] if kind == "last" else one for one in states])

    def close(self) -> None:
        pass


@functools.cache
def _plain(checkpoint: str) -> PlainModel:
    return PlainModel(load_decoder(open_checkpoint(checkpoint), "float32").model)


@functools.cache
def causal_model(checkpoint: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True).eval()


def log_probabilities(checkpoint: Path, states: np.ndarray) -> np.ndarray:
    """float64 [L, V] from states, through the head of transformers' model alone (no scale, no cap)."""
    import torch

    with torch.inference_mode():
        logits = causal_model(str(checkpoint)).lm_head(torch.from_numpy(states)).double().numpy()
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


TEXTS = job_rig.texts(60)
PASSAGES = [Passage("", "", text) for text in TEXTS]


@pytest.fixture(scope="module", autouse=True)
def quick_passages() -> Iterator[None]:
    """Passages that are there in an instant: to parse the whole standard library takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extract.fidelity_check.rows.spread", lambda count: PASSAGES[:count])
        yield


@pytest.fixture(scope="module")
def noisy(engines: Engines) -> FidelityReport:
    return measured(engines, with_noise(0.05))


def with_noise(size: float) -> Any:
    def change(states: np.ndarray) -> np.ndarray:
        draw = np.random.default_rng(len(states))
        return states + size * np.abs(states).mean() * draw.standard_normal(states.shape).astype(np.float32)

    return change


def measured(engines: Engines, change: Any = lambda states: states, **options: Any) -> FidelityReport:
    """The report on a runtime that changes the plain model's states, for the GPT-2."""
    engine, checkpoint = engines.engine("gpt2"), engines.checkpoint("gpt2")
    options = {"runtime": PlainRuntime(engine, checkpoint, change), "rows": ROWS, **options}
    return fidelity(engine, checkpoint, **options)


def without_time(report: FidelityReport) -> FidelityReport:
    return dataclasses.replace(report, seconds=0.0)


HEADS = {
    "llama": {},
    "gpt2": {"tied": True},
    "gemma2": {"tied": True, "final_logit_softcapping": 2.0},
    "cohere": {"tied": True, "logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi": {},  # a bias
    "falcon_h1": {"lm_head_multiplier": 0.3},
    "gpt_neox": {},  # another name in the file
}


def opened_head(directory: Path) -> tuple[CausalHead | str, PlainModel]:
    opened = open_checkpoint(directory, allow_pickle=True)
    model = load_decoder(opened, "float32").model
    plain = PlainModel(model)
    return causal_head(model, opened, plain.states), plain


def real_logits(directory: Path, ids: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


class TestHead:
    @pytest.mark.parametrize("family", HEADS)
    def test_its_logits_are_those_of_the_family_s_own_model(self, family, tmp_path):
        rig.tiny_checkpoint(tmp_path, family, tokenizer=None, **HEADS[family])
        head, plain = opened_head(tmp_path)
        assert isinstance(head, CausalHead), head
        ids = list(range(4, 30))
        expected = real_logits(tmp_path, ids)
        assert np.abs(head.logits(plain.states(ids)) - expected).max() <= 1e-5 * np.abs(expected).max()
        assert head.vocab_size == rig.VOCAB_SIZE

    def test_half_precision_weights_are_multiplied_in_blocks_of_the_vocabulary(self, tmp_path, monkeypatch):
        from extract.engine import torch_causal_head

        monkeypatch.setattr(torch_causal_head, "VOCABULARY_BLOCK_BYTES", 4 * 64 * 7)
        rig.tiny_checkpoint(tmp_path, "phi", dtype="bfloat16", tokenizer=None)
        head, plain = opened_head(tmp_path)
        assert isinstance(head, CausalHead), head
        expected = real_logits(tmp_path, [5, 6, 7])
        assert np.abs(head.logits(plain.states([5, 6, 7])) - expected).max() <= 1e-5 * np.abs(expected).max()

    def test_a_stored_head_that_differs_from_the_embedding_counts_though_the_config_ties_them(self, tmp_path):
        rig.tiny_checkpoint(tmp_path, "llama", tokenizer=None)
        rig.edit_json(tmp_path / "config.json", {"tie_word_embeddings": True})
        head, plain = opened_head(tmp_path)
        assert isinstance(head, CausalHead), head
        expected = real_logits(tmp_path, [5, 6, 7])
        assert np.abs(head.logits(plain.states([5, 6, 7])) - expected).max() <= 1e-5 * np.abs(expected).max()

    def test_a_pickled_head_is_read_too(self, tmp_path):
        import torch

        rig.tiny_checkpoint(tmp_path, "llama", tokenizer=None)
        expected = real_logits(tmp_path, [5, 6, 7])
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        head, plain = opened_head(tmp_path)
        assert isinstance(head, CausalHead), head
        assert np.abs(head.logits(plain.states([5, 6, 7])) - expected).max() <= 1e-5 * np.abs(expected).max()

    def test_a_checkpoint_of_a_base_model_has_none(self, tmp_path):
        from transformers import AutoModel

        rig.tiny_checkpoint(tmp_path / "whole", "llama", tokenizer=None)
        AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
        assert opened_head(tmp_path / "base")[0] == "the checkpoint holds no lm_head.weight"

    def test_a_state_that_the_family_changes_before_its_head_is_seen(self, tmp_path):
        rig.tiny_checkpoint(tmp_path, "opt", tokenizer=None, word_embed_proj_dim=32)
        head, _ = opened_head(tmp_path)
        assert isinstance(head, str)


class GivenLogits:
    """A head whose states are the logits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def logits(self, states: np.ndarray) -> np.ndarray:
        return states.astype(np.float32)


def plain_kl(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    p, q = (logits.astype(np.float64) for logits in (expected, found))
    p, q = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (p, q))
    return (np.exp(p) * (p - q)).sum(axis=1)


class TestNextTokens:
    @pytest.mark.parametrize("noise", [3.0, 0.1, 1e-3])
    def test_the_divergence_is_that_of_plain_float64(self, noise):
        draw = np.random.default_rng(0)
        expected = (4 * draw.standard_normal((50, 700))).astype(np.float32)
        found = (expected + noise * draw.standard_normal(expected.shape)).astype(np.float32)
        seen = next_tokens(GivenLogits(700), found, expected)
        assert seen.kl == pytest.approx(plain_kl(expected, found), rel=2e-3)
        assert (seen.same == (expected.argmax(1) == found.argmax(1))).all()

    @pytest.mark.parametrize("block", [1, 4 * 700 * 2 * 7, 2**30])
    def test_blocks_change_nothing(self, block):
        draw = np.random.default_rng(0)
        expected, found = draw.standard_normal((2, 50, 700)).astype(np.float32)
        one, other = (next_tokens(GivenLogits(700), found, expected, logits_bytes=size) for size in (block, 2**20))
        assert (one.kl == other.kl).all()

    def test_the_same_states_diverge_by_exactly_nothing(self):
        logits = np.random.default_rng(0).standard_normal((9, 700)).astype(np.float32)
        assert (next_tokens(GivenLogits(700), logits, logits).kl == 0).all()

    def test_tokens_that_can_never_come_do_not_count(self):
        expected, found = np.random.default_rng(0).standard_normal((2, 5, 70)).astype(np.float32)
        some = next_tokens(GivenLogits(60), found[:, :60], expected[:, :60]).kl
        for impossible in (-np.inf, np.finfo(np.float32).min):
            expected[:, 60:] = found[:, 60:] = impossible
            assert next_tokens(GivenLogits(70), found, expected).kl == pytest.approx(some, rel=1e-5)

    def test_a_token_that_can_come_and_is_said_never_to_is_infinitely_far(self):
        expected = np.zeros((1, 4), np.float32)
        found = np.array([[0, 0, 0, -np.inf]], np.float32)
        assert next_tokens(GivenLogits(4), found, expected).kl == [np.inf]
        assert next_tokens(GivenLogits(4), expected, found).kl == pytest.approx([math.log(4 / 3)])


class TestFigures:
    def test_they_are_those_of_transformers_and_numpy(self, engines: Engines):
        checkpoint, change = engines.checkpoint("gpt2"), with_noise(0.05)
        report = measured(engines, change)
        ids = job_rig.ids_of(checkpoint, TEXTS[:ROWS])
        expected = job_rig.reference(checkpoint, ids)
        found = [change(states) for states in expected]
        p, q = (np.concatenate([log_probabilities(checkpoint, one) for one in rows]) for rows in (expected, found))
        kl, same = (np.exp(p) * (p - q)).sum(1), p.argmax(1) == q.argmax(1)
        one, other = (np.concatenate(rows).astype(np.float64) for rows in (found, expected))
        error = np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)
        cosine = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
        assert (report.num_rows, report.num_tokens) == (ROWS, len(kl))
        assert report.kl is not None
        assert report.top1 is not None
        near = functools.partial(pytest.approx, rel=1e-3)
        assert [report.kl.mean.mean, report.kl.median, report.kl.tail, report.kl.worst] == near(
            [kl.mean(), np.median(kl), np.quantile(kl, 0.99), kl.max()]
        )
        assert report.top1.mean == pytest.approx(same.mean())
        assert [report.rel_error.mean.mean, report.rel_error.tail, report.rel_error.worst] == near(
            [error.mean(), np.quantile(error, 0.99), error.max()]
        )
        assert [report.cosine.mean.mean, report.cosine.tail, report.cosine.worst] == near(
            [cosine.mean(), np.quantile(cosine, 0.01), cosine.min()]
        )
        positions = np.concatenate([np.arange(len(one)) for one in ids])
        lengths = np.concatenate([np.full(len(one), len(one)) for one in ids])
        for groups, numbers in ((report.by_position, positions), (report.by_length, lengths)):
            assert sum(group.num_tokens for group in groups) == len(kl)
            for group in groups:
                low, _, high = group.name.partition("-")
                mask = (numbers >= int(low)) & (numbers <= int(high or low))
                assert group.kl is not None
                assert group.num_tokens == mask.sum()
                assert group.kl.mean == near(kl[mask].mean())
                assert group.rel_error.mean == near(error[mask].mean())

    @pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
    def test_a_float32_engine_differs_by_rounding_alone(self, engines: Engines, name):
        engine, checkpoint = engines.engine(name), engines.checkpoint(name)
        report = fidelity(engine, checkpoint, rows=ROWS, runtime=job_rig.runtime(str(engine)))
        assert report.kl is not None
        assert report.top1 is not None
        assert report.kl.worst < 1e-9
        assert report.rel_error.worst < 1e-5
        assert report.top1.mean == 1
        assert report.own_checkpoint

    def test_the_plain_model_itself_differs_by_nothing(self, engines: Engines):
        report = measured(engines)
        assert report.kl is not None
        assert report.top1 is not None
        assert (report.kl.mean.mean, report.kl.mean.high, report.kl.worst) == (0, 0, 0)
        assert (report.rel_error.worst, report.worst_row, report.top1.low) == (0, 0, 1)
        assert report.cosine.worst == pytest.approx(1, abs=1e-12)
        assert {group.verdict for group in report.by_position} <= {"noise", "few rows"}

    @pytest.mark.parametrize(
        "change",
        [
            lambda states: np.roll(states, 1, axis=0),
            lambda states: states * np.float32(1.5),
            lambda states: np.where(np.arange(64) == 7, 0, states).astype(np.float32),
        ],
        ids=["shifted by a token", "scaled", "a dimension lost"],
    )
    def test_an_engine_that_is_broken_shows(self, engines: Engines, change):
        report = measured(engines, change, max_kl=1e-3)
        assert report.kl is not None
        assert report.kl.mean.low > 1e-3
        assert report.worst_row > report.bound
        with pytest.raises(TooFar):
            check(report)

    def test_an_engine_that_is_worse_at_later_tokens_is_worse_there_and_not_by_chance(self, engines: Engines):
        late = (np.arange(LIMIT)[:, None] >= 16).astype(np.float32)
        report = measured(engines, lambda states: states * (1 + 0.2 * late[: len(states)]), rows=len(TEXTS))
        verdicts = {group.name: group.verdict for group in report.by_position}
        assert verdicts == {"0": "lower", "1-3": "lower", "4-15": "lower", "16-63": "higher"}

    def test_windows_and_blocks_change_nothing(self, engines: Engines, noisy):
        small = measured(engines, with_noise(0.05), window_bytes=1, logits_bytes=1)
        for name in ("kl", "rel_error", "cosine", "top1"):
            one, other = (dataclasses.asdict(getattr(report, name)) for report in (small, noisy))
            flat = [
                [*part.pop("mean", {}).values(), *part.values()]
                if isinstance(part.get("mean"), dict)
                else list(part.values())
                for part in (one, other)
            ]
            assert flat[0] == pytest.approx(flat[1], rel=1e-4)
        assert [group.num_tokens for group in small.by_length] == [group.num_tokens for group in noisy.by_length]

    def test_a_state_that_is_not_finite_is_counted_and_fails_the_gate(self, engines: Engines):
        def broken(states: np.ndarray) -> np.ndarray:
            return np.where(np.arange(len(states))[:, None] == 3, np.nan, states).astype(np.float32)

        report = measured(engines, broken, max_kl=1.0)
        assert 0 < report.num_non_finite <= ROWS
        assert report.worst_row == math.inf
        assert report.kl is not None
        assert report.kl.worst == 0
        with pytest.raises(TooFar, match="states are not"):
            check(report)
        assert "broken     " in fidelity_text(report)
        before = (engines.engine("gpt2") / "contract.json").read_bytes()
        report = measured(engines, broken, write=True)
        assert (report.written, report.notes) == (False, ("not written into the contract: figures are not finite",))
        assert (engines.engine("gpt2") / "contract.json").read_bytes() == before

    def test_a_reference_without_finite_states_is_refused(self, engines: Engines, monkeypatch):
        nothing = np.full((1, 64), np.nan, np.float32)
        monkeypatch.setattr("extract.fidelity_check.reference.Reference.states", lambda *_: nothing)
        with pytest.raises(
            CheckpointRefused, match="in float32 the plain model's states of compared row 0 are not finite"
        ):
            measured(engines)

    def test_an_engine_of_last_tokens_alone_is_compared_at_these(self, engines: Engines):
        runtime = PlainRuntime(engines.engine("gpt2"), engines.checkpoint("gpt2"))
        output = dataclasses.replace(runtime.contract.output, states="last")
        runtime.contract = dataclasses.replace(runtime.contract, output=output)
        report = measured(engines, runtime=runtime)
        assert (report.num_tokens, report.rel_error.worst) == (ROWS, 0)

    def test_without_a_head_states_are_compared_and_nothing_is_said_of_the_next_token(self, engines: Engines, tmp_path):
        from transformers import AutoModel, AutoTokenizer

        AutoModel.from_pretrained(engines.checkpoint("llama")).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(engines.checkpoint("llama")).save_pretrained(tmp_path)
        engine = engines.engine("llama")
        runtime = job_rig.runtime(str(engine))
        report = fidelity(engine, tmp_path, rows=ROWS, runtime=runtime)
        assert (report.kl, report.top1, report.by_position[0].kl) == (None, None, None)
        assert report.rel_error.worst < 1e-5
        assert not report.own_checkpoint
        assert "no head    only states are compared: the checkpoint holds no lm_head.weight" in fidelity_text(report)
        with pytest.raises(SpecError) as error:
            fidelity(engine, tmp_path, rows=ROWS, runtime=runtime, max_kl=0.1)
        assert str(error.value) == (
            "--max-kl cannot be checked: the checkpoint holds no lm_head.weight. "
            "Name a reference that holds its head, or leave out --max-kl."
        )


def clustered(seed: int, rows: int = 30, tokens: int = 20) -> TokenFigures:
    """Rows whose tokens are all alike; the true mean is 1."""
    draw = np.random.default_rng(seed)
    values = np.repeat(draw.exponential(1.0, rows), tokens)
    return TokenFigures(
        row=np.repeat(np.arange(rows), tokens),
        position=np.tile(np.arange(tokens), rows),
        length=np.full(rows * tokens, tokens),
        rel_error=values,
        cosine=1 - values,
        kl=values,
        same=values,
        finite=np.ones(rows * tokens, np.bool_),
        worst_row=0.0,
    )


class TestIntervals:
    def test_they_hold_the_truth_about_as_often_as_they_say_where_tokens_of_a_row_are_alike(self):
        """Resampling tokens instead of rows, it would be four times too narrow and hold it in one case of three."""
        held = [summarise(clustered(seed), seed=0, num_resamples=200).rel_error.mean.holds(1.0) for seed in range(100)]
        assert 85 <= sum(held) <= 99

    def test_the_seed_decides_them(self):
        one, same, other = (summarise(clustered(0), seed=seed).rel_error.mean for seed in (0, 0, 1))
        assert one == same
        assert one.mean == other.mean
        assert one.low != other.low

    def test_groups_that_differ_by_chance_alone_are_noise(self):
        verdicts = [group.verdict for seed in range(5) for group in summarise(clustered(seed), seed=0).by_position]
        assert set(verdicts) == {"noise"}

    def test_an_infinite_divergence_stays_one(self):
        tokens = clustered(0)
        tokens.kl[3] = np.inf
        kl = summarise(tokens, seed=0, num_resamples=50).kl
        assert kl is not None
        assert (kl.mean.mean, kl.worst, kl.mean.holds(1.0)) == (np.inf, np.inf, False)

    def test_a_group_of_few_rows_says_so_and_the_only_group_says_nothing(self):
        few = summarise(clustered(0, rows=4), seed=0, num_resamples=50)
        assert {group.verdict for group in few.by_position} == {"few rows"}
        assert [group.verdict for group in few.by_length] == ["all"]


class TestRows:
    def test_rows_of_a_source_are_taken_at_even_distances(self, engines: Engines, tmp_path):
        texts = job_rig.texts(100)
        texts[3 * 100 // 7] = ""
        source = parquet(tmp_path / "rows.parquet", {"a": pa.array([{"body": text} for text in texts])})
        report = measured(engines, rows=7, source=SourceSpec(path=str(source), column="a.body"))
        chosen = [texts[place * 100 // 7] for place in range(7)]
        ids = [one for one in job_rig.ids_of(engines.checkpoint("gpt2"), chosen) if one]
        assert (report.num_rows, report.num_tokens) == (6, sum(map(len, ids)))
        assert report.notes == ("1 rows without a token were left out",)

    def test_nothing_to_compare_is_an_error(self, engines: Engines, tmp_path):
        source = parquet(tmp_path / "rows.parquet", {"text": ["", None]})
        with pytest.raises(SourceError) as error:
            measured(engines, source=SourceSpec(path=str(source)))
        assert str(error.value) == (
            f"{source}, column text: none of {ROWS} rows has a token to compare. Choose another --data or --column."
        )


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "settings"),
        [
            ("hidden size 64", {"hidden_size": 32}),
            ("layers 3", {"num_hidden_layers": 2}),
            ("vocabulary 400", {"vocab_size": 416}),
        ],
    )
    def test_another_model_is_refused_and_the_field_named(self, engines: Engines, tmp_path, field, settings):
        rig.tiny_checkpoint(tmp_path, "llama", tokenizer=rig.tiny_tokenizer(), **settings)
        engine = engines.engine("llama")
        with pytest.raises(EngineRefused) as error:
            fidelity(engine, tmp_path, rows=2, runtime=job_rig.runtime(str(engine)))
        ((_, value),) = settings.items()
        assert str(error.value) == (
            f"{engine}: the engine has {field}, {tmp_path.name} has {value}. They are not one model; name the "
            "checkpoint that the engine was made from (llama), or the unquantised one behind it."
        )

    def test_another_tokenizer_is_refused(self, engines: Engines, tmp_path):
        rig.tiny_checkpoint(tmp_path, "llama", tokenizer=rig.tiny_tokenizer(eos=True))
        with pytest.raises(EngineRefused, match=r"the engine has a tokenizer with sha256 [0-9a-f]{12}, .* gives other"):
            fidelity(engines.engine("llama"), tmp_path, rows=2)

    def test_other_weights_of_the_same_shape_are_compared_and_found_far_away(self, engines: Engines, tmp_path):
        rig.tiny_checkpoint(tmp_path, "llama", tokenizer=rig.tiny_tokenizer(), seed=5)
        engine = engines.engine("llama")
        report = fidelity(engine, tmp_path, rows=4, runtime=job_rig.runtime(str(engine)))
        assert report.kl is not None
        assert report.kl.mean.low > 0.1
        assert "not the checkpoint that the engine was made from" in fidelity_text(report)


class TestContract:
    def test_the_figures_can_be_written_into_it_and_its_id_stays(self, engines: Engines, tmp_path):
        import shutil

        from extract.engine.runtimes import load_runtime

        engine = tmp_path / "engine"
        shutil.copytree(engines.engine("gpt2"), engine)
        before = read_contract(engine)
        assert before.fidelity.measured is None  # and old contracts, which lack it, are read
        report = fidelity(engine, engines.checkpoint("gpt2"), rows=ROWS, write=True, threads=1)
        after = read_contract(engine)
        written = after.fidelity.measured
        assert written is not None
        assert report.kl is not None
        assert report.written
        assert (written.kl_mean, written.kl_high) == (report.kl.mean.mean, report.kl.mean.high)
        assert (written.sha256, written.num_tokens) == (report.checkpoint_sha256, report.num_tokens)
        assert after.engine_id == before.engine_id
        assert dataclasses.replace(after, fidelity=before.fidelity) == before
        assert load_runtime(engine, threads=1).contract == after
        assert f"measured   relative error {report.rel_error.mean.mean:.1e} on average" in contract_text(after, engine)
        assert {path.name for path in engine.iterdir()} == {path.name for path in engines.engine("gpt2").iterdir()}


class TestCommand:
    def test_a_table_of_a_hundred_columns_or_json(self, engines: Engines, noisy, capsys):
        assert max(len(line) for line in fidelity_text(noisy).splitlines() if not line.startswith("engine")) <= 100
        arguments = ("fidelity", engines.engine("gpt2"), "--reference", engines.checkpoint("gpt2"), "--rows", 6)
        shown = extract(capsys, *arguments, "--quiet")
        assert (shown.code, shown.err) == (0, "")
        for word in ("reference  gpt2 in float32, each row alone", "KL, nats", "position", "row length", "noise  "):
            assert word in shown.out
        found = json.loads(extract(capsys, *arguments, "--json").out)
        assert (found["num_rows"], found["own_checkpoint"]) == (6, True)

    @pytest.mark.parametrize(("target", "code"), [("1", 0), ("0", 7)])
    def test_the_gate_is_an_exit_code_and_one_line(self, engines: Engines, capsys, target, code):
        ended = extract(
            capsys,
            *("fidelity", engines.engine("llama", "transformers"), "--reference", engines.checkpoint("llama")),
            *("--rows", 6, "--max-kl", target, "--quiet"),
        )
        assert ended.code == code
        assert "target     mean KL " in ended.out
        assert len(ended.err.splitlines()) == (1 if code else 0)

    def test_a_target_within_the_interval_fails_and_is_called_noise(self, noisy):
        assert noisy.kl is not None
        target = (noisy.kl.mean.low + noisy.kl.mean.mean) / 2
        report = dataclasses.replace(noisy, max_kl=target)
        with pytest.raises(TooFar) as error:
            check(report)
        mean = noisy.kl.mean
        assert str(error.value) == (
            f"{noisy.engine}: mean KL of the next token is {mean.mean:.2e} [{mean.low:.2e}, {mean.high:.2e}], "
            f"above the {target:g} of --max-kl, but within the noise of {ROWS} rows."
        )
        assert "the target lies within the interval: noise" in fidelity_text(report)

    def test_a_column_without_data_is_a_mistake(self, engines: Engines, capsys):
        ended = extract(capsys, "fidelity", engines.engine("gpt2"), "--reference", "x", "--column", "y")
        assert ended.code == 2
        assert "--column and --input go with --data." in ended.err
