"""The engines that a sweep runs: one for all precisions where our own decoder runs them, else one for each.

Our own decoder packs the weights of an engine for a precision when it opens it, on a CPU and on a card, so one build,
in the checkpoint's own precision, serves all of them. How far the others are from float32 is measured with that decoder
in float32, which the build has compared with the plain model. transformers' layouts are proven for each precision by a
build of its own.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from extract.engine.builder import build
from extract.engine.comparison import available_memory, passage_ids
from extract.engine.contract import Contract, Runtime
from extract.engine.probe import Float32, relative_error
from extract.engine.recipe import Recipe
from extract.engine.replay import states_of
from extract.tuning.results import Difference

if TYPE_CHECKING:
    from extract.engine.next_token import TiedHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine in one precision, on disk."""

    directory: Path
    contract: Contract

    @property
    def num_bytes(self) -> int:
        """About what its weights take in memory."""
        return sum(file.size for file in self.contract.files)

    @property
    def own_on(self) -> str | None:
        """Where our own decoder runs it: "cpu", with micro-batches, or "cuda", with passes; `None`: it does not."""
        return self.contract.device.type if self.contract.runtime.decoder == "own" else None

    def open(self, budget: int | None, threads: int | None) -> Runtime:
        """Load it with this micro-batch (`None`: the contract's), without sharing between rows."""
        if self.own_on == "cuda":
            from extract.cuda.opening import open_cuda_runtime

            smallest = dataclasses.replace(self.contract.limits, memory_bytes=None)
            return open_cuda_runtime(self.directory, dataclasses.replace(self.contract, limits=smallest), share=False)
        if self.own_on == "cpu":
            from extract.cpu.runtime import open_cpu_runtime

            runtime = dataclasses.replace(
                self.contract.runtime, micro_batch=budget or self.contract.runtime.micro_batch
            )
            contract = dataclasses.replace(self.contract, runtime=runtime)
            return open_cpu_runtime(self.directory, contract, threads=threads, share=False)
        from extract.engine.torch_runtime import open_torch_runtime

        return open_torch_runtime(self.directory, self.contract, threads=threads)


class Engines:
    """The engines of one checkpoint by precision, built in `scratch` when they are first asked for."""

    def __init__(
        self,
        checkpoint: str | Path,
        scratch: Path,
        recipe: Recipe,
        tokenizer: Any,
        *,
        allow_pickle: bool,
        say: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._scratch, self._recipe = checkpoint, scratch, recipe
        self._tokenizer, self._allow_pickle, self._say = tokenizer, allow_pickle, say
        self._reference: list[Float32] = []
        self.base = self._build("auto")
        self._built = {self.base.contract.precision.activations: self.base}

    def of(self, precision: str) -> Engine:
        """The engine in this precision; raises as `build` does."""
        if precision not in self._built:
            self._built[precision] = self._with(precision) if self._one_for_all else self._build(precision)
        return self._built[precision]

    def difference(self, precision: str) -> Difference | None:
        """How far it is from float32; `None` where that is the reference, or does not fit in memory."""
        engine = self.of(precision)
        if engine is self.base or not self._one_for_all:
            seen = engine.contract.fidelity
            return Difference(rel_error=seen.rel_error_max, kl=seen.kl_mean, top1=seen.top1)
        if precision == "float32" or available_memory() < 4 * self.base.num_bytes:
            return None
        expected = self._reference or self._states("float32")
        self._reference = expected
        found = self._states(precision)
        error = max(relative_error(one, other) for one, other in zip(found, expected, strict=True))
        head = self._head()
        kl, top1 = (None, None) if head is None else head.compare(np.concatenate(found), np.concatenate(expected))
        return Difference(rel_error=error, kl=kl, top1=top1)

    @property
    def _one_for_all(self) -> bool:
        return self.base.contract.runtime.decoder == "own"

    def _build(self, precision: Any) -> Engine:
        directory = self._scratch / precision
        recipe = dataclasses.replace(self._recipe, dtype=precision)
        contract = build(self._checkpoint, directory, recipe, allow_pickle=self._allow_pickle, say=self._say)
        return Engine(directory=directory, contract=contract)

    def _with(self, precision: str) -> Engine:
        if self.base.own_on == "cuda":
            return self._with_on_card(precision)
        found = dataclasses.replace(self.base.contract.precision, activations=precision)
        return dataclasses.replace(self.base, contract=dataclasses.replace(self.base.contract, precision=found))

    def _with_on_card(self, precision: str) -> Engine:
        from extract.cpu.architecture import read_architecture
        from extract.cuda.opening import terms_on_card

        contract = self.base.contract
        limits = dataclasses.replace(contract.limits, pass_tokens=None, memory_bytes=None)
        terms = terms_on_card(
            read_architecture(self.base.directory), precision, limits, path="recipe", how=contract.runtime.compile
        )
        types = dataclasses.replace(contract.precision, activations=precision, output=terms.output)
        return dataclasses.replace(
            self.base,
            contract=dataclasses.replace(
                contract,
                runtime=dataclasses.replace(contract.runtime, attention=terms.attention),
                precision=types,
                limits=terms.limits,
                output=dataclasses.replace(contract.output, dtype=terms.output),
            ),
        )

    def _states(self, precision: str) -> list[Float32]:
        """States of the passages that builds measure on."""
        limits, checkpoint = self.base.contract.limits, self.base.contract.checkpoint
        ids = passage_ids(self._tokenizer, limits.max_input_tokens, checkpoint.vocab_size)
        runtime = self.of(precision).open(None, None)
        try:
            return states_of(runtime, ids)
        finally:
            runtime.close()

    def _head(self) -> "TiedHead | None":
        """The build has found out whether the embedding is the head."""
        if self.base.contract.fidelity.kl_mean is None:
            return None
        from extract.cpu.architecture import read_architecture
        from extract.cpu.mapped_weights import to_float32
        from extract.cpu.weights import WEIGHTS_FILE, embedding, open_weights
        from extract.engine.next_token import TiedHead

        weights = open_weights(self.base.directory / WEIGHTS_FILE)
        return TiedHead(to_float32(embedding(weights, read_architecture(self.base.directory))))
