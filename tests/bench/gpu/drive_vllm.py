"""vLLM in a process of its own: one JSON object of settings as argument, one JSON object as the last line.

The pooling runner, states as they are (no normalisation), token ids given. `python drive_vllm.py '{"checkpoint": ...}'`
"""

import json
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    import numpy as np
    import torch
    import vllm
    from vllm.config import PoolerConfig

    kind = settings["kind"]
    task = {"tokens": "token_embed", "last": "embed"}[kind]
    pooling = {"tok_pooling_type": "ALL"} if kind == "tokens" else {"seq_pooling_type": "LAST"}
    started = time.perf_counter()
    model = vllm.LLM(
        settings["checkpoint"],
        runner="pooling",
        convert="embed",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=settings["batched_tokens"],
        max_num_seqs=settings["sequences"],
        enable_prefix_caching=settings.get("prefix_caching", False),
        enforce_eager=settings.get("eager", False),
        gpu_memory_utilization=settings["memory_part"],
        pooler_config=PoolerConfig(task=task, use_activation=False, **pooling),
    )
    start_s = time.perf_counter() - started
    draw = np.random.Generator(np.random.PCG64(0))
    rows = draw.integers(0, settings["vocabulary"], (settings["rows"], settings["limit"]))
    prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
    model.encode(prompts[: max(1, len(prompts) // 8)], pooling_task=task, use_tqdm=False)
    started = time.perf_counter()
    outputs = model.encode(prompts, pooling_task=task, use_tqdm=False)
    states = [output.outputs.data.cpu() for output in outputs]
    seconds = time.perf_counter() - started
    shapes = sorted({tuple(one.shape) for one in states})
    print(
        json.dumps(
            {
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "start_s": start_s,
                "tokens_per_s": rows.size / seconds,
                "shapes": shapes[:3],
            }
        )
    )


if __name__ == "__main__":
    main()
