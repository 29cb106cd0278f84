"""What every test needs: no hub, no tokenizer threads, one torch thread, and two checkpoints built once a session.

Tests import the rig as `import rig`: pytest puts this directory on the path.
"""

import os
from pathlib import Path

import pytest

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
