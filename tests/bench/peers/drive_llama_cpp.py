"""llama.cpp, as the prebuilt library in node-llama-cpp's npm package has it, called through ctypes.

Whole rows are packed into batches of 512 tokens, each row a sequence of one unified KV cache with flash attention,
every token an output: its fastest way for this task where ways were compared. It also computes the logits of every
output, which its API cannot leave out. The structures below are those of this one release; another is refused.
"""

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from peers.protocol import Ids, Kind, NotPossible, Rows, of_kind, serve

RELEASE = "v0.5.0"
LIBRARIES = Path("build/bench/llama_cpp/package/bins/linux-x64")
"""Below the project's root; where `make bench-peers-setup` unpacks the npm package."""

BATCH_TOKENS = 512
MAX_SEQUENCES = 256

_POOLING_NONE, _ATTENTION_CAUSAL, _FLASH_ATTENTION = 0, 0, 1


_LOG_ERROR = 4
_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


@_LogCallback
def _log(level: int, text: bytes, _: Any) -> None:
    """Errors alone: it has a line to say about every node of its graph."""
    if level == _LOG_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class ModelParams(ctypes.Structure):
    """llama_model_params."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc", "mtp")),
    ]


class ContextParams(ctypes.Structure):
    """llama_context_params."""

    _fields_ = [
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch")),
        *(
            (name, c_int32)
            for name in ("ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn")
        ),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class LlamaCpp:
    """Settings: checkpoint, type (Q8_0 or BF16), threads. No options."""

    def prepare(self, settings: dict[str, Any]) -> None:
        """Write the checkpoint as GGUF of the type."""
        _release()
        if not _gguf(settings).exists():
            _write_gguf(Path(settings["checkpoint"]), settings["type"], _gguf(settings))

    def load(self, settings: dict[str, Any]) -> dict[str, str]:
        release = _release()
        for name in ("libggml-base.so", f"libggml.{RELEASE}.so"):
            ggml = ctypes.CDLL(str(_libraries() / name), ctypes.RTLD_GLOBAL)
        ggml.ggml_backend_load_all_from_path.argtypes = [c_char_p]
        ggml.ggml_backend_load_all_from_path(str(_libraries()).encode())  # the variant for this CPU
        self.llama = llama = _declared(ctypes.CDLL(str(_libraries() / f"libllama.{RELEASE}.so"), ctypes.RTLD_GLOBAL))
        llama.llama_log_set(_log, None)
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(str(_gguf(settings)).encode(), llama.llama_model_default_params())
        if not model:
            raise RuntimeError("the model does not load")
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = BATCH_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.pooling_type, params.attention_type = _POOLING_NONE, _ATTENTION_CAUSAL
        params.flash_attn = _FLASH_ATTENTION
        params.embeddings = params.kv_unified = params.no_perf = True
        self.context = llama.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("no context")
        self.width = llama.llama_model_n_embd(model)
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        return {"llama.cpp": release}

    def run(self, sequences: Sequence[Ids], kind: Kind, options: dict[str, Any]) -> Any:
        found: list[Any] = [None] * len(sequences)
        for members in _packed([len(sequence) for sequence in sequences]):
            states = self._states([sequences[row] for row in members])
            start = 0
            for row in members:
                length = len(sequences[row])
                found[row] = of_kind(states[start : start + length], length, kind)
                start += length
        return found

    def rows(self, result: Any) -> Rows:
        return list(result)

    def _states(self, sequences: Sequence[Ids]) -> Any:
        """float32 [T, H] of rows that fit in one batch."""
        batch, place = self.batch, 0
        for number, sequence in enumerate(sequences):
            for position, token in enumerate(sequence.tolist()):
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, number, 1
                place += 1
        batch.n_tokens = place
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)
        if code := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        address = self.llama.llama_get_embeddings(self.context)
        return np.ctypeslib.as_array(address, (place, self.width)).copy()


def _packed(lengths: list[int]) -> Iterator[list[int]]:
    """Row numbers of batches, longest first, each of at most `BATCH_TOKENS`."""
    members: list[int] = []
    held = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if members and (held + lengths[row] > BATCH_TOKENS or len(members) == MAX_SEQUENCES):
            yield members
            members, held = [], 0
        members.append(row)
        held += lengths[row]
    yield members


def _declared(llama: Any) -> Any:
    llama.llama_model_default_params.restype = ModelParams
    llama.llama_context_default_params.restype = ContextParams
    llama.llama_model_load_from_file.argtypes = [c_char_p, ModelParams]
    llama.llama_model_load_from_file.restype = c_void_p
    llama.llama_init_from_model.argtypes = [c_void_p, ContextParams]
    llama.llama_init_from_model.restype = c_void_p
    llama.llama_model_n_embd.argtypes = [c_void_p]
    llama.llama_batch_init.argtypes = [c_int32, c_int32, c_int32]
    llama.llama_batch_init.restype = Batch
    llama.llama_get_memory.argtypes = [c_void_p]
    llama.llama_get_memory.restype = c_void_p
    llama.llama_memory_clear.argtypes = [c_void_p, c_bool]
    llama.llama_decode.argtypes = [c_void_p, Batch]
    llama.llama_get_embeddings.argtypes = [c_void_p]
    llama.llama_get_embeddings.restype = POINTER(c_float)
    return llama


def _libraries() -> Path:
    return Path(__file__).parents[3] / LIBRARIES


def _release() -> str:
    """The release of the library; the structures above hold for one alone."""
    record = _libraries() / "_nlcBuildMetadata.json"
    if not record.exists():
        raise NotPossible("not installed (make bench-peers-setup)")
    release = str(json.loads(record.read_text())["buildOptions"]["llamaCpp"]["release"])
    if release != RELEASE:
        raise NotPossible(f"llama.cpp {release}, and the driver is written for {RELEASE}")
    return release


def _gguf(settings: dict[str, Any]) -> Path:
    checkpoint = Path(settings["checkpoint"])
    return checkpoint.parent / f"{checkpoint.name}-llama_cpp" / f"{settings['type']}.gguf"


def _write_gguf(checkpoint: Path, kind: str, path: Path) -> None:
    """A llama-like checkpoint without vocabulary: ids are what it is given."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise NotPossible(f"the GGUF is written for llama checkpoints, not {config['model_type']}")
    layers, heads, kv_heads = (
        config[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    target = gguf.GGMLQuantizationType[kind]
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            weight = tensor.float().numpy()
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if part in name:  # rotary pairs lie side by side in GGUF, half a head apart in the checkpoint
                    weight = weight.reshape(count, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
            kept = target if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            data = gguf.quantize(np.ascontiguousarray(weight), kept)
            writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


if __name__ == "__main__":
    serve(LlamaCpp())
