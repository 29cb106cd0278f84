"""Every use of `tensorrt_llm` in our code, read from the source, fits what is known of each of its releases.

The vendor's package cannot be installed here; its facts lie in `data/tensorrt_llm_api.json`. Where a release was not
read, nothing is claimed: `python tests/test_tensorrt_call_sites.py` prints which names those are.
"""

import ast
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stand_in.call_sites import FUNCTIONAL, PACKAGE, Use, our_uses, uses_in
from stand_in.facts import facts
from stand_in.fit import findings, table


@pytest.mark.parametrize("release", facts()["versions"])
def test_our_uses_of_tensorrt_llm_fit_the_release(release):
    assert list(findings(our_uses(), release)) == []


def uses_of_surface() -> list[Use]:
    """What our version gate asks for, as uses: every name in each of its homes."""
    from extract.tensorrt.surface import SURFACE

    uses = []
    for needed in SURFACE:
        for home in needed.homes:
            name, where = (home, needed.name), "surface"
            uses.append(Use(where, name))
            uses += [Use(where, name, attribute=attribute) for attribute in needed.attributes]
            uses += [Use(where, name, parameters=needed.parameters)]
            uses += [Use(where, name, attribute=method, parameters=takes) for method, takes in needed.methods]
    return uses


@pytest.mark.parametrize("release", facts()["versions"])
def test_what_the_version_gate_asks_for_is_there_in_the_release(release):
    assert list(findings(uses_of_surface(), release)) == []


def test_the_version_gate_asks_for_every_name_that_we_use():
    asked = {use.name for use in uses_of_surface()}
    used = {use.name for use in our_uses() if use.name[0] != "tensorrt" and use.arguments is not None}
    assert used - asked - {(FUNCTIONAL, "Tensor")} == set()


def test_the_version_gate_asks_for_every_setting_that_is_set_by_name():
    from extract.tensorrt.surface import BUILD_CONFIG, PLUGIN_CONFIG

    tree = ast.parse((PACKAGE / "tensorrt" / "vendor_settings.py").read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    assert {key.value for table in tables for key in table.keys} == {*BUILD_CONFIG, *PLUGIN_CONFIG} - {"plugin_config"}


FULL, PYDANTIC, LATER_BINDINGS = "0.17.0.dev2024121700", "1.2.1", "1.x-executor-bindings"


@pytest.mark.parametrize(
    ("release", "source", "problem"),
    [
        (FULL, "from tensorrt_llm.builder import BuildConfigs", "has no BuildConfigs"),
        (FULL, "from tensorrt_llm.builder import BuildConfig\nBuildConfig(max_batchsize=1)", "'max_batchsize'"),
        (PYDANTIC, "from tensorrt_llm.builder import BuildConfig\nBuildConfig(max_batchsize=1)", "'max_batchsize'"),
        (FULL, "from tensorrt_llm.builder import BuildConfig\nBuildConfig(**settings)", "not all written out"),
        (PYDANTIC, "from tensorrt_llm.builder import BuildConfig\nBuildConfig.from_dict({})", "no from_dict"),
        (
            FULL,
            """
            from tensorrt_llm.builder import BuildConfig
            config = BuildConfig(max_input_len=128)
            config.plugin_config.context_fhma = True
            """,
            "PluginConfig has no context_fhma",
        ),
        (
            FULL,
            "from tensorrt_llm.plugin.plugin import PluginConfig\nplugin = PluginConfig()\nplugin.a = 1",
            "has no a",
        ),
        (PYDANTIC, "from tensorrt_llm.builder import build\nbuild(model)", "missing a required argument"),
        (FULL, "from tensorrt_llm.builder import build\nengine = build(model, config)\nengine.store(x)", "no store"),
        (FULL, "from tensorrt_llm.builder import BuildConfig\nBuildConfig(**{'max_input': 1})", "'max_input'"),
        (FULL, "def f(states):\n    states.mark_output(label='x')", "unexpected keyword argument 'label'"),
        (FULL, "from tensorrt_llm.models import MODEL_MAP\ncls = MODEL_MAP[a]\ncls.from_checkpoint()", "ckpt_dir"),
        (
            LATER_BINDINGS,
            "from tensorrt_llm.bindings.executor import Request\nRequest(input_token_ids=[1])",
            "missing a required argument: 'max_tokens'",
        ),
        (
            FULL,
            "from tensorrt_llm.bindings.executor import Request\nRequest([1], 1)",
            "too many positional arguments",
        ),
        (
            PYDANTIC,
            """
            if TYPE_CHECKING:
                from tensorrt_llm.builder import BuildConfig

            def settle(config: "BuildConfig") -> None:
                config.max_inputs = 1
            """,
            "BuildConfig has no max_inputs",
        ),
        (FULL, "from tensorrt_llm.bindings import KVCacheType\nKVCacheType.NONE", "KVCacheType has no NONE"),
        (FULL, "import tensorrt\ntensorrt.Builder", "not among the names"),
    ],
)
def test_a_use_that_does_not_fit_is_found(release, source, problem):
    found = list(findings(uses_in(textwrap.dedent(source)), release))
    assert len(found) >= 1
    assert problem in found[0]


@pytest.mark.parametrize("release", facts()["versions"])
def test_uses_as_documented_fit(release):
    source = """
        import tensorrt
        import tensorrt_llm
        from tensorrt_llm.builder import BuildConfig, build
        from tensorrt_llm.models import MODEL_MAP
        from tensorrt_llm.models.modeling_utils import PretrainedConfig
        from tensorrt_llm.bindings.executor import AdditionalModelOutput, OutputConfig, Request
        from tensorrt_llm.runtime.session import Session, TensorInfo

        def kind():
            try:
                from tensorrt_llm.llmapi.kv_cache_type import KVCacheType
            except ModuleNotFoundError:
                from tensorrt_llm.bindings import KVCacheType
            return KVCacheType.DISABLED

        config = PretrainedConfig.from_json_file(path)
        config.set_rank(0)
        config.quantization.kv_cache_quant_algo = None
        settings = BuildConfig(max_input_len=128, opt_num_tokens=128, kv_cache_type=kind())
        settings.plugin_config.use_fp8_context_fmha = False
        model = MODEL_MAP[config.architecture].from_checkpoint(path, config=config)
        engine = build(model, settings)
        engine.save(path)
        print(tensorrt_llm.__version__, tensorrt.__version__, tensorrt.TensorIOMode.INPUT)
        session = Session.from_serialized_engine(data)
        session.infer_shapes([TensorInfo("input_ids", dtype, (1,))])
        session.run(inputs, outputs, stream)
        Request(input_token_ids=[1], max_tokens=1, output_config=OutputConfig(
            additional_model_outputs=[AdditionalModelOutput(name="x", gather_context=True)]))
    """
    assert list(findings(uses_in(textwrap.dedent(source)), release)) == []


def test_a_table_returned_by_a_function_here_counts_as_written_out():
    source = """
        from tensorrt_llm.builder import BuildConfig
        def settings():
            return {"max_inputs": 1}
        BuildConfig(**settings())
    """
    [found] = findings(uses_in(textwrap.dedent(source)), FULL)
    assert "'max_inputs'" in found


def test_an_import_from_one_of_two_homes_alone_is_found():
    [found] = findings(uses_in("from tensorrt_llm.llmapi.kv_cache_type import KVCacheType"), "0.16.0")
    assert "home" in found


if __name__ == "__main__":
    sys.stdout.write(table())
