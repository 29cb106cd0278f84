"""OpenVINO: the model traced once, weights compressed for nothing; then one stream of all threads, or one a thread.

A user of `optimum-intel` gets the same graph. W8A8 is nncf's post-training quantisation for transformers (SmoothQuant,
mixed preset), calibrated on docstrings. Batches are sorted by length, and every output is copied out of the request's
own memory, as it must be to keep it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.protocol import Ids, Kind, Rows, fixed_batches, of_kind, padded, serve

CALIBRATION_ROWS = 64


class OpenVino:
    """Settings: checkpoint, dtype, threads, streams. Options: size (rows of a batch)."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Convert; for int8, quantise."""
        graph = _graph(settings)
        if graph.exists():
            return
        import openvino

        model = _converted(settings["checkpoint"])
        if settings["dtype"] == "int8":
            model = _quantized(model, settings["checkpoint"])
        graph.parent.mkdir(parents=True, exist_ok=True)
        openvino.save_model(model, graph, compress_to_fp16=False)

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        import openvino

        streams = settings["streams"]
        options = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "NUM_STREAMS": streams,
            "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
            "INFERENCE_PRECISION_HINT": "f32" if settings["dtype"] == "float32" else "bf16",
        }
        compiled = openvino.Core().compile_model(_graph(settings), "CPU", options)
        self.queue = openvino.AsyncInferQueue(compiled, streams)
        self.queue.set_callback(self._finished)
        return {"openvino": openvino.__version__.split("-")[0]}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        self.found: list[Any] = [None] * len(sequences)
        self.lengths, self.kind = [len(sequence) for sequence in sequences], kind
        for members in fixed_batches(self.lengths, options["size"], sort=True):
            input_ids, mask = padded(sequences, members)
            self.queue.start_async({"input_ids": input_ids, "attention_mask": mask}, members)
        self.queue.wait_all()
        return self.found

    def rows(self, result: Any) -> Rows:
        return list(result)

    def _finished(self, request: Any, members: list[int]) -> None:
        states = request.get_output_tensor(0).data.copy()
        for place, row in enumerate(members):
            self.found[row] = of_kind(states[place], self.lengths[row], self.kind)


def _graph(settings: dict[str, Any]) -> Path:
    kind = "int8" if settings["dtype"] == "int8" else "float32"
    checkpoint = Path(settings["checkpoint"])
    return checkpoint.parent / f"{checkpoint.name}-openvino" / f"{kind}.xml"


def _converted(checkpoint: str) -> Any:
    import openvino
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state

    input_ids = torch.arange(22).reshape(2, 11)
    mask = torch.ones_like(input_ids)
    mask[1, 7:] = 0
    with torch.no_grad():
        converted = openvino.convert_model(States(), example_input={"input_ids": input_ids, "attention_mask": mask})
    for port, name in zip(converted.inputs, ("input_ids", "attention_mask"), strict=True):
        port.get_tensor().set_names({name})
    converted.reshape({"input_ids": [-1, -1], "attention_mask": [-1, -1]})
    return converted


def _quantized(model: Any, checkpoint: str) -> Any:
    import nncf
    from transformers import AutoTokenizer

    logging.getLogger("nncf").setLevel(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = []
    for text in _docstrings(CALIBRATION_ROWS):
        input_ids = np.array([tokenizer(text)["input_ids"][:128]], np.int64)
        rows.append({"input_ids": input_ids, "attention_mask": np.ones_like(input_ids)})
    return nncf.quantize(
        model,
        nncf.Dataset(rows),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(rows),
    )


def _docstrings(count: int) -> list[str]:
    """Text of the kind that is measured; `extract` is not installed beside OpenVINO."""
    import inspect
    import pathlib
    import subprocess
    import threading

    found = []
    for module in (threading, subprocess, pathlib, inspect, logging):
        for _, member in sorted(vars(module).items()):
            text = inspect.getdoc(member) if inspect.isclass(member) or inspect.isfunction(member) else None
            if text and len(text) > 80:
                found.append(text)
    return found[:count]


if __name__ == "__main__":
    serve(OpenVino())
