"""Which decoder runs an engine, shown on the checkpoint at hand: our own where it is right, else transformers'."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract.cpu.architecture import write_architecture
from extract.cpu.linear_names import linears_of, short_names
from extract.engine.contract import (
    COMPILED_FILE,
    CheckpointIdentity,
    Contract,
    Device,
    Fidelity,
    Limits,
    Measured,
    Precision,
    Probe,
    Proof,
    Runtime,
    RuntimeIdentity,
    StateOutput,
    TokenizerIdentity,
)
from extract.engine.plain import PlainStates
from extract.engine.recipe import Recipe

if TYPE_CHECKING:
    from extract.engine.torch_own_trial import PlainFacts

MAX_TOKENS = {"own": 16_384, "cpu": 4096, "cuda": 131_072}
"""Token budget of a pass where the recipe names none: of our own decoder, of transformers' on each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A decoder and what was seen of it.

    Attributes:
        open: the engine's runtime, given its contract.
        refused: why it may not be used; `None`: it is proven.
        reasons: why what was tried before it was not taken.
    """

    runtime: RuntimeIdentity
    device: Device
    precision: Precision
    limits: Limits
    output: StateOutput
    proof: Proof
    bound: float
    open: Callable[[Contract], Runtime]
    refused: str | None = None
    reasons: tuple[str, ...] = ()


def prove_own(
    draft: Path, plain: PlainStates, recipe: Recipe, dtype: str, device: Device, say: Callable[[str], None]
) -> Proven:
    """Try our own decoder for this kind of device on the weights that the build wrote.

    Raises:
        EngineDoesNotFit: the card is too small for it, or too little of its memory is free.
    """
    from extract.engine.torch_own_trial import try_own

    assert plain.facts is not None
    if device.type == "cpu":
        from extract.cpu.implementations import COMPILING, compiles_first

        if compiles_first():
            say(COMPILING)
    into = f"{dtype} and bfloat16" if recipe.high_precision else dtype
    say(f"proving our own packed decoder in {into}: rows must not touch each other, and must equal the plain model")
    write_architecture(draft, plain.facts.architecture)
    if device.type == "cuda":
        found = _own_on_card(draft, plain, plain.facts, recipe, dtype, say)
    else:
        found = _own_on_cpu(draft, plain, plain.facts, recipe, dtype, device)
    runtime = found.open(_unfinished(found, plain))
    try:
        proof, bound, refused = try_own(runtime, plain.facts)
    finally:
        runtime.close()
    return dataclasses.replace(found, proof=proof, bound=bound, refused=refused)


def _own_on_cpu(
    draft: Path, plain: PlainStates, facts: "PlainFacts", recipe: Recipe, dtype: str, device: Device
) -> Proven:
    from extract.cpu.runtime import MICRO_BATCH, open_cpu_runtime

    num_layers = len(facts.architecture.layers)
    high = short_names(linears_of(recipe.high_precision, num_layers), num_layers) or None
    return Proven(
        runtime=dataclasses.replace(
            _identity("packed", "packed", decoder="own", recipe=recipe), micro_batch=recipe.micro_batch or MICRO_BATCH
        ),
        device=device if dtype == "bfloat16" or high is not None else _any_cpu(device),
        precision=Precision(weights=plain.stored, activations=dtype, output="float32", high_precision=high),
        limits=_limits(recipe, "own", plain.max_positions),
        output=_output(facts, "float32"),
        proof=Proof(neighbour=0.0, moved=0.0, plain=0.0),
        bound=facts.noise_bound,
        open=lambda contract: open_cpu_runtime(draft, contract),
    )


def _own_on_card(
    draft: Path, plain: PlainStates, facts: "PlainFacts", recipe: Recipe, dtype: str, say: Callable[[str], None]
) -> Proven:
    from extract.cuda.opening import compile_engine, open_cuda_runtime, terms_on_card

    limits = dataclasses.replace(_limits(recipe, "cuda", plain.max_positions), pass_tokens=recipe.pass_tokens)
    how = None if recipe.compile == "auto" else recipe.compile
    terms = terms_on_card(facts.architecture, dtype, limits, path="recipe", how=how)

    def opened(contract: Contract) -> Runtime:
        if how == "ahead" and not (draft / COMPILED_FILE).is_file():
            say("compiling what lies between products for this card")
            compile_engine(draft, contract)
        return open_cuda_runtime(draft, contract)

    identity = _identity("packed", terms.attention, decoder="own", recipe=recipe)
    return Proven(
        runtime=dataclasses.replace(identity, compile=how),
        device=terms.device,
        precision=Precision(weights=plain.stored, activations=dtype, output=terms.output),
        limits=terms.limits,
        output=_output(facts, terms.output),
        proof=Proof(neighbour=0.0, moved=0.0, plain=0.0),
        bound=facts.noise_bound,
        open=opened,
    )


def _output(facts: "PlainFacts", dtype: str) -> StateOutput:
    norm = facts.final_norm
    return StateOutput(module=norm.described, width=norm.width, dtype=dtype, head_input=facts.head_input)


def prove_transformers(
    draft: Path,
    plain: PlainStates,
    recipe: Recipe,
    dtype: str,
    device: Device,
    reasons: list[str | None],
    *,
    allow_no_final_norm: bool,
    say: Callable[[str], None],
) -> Proven:
    """Find the layout in which transformers' model gives the plain numbers; raises as `prove` does."""
    from extract.engine.torch_decoder import TorchDecoder
    from extract.engine.torch_proof import prove
    from extract.engine.torch_runtime import TorchRuntime, load_engine_model

    say("proving a layout: sequences of a pass must not touch each other, and must equal the plain model")
    model = load_engine_model(draft, dtype, device.type)
    limits = _limits(recipe, device.type, plain.max_positions)
    proven = prove(
        model,
        max_input_tokens=limits.max_input_tokens,
        max_tokens=limits.max_tokens,
        layout=recipe.layout,
        device=device.type,
        allow_no_final_norm=allow_no_final_norm,
        decide_in_float32=plain.dtype == "float32",
    )
    if proven.limit_max_tokens is not None and proven.limit_max_tokens < limits.max_tokens:
        binding = "positions inside a packed pass of this family"
        limits = dataclasses.replace(limits, max_tokens=proven.limit_max_tokens, binding=binding)
    norm = proven.final_norm

    def opened(contract: Contract) -> Runtime:
        return TorchRuntime(
            contract, TorchDecoder(model, layout=proven.layout, device=device.type, final_norm=proven.final_norm)
        )

    return Proven(
        runtime=_identity(proven.layout, proven.attention, decoder="transformers", recipe=recipe),
        device=device if dtype == "bfloat16" else _any_cpu(device),
        precision=Precision(weights=dtype, activations=dtype, output=dtype),
        limits=limits,
        output=StateOutput(module=norm.described, width=norm.width, dtype=dtype, head_input=proven.head_input),
        proof=proven.proof,
        bound=proven.bound,
        open=opened,
        reasons=(*(reason for reason in reasons if reason is not None), *proven.reasons),
    )


def _identity(layout: Any, attention: str, *, decoder: Any, recipe: Recipe) -> RuntimeIdentity:
    return RuntimeIdentity(
        name="torch",
        version=version("torch"),
        transformers=version("transformers"),
        layout=layout,
        attention=attention,
        decoder=decoder,
        threads=recipe.threads,
    )


def _any_cpu(device: Any) -> Any:
    """float32 arithmetic exists on every CPU of the same architecture."""
    import platform

    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return device
    return dataclasses.replace(device, instruction_set="baseline")


def _limits(recipe: Recipe, kind: str, max_positions: int | None) -> Limits:
    max_input_tokens, binding = recipe.max_input_tokens, "the recipe"
    if max_positions is not None and max_positions < max_input_tokens:
        max_input_tokens, binding = max_positions, "the positions that the model knows"
    return Limits(
        max_input_tokens=max_input_tokens,
        max_sequences=recipe.max_sequences,
        max_tokens=recipe.max_tokens or MAX_TOKENS[kind],
        binding=binding,
    )


def _unfinished(found: Proven, plain: PlainStates) -> Contract:
    """As much of the contract as opening the runtime takes."""
    nothing = Fidelity(
        reference=plain.dtype, num_tokens=0, rel_error_max=0.0, cosine_mean=1.0, cosine_min=1.0, bound=0.0
    )
    return Contract(
        checkpoint=CheckpointIdentity(
            name="", kind="directory", sha256="", dtype="", max_positions=plain.max_positions, **plain.model
        ),
        runtime=found.runtime,
        device=found.device,
        precision=found.precision,
        limits=found.limits,
        output=found.output,
        tokenizer=TokenizerIdentity(kind="none"),
        files=(),
        proof=found.proof,
        fidelity=nothing,
        probe=Probe(tolerance=0.0, sequences=()),
        measured=Measured(tokens_per_s=0.0),
    )
