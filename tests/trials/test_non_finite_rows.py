"""A row whose states overflow is marked and counted alone; no NaN or infinity is stored or reaches another row."""

import number_rig
import numpy as np
import pytest
import rig
from job_rig import errors, output_table, parquet, reference, run, stored
from job_rig import job as job_of

VOCAB = 50_000  # so many that a build, which tries random ids, does not meet the one
HOT = 41_234
"""Its embedding is finite, and infinite once the model has scaled it."""

IDS = [[10, 11], [12, HOT, 13], [14], [HOT], [15, 16, 17], [HOT, HOT, 20], *rig.random_sequences([30, 7], seed=1)]


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """Engines by decoder, and the checkpoint."""
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("hot")
    checkpoint = rig.tiny_checkpoint(
        root / "checkpoint", "gemma3_text", sliding_window=number_rig.WINDOW, vocab_size=VOCAB
    )
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][HOT, 5] = 3e38
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint, {
        decoder: number_rig.build_engine(checkpoint, root / decoder, decoder=decoder)
        for decoder in ("own", "transformers")
    }


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_states_that_overflow_in_the_model_mark_their_row_and_no_other(hot, tmp_path, decoder, kind):
    checkpoint, engines = hot
    expected = reference(checkpoint, IDS, kind)
    lost = [not np.isfinite(states).all() for states in expected]
    assert any(lost) and not all(lost)
    source = parquet(tmp_path / "in.parquet", {"ids": IDS})
    options = {"column": "ids", "input": "input_ids", "kind": kind}
    summary = run(job_of(engines[decoder], source, tmp_path / "out", **options))
    outcomes = output_table(tmp_path / "out")["outcome"].to_pylist()
    states = stored(tmp_path / "out")
    assert [outcome == "non_finite" for outcome in outcomes] == lost
    assert [one is None for one in states] == lost
    assert summary.totals.outcomes["non_finite"] == sum(lost)
    kept = [row for row, gone in enumerate(lost) if not gone]
    assert errors([states[row] for row in kept], [expected[row] for row in kept]).max() <= number_rig.EXACT
