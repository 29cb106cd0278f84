"""Hub names, with a cache laid out by hand and no network."""

import shutil
from pathlib import Path

import pytest
import rig

from extract.engine.checkpoint import open_checkpoint
from extract.engine.checkpoint_tokenizer import load_tokenizer
from extract.engine.decoder import load_decoder
from extract.engine.hub_cache import NoSuchCheckpoint, is_hub_name
from extract.engine.weights_files import BrokenWeights

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache that huggingface_hub uses, offline."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, name: str, checkpoint: Path, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Lay a checkpoint out as the hub's cache does: blobs, links to them in a snapshot, a ref; returns the snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        blob = repo / "blobs" / f"{commit}-{path.name}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    if ref:
        (repo / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize("name", ["org/tiny-llama", "tiny-llama"])
def test_a_hub_name_is_found_in_the_cache_without_a_network(cache, llama_checkpoint, name):
    put(cache, name, llama_checkpoint)
    found = open_checkpoint(name)
    assert (found.name, found.kind, found.notes) == (name, "hub", (f"hub commit {COMMIT}",))
    assert found.sha256 == open_checkpoint(llama_checkpoint).sha256
    sequences = rig.random_sequences([12])
    expected = rig.reference_states(llama_checkpoint, sequences)
    decoder = load_decoder(found, "float32", attn_implementation="eager")
    assert rig.relative_error(rig.reference_states(decoder.model, sequences), expected) == 0
    text = rig.passages(1)[0]
    assert load_tokenizer(found)(text)["input_ids"] == rig.tiny_tokenizer()(text)["input_ids"]


def test_a_revision_chooses_the_snapshot(cache, llama_checkpoint, gpt2_checkpoint):
    put(cache, "org/model", llama_checkpoint)
    put(cache, "org/model", gpt2_checkpoint, commit=OLDER, ref="v1")
    for revision, model_type in ((None, "llama"), ("main", "llama"), ("v1", "gpt2"), (OLDER, "gpt2")):
        assert open_checkpoint("org/model", revision=revision).model_type == model_type


def test_a_directory_of_that_name_comes_before_the_hub(cache, llama_checkpoint, gpt2_checkpoint, monkeypatch, tmp_path):
    put(cache, "org/model", llama_checkpoint)
    shutil.copytree(gpt2_checkpoint, tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/model").kind == "directory"


def test_a_name_that_is_not_in_the_cache_says_where_it_looked(cache):
    with pytest.raises(NoSuchCheckpoint) as caught:
        open_checkpoint("org/absent", revision="v2")
    message = str(caught.value)
    assert message.startswith(
        f"org/absent: no such directory, and org/absent, revision v2, is not in the local hub cache ({cache}) and "
        "could not be fetched ("
    )
    assert message.endswith(
        "Give a checkpoint directory, or fetch it where the hub can be reached: hf download org/absent"
    )


def test_a_cached_snapshot_that_lacks_a_shard_is_refused_by_name(cache, tmp_path):
    checkpoint = rig.tiny_checkpoint(tmp_path / "sharded", "llama", tied=True, shards=3, tokenizer=None)
    snapshot = put(cache, "org/sharded", checkpoint)
    missing = sorted(snapshot.glob("model-*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(BrokenWeights, match=f"shards are missing: {missing.name}"):
        open_checkpoint("org/sharded")


@pytest.mark.parametrize("source", ["./model", "a/b/c", "/tmp", "org/", "org/../etc", "~/model", "", "org/na me"])
def test_a_path_is_not_taken_for_a_hub_name(source):
    assert not is_hub_name(source)
