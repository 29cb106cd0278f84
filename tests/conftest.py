"""What every test needs: no hub, no tokenizer threads, one torch thread, and two checkpoints built once a session.

Tests import the rig as `import rig`: pytest puts this directory on the path.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import job_rig

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models are slower on more; read by torch when it is imported


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with an untied head; do not change its files."""
    import rig

    return rig.tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def gpt2_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 (learned positions, tied head); do not change its files."""
    import rig

    return rig.tiny_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2", tied=True)


@pytest.fixture(scope="session")
def tiny_engine(llama_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 engine of the tiny Llama, at most 32 tokens a row; do not change its files."""
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    engine = tmp_path_factory.mktemp("engines") / "llama"
    build(llama_checkpoint, engine, Recipe(dtype="float32", device="cpu", max_input_tokens=32, max_tokens=512))
    return engine


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> "job_rig.Engines":
    """Engines of several kinds for whole jobs, each built when it is first asked for."""
    import job_rig

    return job_rig.Engines(tmp_path_factory.mktemp("job-engines"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the real SmolLM2-135M, also a checkpoint that transformers opens; `make model` fetches it."""
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    gguf = Path(__file__).parent.parent / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.is_file():
        pytest.skip("SmolLM2 is not here: make model")
    engine = tmp_path_factory.mktemp("engines") / "smollm2"
    build(gguf, engine, Recipe(dtype="float32", device="cpu", max_tokens=512))
    return engine
