"""Cached activations as SAELens reads them: a Hugging Face dataset of rows [context, H], with the token of each state.

SAELens wants rows of one length. Rule: the states of all rows of a shard are laid end to end and cut every `context`
tokens, so a row of the cache may hold the end of one text and the beginning of the next; the trainer takes states one
by one and shuffles them, so nothing is made up and nothing padded. What is left at the end of a shard, fewer than
`context` states, is left out and counted.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.exporting.hf_directory import describe, write_stream
from extract.exporting.safetensors import row_ids
from extract.exporting.state_columns import FINAL, check_stored, read_states
from extract.exporting.target import Part, Target, TargetCannotHold, Written, part_of
from extract.shards.values import as_float32
from extract.shards.views import BatchView

CONTEXT = 128
HOOK = "final_norm"
LAYER_HOOK = "blocks.{block}.hook_resid_post"
"""What SAELens calls the state after decoder layer block + 1; the embeddings are what enters block 0."""


class SaelensTarget(Target):
    """`data-00000.arrow`, ..., `state.json`, `dataset_info.json`."""

    kind = "saelens"
    title = "activations for SAELens (cached_activations_path)"
    cannot_carry = (
        "Only states (the final ones, or those of one layer that --layers names) and token ids; bfloat16 becomes "
        "float32, exactly. States of a shard are cut every --context tokens, across rows; fewer than --context of a "
        "shard are left over, left out and counted."
    )
    reading = (
        'import datasets\nrows = datasets.load_from_disk("{path}").with_format("torch")'
        "  # or cached_activations_path, with the same hook_name, context_size and d_in"
    )
    with_states_only = True
    _place = 0

    @property
    def context(self) -> int:
        """States of a row of the cache."""
        return self.request.context or CONTEXT

    @property
    def layer(self) -> str:
        """Which stored states: "final" or "layer_<i>"."""
        name = self.request.layers[0] if self.request.layers else FINAL
        return FINAL if name == FINAL else f"layer_{name}"

    @property
    def layer_read_back(self) -> str:
        """See `Target.layer_read_back`."""
        return self.layer

    @property
    def hook(self) -> str:
        """Name of the column."""
        if self.request.hook is not None or self.layer == FINAL:
            return self.request.hook or HOOK
        block = int(self.layer.removeprefix("layer_")) - 1
        return LAYER_HOOK.format(block=block) if block >= 0 else "blocks.0.hook_resid_pre"

    @cached_property
    def features(self) -> Any:
        """The `datasets.Features` of the cache."""
        import datasets

        number = "float16" if self.stream.dtype == "float16" else "float32"
        found = {self.hook: datasets.Array2D((self.context, self.stream.width), number)}
        if self.stream.spec.input_ids:
            found["token_ids"] = datasets.List(datasets.Value("int32"), length=self.context)
        return datasets.Features(found)

    def refuse(self) -> None:
        """See `Target.refuse`."""
        super().refuse()
        if self.stream.kind != "tokens":
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem=f"holds one state a row ({self.stream.kind})",
                kind=self.kind,
                advice='Export an output of kind "tokens".',
            )
        if len(self.request.layers) > 1:
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem=f"would be asked for {len(self.request.layers)} layers at once",
                kind=self.kind,
                advice="Name one with --layers, and export again for another.",
            )
        check_stored((self.layer,), self.stream.spec, self.stream.output.path)
        if self.hook == "token_ids":
            raise TargetCannotHold(
                path=self.stream.output.path,
                problem="would hold states in a column token_ids",
                kind=self.kind,
                advice="Choose another --hook.",
            )

    def write(self, shard: int, first_row: int, batches: Iterator[BatchView], done: Sequence[Part]) -> Written:
        """One stream file; its length and what was left over."""
        left = 0

        def tables() -> Iterator[pa.Table]:
            nonlocal left
            states: npt.NDArray[Any] = np.zeros((0, self.stream.width), np.float32)
            ids = np.zeros(0, np.int32)
            for batch in batches:
                found = read_states(batch, self.stream.spec, self.layer).values
                found = found if found.dtype == np.float16 else as_float32(found)
                states = found if not len(states) else np.concatenate([states, found])
                if self.stream.spec.input_ids:
                    ids = np.concatenate([ids, row_ids(batch)[0]])
                whole = len(states) // self.context * self.context
                if whole:
                    yield self._table(states[:whole], ids[:whole])
                    states, ids = states[whole:].copy(), ids[whole:]
            left = len(states)

        name = f"data-{shard:05d}.arrow"
        windows = write_stream(self.folder / name, self.features, tables())
        facts = {"windows": windows, "windows_before": sum(part.facts["windows"] for part in done), "left_over": left}
        return Written(files=(name,) if windows else (), facts=facts)

    def finish(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """The two JSON files."""
        return describe(self.folder, self.features, [name for part in parts for name in part.files])

    def read_back(self, parts: Sequence[Part], row: int) -> npt.NDArray[Any] | None:
        """Row `row` of the cache as stored, [context, H]; not a row of the output."""
        flat = self._rows[row : row + 1].column(self.hook).chunk(0).storage.flatten().flatten()
        values: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False).reshape(self.context, self.stream.width)
        return values

    def holds(self, parts: Sequence[Part], row: int, expected: npt.NDArray[Any]) -> bool:
        """Rows of the output are not rows of the cache: the states of one are looked for where they were put."""
        part = part_of(parts, row)
        if row == part.first_row:
            self._place = 0
        start, context = self._place, self.context
        self._place += len(expected)
        exact = expected if expected.dtype == np.float16 else as_float32(expected)
        for window in range(start // context, min(-(-self._place // context), part.facts["windows"])):
            found = self.read_back(parts, part.facts["windows_before"] + window)
            assert found is not None  # every window has states
            first, last = max(start, window * context), min(self._place, (window + 1) * context)
            if not np.array_equal(
                found[first - window * context : last - window * context], exact[first - start : last - start]
            ):
                return False
        return True

    def facts(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What a training configuration must repeat."""
        return {
            "hook_name": self.hook,
            "layer": self.layer,
            "context_size": self.context,
            "d_in": self.stream.width,
            "windows": sum(part.facts["windows"] for part in parts),
            "states_left_over": sum(part.facts["left_over"] for part in parts),
        }

    @cached_property
    def _rows(self) -> Any:
        import datasets

        return datasets.load_from_disk(str(self.folder)).with_format("arrow")

    def _table(self, states: npt.NDArray[Any], ids: npt.NDArray[np.int32]) -> pa.Table:
        schema = self.features.arrow_schema
        count, width = len(states) // self.context, self.stream.width
        inner = pa.ListArray.from_arrays(
            pa.array(np.arange(len(states) + 1, dtype=np.int32) * width), pa.array(states.reshape(-1))
        )
        outer = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * self.context), inner)
        columns = [pa.ExtensionArray.from_storage(schema.field(self.hook).type, outer)]
        if self.stream.spec.input_ids:
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(ids), self.context))
        return pa.Table.from_arrays(columns, schema=schema)


TARGET = SaelensTarget
