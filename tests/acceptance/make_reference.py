"""A small random Llama, and a float32 torch engine of it, for the acceptance run: `python make_reference.py FOLDER`.

Runs where this package's own requirements are installed. The vendor's packages pin an older transformers, so the run
itself happens in another Python, which needs nothing but the two folders made here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def make(folder: Path) -> None:
    """Write `folder/checkpoint` and `folder/engine`, unless they are there."""
    import rig

    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    checkpoint, engine = folder / "checkpoint", folder / "engine"
    if not checkpoint.exists():
        # Sizes that the vendor's attention kernels are made for: heads of 64.
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        rig.tiny_checkpoint(checkpoint, tokenizer=rig.tiny_tokenizer(), family="llama", head_dim=64, **sizes)
    if not engine.exists():
        build(checkpoint, engine, Recipe(dtype="float32", device="cpu", decoder="own"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
