"""The executor, for prompts and one new token each: a batch manager that copies every output per sequence.

Answers come back a few at a time and not in the order of the requests. Tokens whose cache blocks an earlier prompt has
filled are not computed again and are missing from the outputs.
"""

import enum
import itertools
import json
import math
from pathlib import Path

import torch
from stand_in.execution import CONTEXT_PHASE, Execution
from stand_in.facts import strict_class
from stand_in.program import Program
from stand_in.state import STATE, at_least

import tensorrt_llm
from tensorrt_llm._utils import str_dtype_to_torch

OUTPUTS_ARE_OBJECTS = at_least("0.20")
AT_A_TIME = 3


class ModelType(enum.Enum):
    """What the engine is."""

    ENCODER_ONLY = 0
    DECODER_ONLY = 1
    ENCODER_DECODER = 2


AdditionalModelOutput = strict_class("AdditionalModelOutput")
OutputConfig = strict_class("OutputConfig")
SamplingConfig = strict_class("SamplingConfig")
SchedulerConfig = strict_class("SchedulerConfig")
ExecutorConfig = strict_class("ExecutorConfig")
Request = strict_class("Request")


class KvCacheConfig(strict_class("KvCacheConfig")):
    """Reuse of blocks is off by default in the release that was read; later ones are taken to have it on."""

    def __init__(self, *args, **kwargs):
        if not args and at_least("1.0"):
            kwargs.setdefault("enable_block_reuse", True)
        super().__init__(*args, **kwargs)


class AdditionalOutput:
    """A named output of one request, in pinned host memory."""

    def __init__(self, name, output):
        self.name, self.output = name, output


class Result:
    """What became of a request. Pickling drops `additional_outputs`."""

    def __init__(self, token_ids, additional_outputs):
        self.is_final = self.is_sequence_final = True
        self.output_token_ids = [token_ids]
        self.additional_outputs = additional_outputs

    def __getstate__(self):
        return {**vars(self), "additional_outputs": []}


class Response:
    """A result or an error."""

    def __init__(self, request_id, result=None, error_msg=None):
        self.request_id, self._result, self._error_msg = request_id, result, error_msg

    def has_error(self):
        """Whether there is no result."""
        return self._error_msg is not None

    @property
    def error_msg(self):
        """The error."""
        if self._error_msg is None:
            raise RuntimeError("the response has no error")
        return self._error_msg

    @property
    def result(self):
        """The result. Raises RuntimeError if there is none."""
        if self._result is None:
            raise RuntimeError(self._error_msg)
        return self._result


class Executor:
    """Runs requests on an engine directory."""

    def __init__(self, model_path, model_type, executor_config):
        self._card = STATE.needs_card()
        if not isinstance(model_type, ModelType) or not isinstance(executor_config, ExecutorConfig):
            raise TypeError("__init__(): incompatible constructor arguments")
        if model_type is not ModelType.DECODER_ONLY:
            raise RuntimeError(f"stand-in: {model_type} is not here")
        config = json.loads((Path(model_path) / "config.json").read_text())
        program = Program.from_bytes((Path(model_path) / "rank0.engine").read_bytes())
        if program.about["release"] != tensorrt_llm.__version__ or config["version"] != tensorrt_llm.__version__:
            raise RuntimeError("stand-in TensorRT: deserialisation failed: other release")
        if "logits" not in program.outputs:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: engine has no tensor 'logits'")
        self._program, self._execution, self._about = program, Execution(program), program.about
        self._wanted = self._outputs_of(executor_config)
        cache = executor_config.kv_cache_config or KvCacheConfig()
        self._reuses = cache.enable_block_reuse and self._about["use_cache"]
        free = self._card.total_bytes - self._card.used_bytes
        part = 0.9 if cache.free_gpu_memory_fraction is None else cache.free_gpu_memory_fraction
        self._held = int(part * free) if self._about["use_cache"] else 0
        self._card.take(self._held)
        self._blocks, self._ids, self._waiting, self._open = set(), itertools.count(1), [], True

    def _outputs_of(self, executor_config):
        if OUTPUTS_ARE_OBJECTS:
            wanted = {output.name: output.gather_context for output in executor_config.additional_model_outputs or ()}
        else:
            wanted = dict.fromkeys(executor_config.additional_output_names or ())
        for name in wanted:
            if name not in self._program.outputs:
                raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: engine has no output {name!r}")
        return wanted

    def can_enqueue_requests(self):
        """Whether this process takes requests."""
        return self._open

    def enqueue_request(self, request):
        """One request -> its id."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests):
        """Requests -> their ids."""
        if not self._open:
            raise RuntimeError("the executor was shut down")
        if not all(isinstance(request, Request) for request in requests):
            raise TypeError("enqueue_requests(): incompatible function arguments")
        ids = [next(self._ids) for _ in requests]
        self._waiting += [
            (number, self._answer(number, request)) for number, request in zip(ids, requests, strict=True)
        ]
        return ids

    def await_responses(self, *args, **kwargs):
        """Responses that are ready: of any request, of one id, or a list of lists for several ids."""
        only = kwargs.pop("id", kwargs.pop("ids", args[0] if args and not hasattr(args[0], "total_seconds") else None))
        if isinstance(only, list):
            return [self._ready([number]) for number in only]
        return self._ready(None if only is None else [only])

    def _ready(self, only):
        chosen = [pair for pair in self._waiting if only is None or pair[0] in only][-AT_A_TIME:]
        if not chosen:
            raise RuntimeError("stand-in: nothing to wait for, the vendor would wait for ever")
        self._waiting = [pair for pair in self._waiting if pair not in chosen]
        return [response for _, response in reversed(chosen)]

    def get_num_responses_ready(self, id=None):
        """How many could be fetched."""
        return len([number for number, _ in self._waiting if id in (None, number)])

    def shutdown(self):
        """Give the memory back."""
        self._open = False
        self._card.give(self._held)
        self._held = 0

    def _answer(self, number, request):
        ids, max_tokens = list(request.input_token_ids), request.max_tokens
        limit = min(self._about["max_seq_len"] - 1, self._about["max_num_tokens"])
        if len(ids) > limit:
            return Response(number, error_msg=f"Prompt length ({len(ids)}) exceeds maximum input length ({limit})")
        if len(ids) + (max_tokens or 0) > self._about["max_seq_len"]:
            return Response(number, error_msg="prompt and new tokens exceed max_seq_len")
        if max_tokens != 1 and not self._about["use_cache"]:
            return Response(number, error_msg="an engine without KV cache gives one new token only")
        if max_tokens != 1:
            raise NotImplementedError("the stand-in gives one new token")
        found = self._execution(self._inputs(ids))
        first = self._reused(ids)
        outputs = []
        output_config = request.output_config or OutputConfig()
        for output in output_config.additional_model_outputs or ():
            outputs += self._additional(output, found, first)
        token_ids = [] if output_config.exclude_input_from_output else ids
        return Response(number, Result([*token_ids, int(found["logits"][-1].argmax())], outputs))

    def _additional(self, output, found, first):
        name = output.name
        if name not in self._wanted:
            raise RuntimeError(
                f"[TensorRT-LLM][ERROR] Assertion failed: output {name!r} is not in the executor's config"
            )
        fixed = self._wanted[name]
        if fixed is not None and fixed != output.gather_context:
            raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {name!r} has gather_context {fixed}")
        by_token = self._program.values[self._program.outputs[name]].shape[0] == "T"
        if by_token != output.gather_context:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: final index mismatch of additional outputs")
        rows = found[name]
        generated = rows[None, -1:] if OUTPUTS_ARE_OBJECTS else rows.new_empty((1, 0, rows.shape[1]))
        answers = [AdditionalOutput(f"context_{name}", rows[first:].clone())] if output.gather_context else []
        return [*answers, AdditionalOutput(f"generation_{name}", generated.clone())]

    def _reused(self, ids):
        """Tokens at the beginning whose blocks are in the cache; the last token is always computed."""
        size, reused = self._about["tokens_per_block"], 0
        for end in range(size, len(ids) + 1, size):
            if self._reuses and tuple(ids[:end]) in self._blocks and end < len(ids):
                reused = end
            self._blocks.add(tuple(ids[:end]))
        return reused

    def _inputs(self, ids):
        values = {
            "input_ids": ids,
            "position_ids": list(range(len(ids))),
            "host_request_types": [CONTEXT_PHASE],
            "host_max_attention_window_sizes": self._about["max_seq_len"],
            "host_runtime_perf_knobs": -1,
            "host_sink_token_length": 0,
            "host_context_progress": 0,
        }
        by_length = ("last_token_ids", "context_lengths", "host_context_lengths", "sequence_length")
        values.update(dict.fromkeys((*by_length, "host_past_key_value_lengths"), len(ids)))
        sizes, inputs = {"T": len(ids), "B": 1}, {}
        for name in self._program.inputs:
            shape, value = self._program.shape(name, sizes), values.get(name, 0)
            dtype = str_dtype_to_torch(self._program.values[name].dtype)
            data = value if isinstance(value, list) else [value] * math.prod(shape)
            inputs[name] = torch.tensor(data, dtype=dtype).view(shape)
        return inputs
