"""The catalogue: every engine by name, with the settings that serve it best on a CPU.

A peer is measured as a person would first write it and at its best, and the ratios are over its best. Settings that are
not the peer's own defaults say why. Engines with equal driver, load settings and environment share one process.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peers.engine_process import ROOT

Tier = Literal["smoke", "peers", "full"]
TIERS: tuple[Tier, ...] = ("smoke", "peers", "full")

BUILD = ROOT / "build" / "bench"
VENVS = BUILD / "venvs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One line of the table.

    Attributes:
        name: unique; begins with the peer's name.
        driver: module `peers.drive_*`, and the environment below build/bench/venvs, if it has one.
        dtype: of its multiplications: which ceiling and which fidelity limits are its own.
        load: settings of the process.
        options: of each run.
        kinds: what it can give.
        tier: the smallest tier that runs it.
        main: one of those that scenarios other than the real passages run.
        only: scenarios it runs in, if not all of its kinds.
        gib: memory to plan with.
    """

    name: str
    driver: str
    dtype: Literal["float32", "bfloat16", "int8"]
    load: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("tokens", "last", "mean")
    tier: Tier = "peers"
    main: bool = False
    only: tuple[str, ...] | None = None
    gib: float = 1.5

    @property
    def is_ours(self) -> bool:
        """Not a peer."""
        return self.driver == "ours"

    @property
    def process(self) -> str:
        """Equal for engines that share a process."""
        return json.dumps([self.driver, self.load, self.environment], sort_keys=True)

    @property
    def python(self) -> Path:
        """The interpreter of the peer's environment."""
        own = VENVS / self.driver / "bin" / "python"
        return Path(sys.executable) if self.driver in ("ours", "transformers", "llama_cpp") else own


def catalogue(checkpoint: Path, threads: int) -> list[Engine]:
    """All engines, in the order of the table."""
    model = {"checkpoint": str(checkpoint), "threads": threads}
    return [
        *_ours(model),
        *_transformers(model),
        *_sentence_transformers(model),
        *_openvino(model, threads),
        *_vllm(model),
        *_llama_cpp(model),
    ]


def _ours(model: dict[str, Any]) -> list[Engine]:
    found = []
    for dtype in ("float32", "bfloat16", "int8"):
        load = model | {"dtype": dtype, "engine": str(BUILD / "engines" / Path(model["checkpoint"]).name / dtype)}
        found.append(Engine(name=f"ours {dtype}", driver="ours", dtype=dtype, load=load, tier="smoke", main=True))
    alone = found[1].load | {"share": False}
    sharing = ("prefix-30", "prefix-70", "prefix-30-last", "prefix-70-last", "duplicates")
    found.append(Engine(name="ours bfloat16, no sharing", driver="ours", dtype="bfloat16", load=alone, only=sharing))
    return found


def _transformers(model: dict[str, Any]) -> list[Engine]:
    given, by_length = {"size": 32}, {"size": 32, "sort": True}
    found = []
    for dtype in ("float32", "bfloat16"):
        load = model | {"dtype": dtype}
        head = load | {"head": True}
        common: dict[str, Any] = {"driver": "transformers", "dtype": dtype}
        found += [
            Engine(name=f"transformers {dtype}", load=load, options=given, tier="smoke", **common),
            Engine(
                name=f"transformers {dtype}, sorted", load=load, options=by_length, tier="smoke", main=True, **common
            ),
            Engine(name=f"transformers {dtype}, output_hidden_states", load=head, options=given, gib=4.5, **common),
        ]
    return found


def _sentence_transformers(model: dict[str, Any]) -> list[Engine]:
    load = model | {"dtype": "bfloat16"}
    driver = "sentence_transformers"
    return [
        Engine(
            name="sentence-transformers bfloat16",
            driver=driver,
            dtype="bfloat16",
            load=load,
            kinds=("last",),
            main=True,
        )
    ]


def _openvino(model: dict[str, Any], threads: int) -> list[Engine]:
    found = []
    for dtype, size in (("float32", 4), ("bfloat16", 4), ("int8", 8)):
        common: dict[str, Any] = {"driver": "openvino", "dtype": dtype, "gib": 2.0}
        one, many = model | {"dtype": dtype, "streams": 1}, model | {"dtype": dtype, "streams": threads}
        small = {"options": {"size": size}, "main": True, **common}
        found += [
            Engine(name=f"openvino {dtype}, 1 stream", load=one, options={"size": 32}, **common),
            Engine(name=f"openvino {dtype}, 1 stream, batches of {size}", load=one, **small),
        ]
        # Streams of one thread with small batches: 1.2 times one stream of all threads where it was measured. With AMX,
        # 2026.4.1 divides by zero when it compiles for a stream of one thread in bfloat16.
        if threads > 1:
            found.append(Engine(name=f"openvino {dtype}, {threads} streams, batches of {size}", load=many, **small))
    return found


def _vllm(model: dict[str, Any]) -> list[Engine]:
    # Its saved ahead-of-time compilation does not load again on CPU; torch's own cache does.
    environment = {
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(BUILD / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    # More batched tokens are no faster with int8: 512 gave 1.27 times 4,096 where it was measured.
    bfloat16 = model | {"dtype": "bfloat16", "batched_tokens": 4096}
    int8 = model | {"dtype": "int8", "batched_tokens": 512}
    # Its own blocks of 128 would never share these prompts; 32 is the least that its CPU attention takes.
    cached = bfloat16 | {"kind": "last", "prefix_caching": True, "block_size": 32}
    last = ("prefix-30-last", "prefix-70-last")
    common: dict[str, Any] = {"driver": "vllm", "environment": environment, "gib": 4.0}
    every, pooled = {"kinds": ("tokens",), **common}, {"kinds": ("last",), **common}
    return [
        Engine(name="vllm bfloat16", dtype="bfloat16", load=bfloat16 | {"kind": "tokens"}, main=True, **every),
        Engine(name="vllm int8", dtype="int8", load=int8 | {"kind": "tokens"}, main=True, **every),
        Engine(
            name="vllm bfloat16, eager", dtype="bfloat16", load=bfloat16 | {"kind": "tokens", "eager": True}, **every
        ),
        Engine(name="vllm int8, eager", dtype="int8", load=int8 | {"kind": "tokens", "eager": True}, **every),
        Engine(name="vllm bfloat16, last", dtype="bfloat16", load=bfloat16 | {"kind": "last"}, main=True, **pooled),
        Engine(name="vllm bfloat16, prefix caching", dtype="bfloat16", load=cached, main=True, only=last, **pooled),
    ]


def _llama_cpp(model: dict[str, Any]) -> list[Engine]:
    common: dict[str, Any] = {"driver": "llama_cpp", "gib": 1.0}
    return [
        Engine(name="llama.cpp Q8_0", dtype="int8", load=model | {"type": "Q8_0"}, main=True, **common),
        Engine(name="llama.cpp BF16", dtype="bfloat16", load=model | {"type": "BF16"}, **common),
    ]
