"""vLLM where it is installed: the model is written to disk once, a process of its own reads it and is ended in time."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu.rows import LIMIT
from gpu.shapes import Shape
from gpu.time_box import Deadline

START_S = 60.0
"""What a start takes at least with compilation; less time than that and it is not begun."""


def missing(python: str) -> str | None:
    """Why vLLM cannot run, as far as can be said without starting it."""
    if python != sys.executable:
        return None if Path(python).exists() else f"{python} is not there"
    return (
        None if importlib.util.find_spec("vllm") else "vllm is not installed (--vllm-python PATH names another Python)"
    )


def measure(
    model: Any, shape: Shape, deadline: Deadline, *, python: str, rows: int, memory_part: float
) -> dict[str, Any]:
    """Tokens/s for every token and for the last one; the reason where there are none."""
    reason = missing(python)
    if reason is not None:
        return {"skipped": reason}
    if not deadline.affords(START_S, "vLLM"):
        return {"skipped": "time did not suffice"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        checkpoint = Path(folder)
        model.save_pretrained(checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        config["architectures"] = [config["architectures"][0].replace("Model", "ForCausalLM")]
        config["tie_word_embeddings"] = True  # a head must be there, and nothing is computed with it
        (checkpoint / "config.json").write_text(json.dumps(config))
        for kind in ("tokens", "last"):
            if not deadline.affords(START_S, f"vLLM {kind}"):
                break
            settings = {
                "checkpoint": folder,
                "kind": kind,
                "rows": rows,
                "limit": LIMIT,
                "vocabulary": shape.vocabulary,
                "batched_tokens": 32_768,
                "sequences": 1024,
                "memory_part": memory_part,
            }
            found[kind] = _driven(python, settings, deadline.left)
    return found


def _driven(python: str, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    command = [python, str(Path(__file__).with_name("drive_vllm.py")), json.dumps(settings)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"skipped": f"ended after {seconds:.0f} s"}
    if process.returncode:
        return {"skipped": (errors.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
