"""Linears of an int8 engine that compute in bfloat16: what is mixed is exactly what its parts are, and nothing else.

The tiny models and rows are those of `test_packed_decoder`; the yardsticks are the decoders of one precision, bit for
bit, and the plain float64 decoder with a single linear rounded.
"""

import dataclasses
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import plain_decoder
import pytest
import rig
from hypothesis import given
from hypothesis import strategies as st
from kernel_rig import missing_native
from plain_decoder import plain_states
from test_packed_decoder import (
    MICRO_BATCH,
    NATIVE,
    RICH,
    ROWS,
    WAYS,
    Tiny,
    alone,
    case_name,
    decoder,
    distance,
    int8,
    kernels_of,
    states_of,
    written,
)

from extract.cpu.decoder import Exceptions, PackedDecoder
from extract.cpu.implementations import engine_kernels
from extract.cpu.linear_names import LINEARS, is_name, linear_names, linears_of, nearest, short_names
from extract.cpu.movable_runtime import MovableRuntime
from extract.cpu.runtime import NoSuchLinear
from extract.cpu.sign_flips import flip_signs
from extract.cpu.weights import layer_weights, open_weights
from extract.engine.builder import RecipeDoesNotFit, build
from extract.engine.contract import Contract, read_contract, write_contract
from extract.engine.device import computes_in, this_device
from extract.engine.recipe import Recipe, load_recipe, override
from extract.engine.replay import states_of as engine_states
from extract.engine.runtimes import load_runtime
from extract.errors import BadValue
from extract.report import contract_text

rich = pytest.fixture(scope="module", params=[RICH[0], RICH[1], RICH[3]], ids=case_name, name="rich")(written)
"""Norms before, around and after the branches: after alone, linears read the residual stream itself."""

NAMES = ["portable", *([] if missing_native("int8") or missing_native("bfloat16") else ["native"])]
NUM_LAYERS = 4
SOME = frozenset({"0.gate_up", "1.o", "1.down", "2.qkv", "2.gate_up", "3.qkv", "3.down"})
"""Every kind of linear, each beside one of the other precision, and the last layer's queries and keys."""


@contextmanager
def mixed(
    tiny: Tiny, name: str, others: AbstractSet[str], rest: str = "int8", other: str = "bfloat16"
) -> Iterator[PackedDecoder]:
    """A decoder whose linears `others` compute in another precision than the rest."""
    found = PackedDecoder(
        tiny.architecture,
        open_weights(tiny.path),
        kernels_of(name, rest),
        max_positions=400,
        micro_batch=MICRO_BATCH,
        threads=2,
        max_kept=1024,
        exceptions=Exceptions(kernels=kernels_of(name, other), linears=others),
    )
    try:
        yield found
    finally:
        found.close()


class TestNames:
    @given(st.sets(st.sampled_from(linear_names(5))))
    def test_the_short_names_of_a_set_name_that_set(self, linears):
        names = short_names(linears, 5)
        assert linears_of(names, 5) == linears
        assert len(names) <= len(linears)

    def test_a_layer_names_its_linears(self):
        assert linears_of(["1"], 2) == {f"1.{linear}" for linear in LINEARS}
        assert short_names(linears_of(["1", "0.down"], 2), 2) == ("0.down", "1")

    @pytest.mark.parametrize("name", ["2", "2.down", "-1", "1.dwn", "01", "down", "", "1."])
    def test_what_a_decoder_does_not_have_is_refused(self, name):
        with pytest.raises(KeyError) as caught:
            linears_of(["0", name], 2)
        assert caught.value.args == (name,)

    @pytest.mark.parametrize("name", ["", "a", "1.", "1.dwn", "01", "-1", "1.down.x", "²", " 1"])
    def test_what_names_nothing_in_any_decoder_is_known_without_one(self, name):
        assert not is_name(name)

    def test_the_nearest_names_are_said(self):
        assert nearest("3.dwn", 30) == (
            "layers 0 to 29 and their linears N.qkv, N.o, N.gate_up, N.down; nearest: 3.down, 23.down, 13.down"
        )
        assert nearest("xyz", 2) == "layers 0 to 1 and their linears N.qkv, N.o, N.gate_up, N.down"


class TestDecoder:
    @pytest.mark.parametrize("name", NAMES)
    def test_all_linears_in_bfloat16_are_the_bits_of_bfloat16_and_none_those_of_int8(self, rich: Tiny, name):
        for others, precision in ((frozenset(linear_names(NUM_LAYERS)), "bfloat16"), (frozenset(), "int8")):
            with mixed(rich, name, others) as found, decoder(rich, (name, precision), longest=400) as expected:
                for share in (True, False):
                    assert np.array_equal(states_of(found, share=share), states_of(expected, share=share))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("linear", ["0.qkv", "3.qkv", "1.o", "2.gate_up", "3.down"])
    def test_one_linear_in_int8_is_the_plain_decoder_with_that_one_rounded(self, rich: Tiny, name, linear, monkeypatch):
        """All else is exact on both sides, so that but for a number on the edge between two bytes they are alike.

        oneDNN's product of bytes comes out in bfloat16.
        """
        exact = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
        expected = one_rounded(rich, linear, monkeypatch)
        with mixed(rich, name, {linear}, rest="float32", other="int8") as found:
            states = states_of(found, share=False)
        assert distance(expected, exact) > 1e-3
        assert distance(states, expected) <= {"native": 0.1, "portable": 0.4}[name] * distance(expected, exact)

    @pytest.mark.parametrize("name", NAMES)
    def test_more_in_bfloat16_is_nearer(self, rich: Tiny, name):
        exact = np.concatenate(plain_states(rich.path, rich.architecture, ROWS))
        found = []
        for others in (frozenset(), linears_of(["0", "1", "3"], NUM_LAYERS), frozenset(linear_names(NUM_LAYERS))):
            with mixed(rich, name, others) as one:
                found.append(distance(states_of(one, share=True), exact))
        assert found[0] > 1.3 * found[1] > 1.3 * found[2]

    @pytest.mark.skipif(len(NAMES) < 2, reason="no native kernels in bfloat16 and int8 here")
    def test_native_states_are_the_same_bits_however_they_are_computed(self, rich: Tiny):
        assert NATIVE
        with mixed(rich, "native", SOME) as found:
            expected = alone(found)
            for way in WAYS:
                assert np.array_equal(states_of(found, **way), expected), way

    def test_portable_states_are_the_same_but_for_rounding(self, rich: Tiny):
        with mixed(rich, "portable", SOME) as found:
            expected = alone(found)
            for way in WAYS:
                assert distance(states_of(found, **way), expected) <= 1e-3, way


def one_rounded(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plain decoder, signs flipped as int8 has them, with both sides of one linear in 8 bits."""
    layer, linear = name.split(".")
    order = ("qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down")
    calls = iter([(number, one) for _ in ROWS for number in range(NUM_LAYERS) for one in order])
    plain = plain_decoder._linear

    def rounded(x: Any, weight: Any, bias: Any) -> Any:
        if next(calls) != (int(layer), linear):
            return plain(x, weight, bias)
        return int8(x) @ int8(plain_decoder._wide(weight)).T + (0 if bias is None else bias)

    def flipped(weights: Any, architecture: Any, number: int) -> Any:
        return flip_signs(layer_weights(weights, architecture, number), architecture, number)

    with monkeypatch.context() as patch:
        patch.setattr(plain_decoder, "_linear", rounded)
        patch.setattr(plain_decoder, "layer_weights", flipped)
        return np.concatenate(plain_states(tiny.path, tiny.architecture, ROWS))


needs_bfloat16 = pytest.mark.skipif(
    not computes_in(this_device("cpu"), "bfloat16"), reason="no fast arithmetic for bfloat16 on this CPU"
)
RECIPE = Recipe(dtype="int8", device="cpu", max_input_tokens=32, high_precision=("2", "0.down"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    rig.tiny_checkpoint(path, "llama", tokenizer=rig.tiny_tokenizer(), num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "mixed"
    build(checkpoint, path, RECIPE)
    return path


@needs_bfloat16
class TestEngine:
    def test_its_states_are_those_of_its_parts_moved(self, engine):
        contract = read_contract(engine)
        rows = [row[:32] for row in ROWS[:12]]
        loaded = load_runtime(engine, threads=1)
        movable = MovableRuntime(engine, contract, rest="int8", moved="bfloat16", threads=1)
        movable.move({"1.qkv"})
        other = engine_states(movable, rows)
        movable.move(linears_of(RECIPE.high_precision, 3))
        for one, moved, not_moved in zip(engine_states(loaded, rows), engine_states(movable, rows), other, strict=True):
            assert np.array_equal(one, moved)
            assert not np.array_equal(one, not_moved)
        loaded.close()
        movable.close()

    def test_the_contract_and_its_description_say_which_and_the_id_depends_on_it(self, engine):
        contract = read_contract(engine)
        assert contract.precision.high_precision == ("0.down", "2")
        assert (contract.precision.activations, contract.device.instruction_set) == (
            "int8",
            this_device("cpu").instruction_set,
        )
        assert "int8 (0.down, 2 in bfloat16)" in contract_text(contract, engine, engine_kernels(contract))
        assert contract.engine_id != with_names(contract, None).engine_id
        many = with_names(contract, tuple(map(str, range(9)))).precision.described
        assert many == "int8 (0, 1, 2, 3 and 5 more in bfloat16)"

    def test_an_engine_without_it_keeps_the_id_that_it_had(self, engine, monkeypatch):
        counted: list[Any] = []
        monkeypatch.setattr("extract.engine.contract.digest", counted.append)
        for names in (None, ("2",)):
            _ = with_names(read_contract(engine), names).engine_id
        assert ["high_precision" in table["precision"] for table in counted] == [False, True]

    def test_names_that_its_decoder_lacks_are_refused_when_it_is_loaded(self, engine, tmp_path):
        import shutil

        path = tmp_path / "engine"
        shutil.copytree(engine, path)
        write_contract(path, with_names(read_contract(engine), ("0", "2.dwn")))
        with pytest.raises(NoSuchLinear) as caught:
            load_runtime(path)
        assert str(caught.value) == (
            f'{path}: the contract keeps "2.dwn" in high precision, but this decoder has layers 0 to 2 and their '
            "linears N.qkv, N.o, N.gate_up, N.down; nearest: 2.down, 1.down, 0.down. Build it again."
        )

    def test_layers_that_a_checkpoint_lacks_are_refused_before_it_is_read(self, checkpoint, tmp_path):
        recipe = dataclasses.replace(RECIPE, high_precision=("1", "3.down"))
        said: list[str] = []
        with pytest.raises(RecipeDoesNotFit) as caught:
            build(checkpoint, tmp_path / "engine", recipe, say=said.append)
        assert said == []
        assert str(caught.value) == (
            'recipe: high_precision is "3.down", but there are layers 0 to 2 and their linears N.qkv, N.o, N.gate_up, '
            "N.down; nearest: 2.down, 1.down, 0.down."
        )


def with_names(contract: Contract, names: tuple[str, ...] | None) -> Contract:
    return dataclasses.replace(contract, precision=dataclasses.replace(contract.precision, high_precision=names))


class TestRecipe:
    def test_it_is_a_list_of_names(self, tmp_path):
        path = tmp_path / "mixed.toml"
        path.write_text('dtype = "int8"\nhigh_precision = ["2", "5.down"]\n')
        assert load_recipe(path) == Recipe(dtype="int8", high_precision=("2", "5.down"))

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"high_precision": ("2",), "dtype": "bfloat16"}, "left out, or dtype int8"),
            (
                {"high_precision": ("2", "down"), "dtype": "int8"},
                'layers and linears such as "2" and "5.down", not "down"',
            ),
        ],
    )
    def test_what_it_cannot_mean_is_refused(self, keys, expected):
        with pytest.raises(BadValue) as caught:
            override(Recipe(), **keys)
        assert str(caught.value).endswith(f"expected {expected}.")

    def test_a_cpu_without_arithmetic_for_bfloat16_is_refused(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.setattr("extract.engine.device.cpu_level", lambda: "avx2")
        with pytest.raises(RecipeDoesNotFit) as caught:
            build(checkpoint, tmp_path / "engine", RECIPE)
        assert str(caught.value) == (
            "recipe: high_precision is set, in bfloat16, which this cpu has no fast arithmetic for; leave it out."
        )
