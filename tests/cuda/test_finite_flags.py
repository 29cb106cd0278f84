"""What a card says of its states: whether they are finite, of each column, and what is stored is the same without it.

The card of `stand_in.card` does everything as late as it may. Values are planted among the states that it computes, in
any column and pass; what the host would see by itself is the reference.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_rig
import torch
from cuda_rig import LLAMA_8B, batch, contract, runtime
from stand_in.card import StandInCard
from test_packed_decoder import ROWS, Tiny, write_tiny

from extract.cuda.runtime import CudaRuntime, _all_finite
from extract.shards.sink import ShardFacts, ShardWriter
from extract.shards.values import as_float32
from extract.spec import StatesSpec

LAYERS = (0, 2)
VALUES = (float("nan"), -float("inf"), 3e38, 0.0)
WIDTH = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield write_tiny(tmp_path_factory.mktemp("llama"), "llama", {})


class Lookup:
    """In a decoder's place: states that are a function of each token alone, in which values can be planted.

    Args:
        precision: of the states.
        column, value: what is planted, and among which states: the final ones (0), or a layer's.
        passes: in which passes, counted from 0; `None`: in all.
    """

    max_positions, precision = 128, "made up"

    def __init__(self, precision: Any, column: int, value: float, passes: set[int] | None) -> None:
        self.output_dtype = getattr(torch, precision)
        self.table = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(0)).to(self.output_dtype)
        self.column, self.value, self.passes, self.number = column, value, passes, 0

    def layer_states(
        self, input_ids: Any, positions: Any, cu_queries: Any, longest: int, layers: Any, *, last: bool, **_: Any
    ) -> tuple[torch.Tensor, ...]:
        wanted = input_ids[cu_queries[1:].long() - 1] if last else input_ids
        found = [self.table[wanted.long()] * (1 + column) for column in range(1 + len(layers))]
        if self.passes is None or self.number in self.passes:
            found[self.column][7 * self.number % len(wanted), 3] = self.value
        self.number += 1
        return tuple(found)


def computed(found: CudaRuntime, kind: Any) -> tuple[list[Any], Any]:
    """States of all columns as the host has them, and what is known of them."""
    one = batch(ROWS)
    count = one.num_tokens if kind == "tokens" else one.num_sequences
    dtype = np.uint16 if found.decoder.output_dtype == torch.bfloat16 and kind != "mean" else np.float32
    into = [np.empty((count, found.contract.output.width), dtype) for _ in range(1 + len(LAYERS))]
    return into, found.submit(one, kind, LAYERS, into, None).wait()


def stored(path: Path, states: list[Any], kind: Any, dtype: Any, finite: Any) -> ShardFacts:
    spec = StatesSpec(kind=kind, dtype=dtype, layers=LAYERS, record_batch_bytes=2**16)
    rows = shard_rig.token_rows([len(row) for row in ROWS])
    schema = shard_rig.schema_for(spec, width=states[0].shape[1])
    writer = ShardWriter(path, schema, spec, states[0].shape[1], 0, threads=2)
    writer.write(rows, shard_rig.carried(len(ROWS)), np.arange(len(ROWS)), states[0], states[1:], finite)
    return writer.close()


@pytest.mark.parametrize("passes", [{0}, None], ids=["one pass", "every pass"])
@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
def test_a_card_says_what_the_host_would_see_and_what_is_stored_is_the_same(
    tmp_path: Path, kind: Any, share: bool, column: int, passes: Any
) -> None:
    said = []
    for value in VALUES:
        for precision, dtypes in (("float32", ["float32"]), ("bfloat16", ["bfloat16", "float16"])):
            known = contract(replace(LLAMA_8B, hidden_size=WIDTH), precision, pass_tokens=90)  # type: ignore[arg-type]
            decoder: Any = Lookup(precision, column, value, passes)
            states, finite = computed(CudaRuntime(known, decoder, StandInCard(), share=share), kind)
            assert list(finite) == [bool(np.isfinite(as_float32(array)).all()) for array in states]
            said.append(finite[column])
            for dtype in dtypes:
                with_flags = stored(tmp_path / "a", states, kind, dtype, finite)
                assert with_flags == stored(tmp_path / "b", states, kind, dtype, ()), (value, precision, dtype)
    assert True in said
    assert (False in said) or (share and column == 0 and passes is not None)  # computed again, and fine then


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
def test_a_row_that_the_model_itself_spoils_is_found_and_no_other(tiny: Tiny, tmp_path: Path, share: bool) -> None:
    found, bad = runtime(tiny, share=share, card=StandInCard()), ROWS[5][1]
    table: Any = found.decoder.embed.table
    table[bad] = float("nan")
    for kind in ("tokens", "last"):
        states, finite = computed(found, kind)
        facts = stored(tmp_path / "a", states, kind, "float32", finite)
        assert facts == stored(tmp_path / "b", states, kind, "float32", ())
        assert facts.outcomes["non_finite"] == sum(bad in row for row in ROWS)
        assert not finite[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 2), (-1, -1)])
def test_one_value_is_enough(dtype: torch.dtype, value: float, place: tuple[int, int]) -> None:
    states = torch.full((50, 9), torch.finfo(dtype).max, dtype=dtype)
    states[1] = torch.finfo(dtype).min
    assert _all_finite(states).tolist() == [1]
    states[place] = value
    assert _all_finite(states).tolist() == [0]
