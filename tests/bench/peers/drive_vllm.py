"""vLLM's CPU build through its pooling runner: every token, or the last one, without normalisation.

int8 is W8A8 as vLLM wants it: a compressed-tensors checkpoint, weights a scale per output channel, activations a scale
per token at run time. It needs no calibration, so the checkpoint is written here by hand. `prepare` fills the compile
cache, without which a start takes a minute; `VLLM_USE_AOT_COMPILE=0` (in the environment) makes the cache load again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Ids, Kind, NotPossible, Rows, serve

TASKS = {"tokens": "token_embed", "last": "embed"}


class Vllm:
    """Settings: checkpoint, dtype, threads, kind, batched_tokens, eager, prefix_caching, block_size. No options."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Write the W8A8 checkpoint; start once, so that the next start compiles nothing."""
        weights = _weights(settings)
        if not weights.exists():
            _write_w8a8(Path(settings["checkpoint"]), weights)
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        filled = weights.parent / "vllm-filled" / key
        if not filled.exists():
            import numpy as np

            self.load(settings)
            self.run([np.arange(1, 9, dtype=np.int32)], settings["kind"], {})
            filled.parent.mkdir(parents=True, exist_ok=True)
            filled.touch()

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        cpus = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(cpu) for cpu in cpus)  # "auto" may leave one idle
        import torch
        import vllm
        from vllm.config import PoolerConfig

        # use_activation would scale every state to length 1.
        pooling = {"tok_pooling_type": "ALL"} if settings["kind"] == "tokens" else {"seq_pooling_type": "LAST"}
        optional = {"block_size": settings["block_size"]} if "block_size" in settings else {}
        self.model = vllm.LLM(
            str(_weights(settings)),
            runner="pooling",
            convert="embed",
            dtype="bfloat16",
            max_model_len=256,
            max_num_batched_tokens=settings["batched_tokens"],
            enforce_eager=settings.get("eager", False),
            enable_prefix_caching=settings.get("prefix_caching", False),
            pooler_config=PoolerConfig(task=TASKS[settings["kind"]], use_activation=False, **pooling),
            **optional,
        )
        self.kind, self.caches = settings["kind"], settings.get("prefix_caching", False)
        return {"vllm-cpu": vllm.__version__, "torch": torch.__version__}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        if kind != self.kind:
            raise NotPossible(f"set up for {self.kind}")
        if self.caches:
            self.model.reset_prefix_cache()
        prompts = [{"prompt_token_ids": sequence.tolist()} for sequence in sequences]
        outputs = self.model.encode(prompts, pooling_task=TASKS[kind], use_tqdm=False)
        return [output.outputs.data for output in outputs]

    def rows(self, result: Any) -> Rows:
        return [row.float().numpy() for row in result]


def _weights(settings: dict[str, Any]) -> Path:
    checkpoint = Path(settings["checkpoint"])
    return checkpoint.with_name(f"{checkpoint.name}-w8a8") if settings["dtype"] == "int8" else checkpoint


def _write_w8a8(checkpoint: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith("_proj.weight"):
                scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
                tensors[name.replace("weight", "weight_scale")] = scale
            else:
                tensors[name] = weight.to(torch.bfloat16)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
            shutil.copy(file, unfinished)
    config = json.loads((checkpoint / "config.json").read_text())
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight_bits | {"strategy": "channel", "dynamic": False},
                "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (unfinished / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    unfinished.rename(directory)


if __name__ == "__main__":
    serve(Vllm())
