"""The vendor's part of a build: a checkpoint in, the engine's own files out.

A Hugging Face checkpoint is first converted into the vendor's format, so there is one way from there on. A model object
is used for one build and no other: building changes it.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path

from extract.engine.recipe import Recipe
from extract.errors import EngineRefused
from extract.tensorrt.blaming import blaming
from extract.tensorrt.marked_model import marked_class
from extract.tensorrt.model_shape import CONFIG, ModelShape
from extract.tensorrt.pass_limits import PassLimits
from extract.tensorrt.vendor_settings import build_config

ENGINE_FILES = ("rank0.engine", CONFIG)


class VendorBuildFailed(EngineRefused):
    """The vendor's package gave up on a build."""

    template = (
        "tensorrt-llm {release} could not {step}: {problem}. What it wrote above says more. "
        "Try a smaller --pass-tokens, or --runtime torch."
    )


def convert(checkpoint: Path, dtype: str, output: Path, release: str) -> None:
    """Hugging Face directory -> vendor checkpoint in `output`, with weights in `dtype`.

    Raises:
        VendorBuildFailed: the vendor cannot convert it.
    """
    from tensorrt_llm.models.automodel import AutoModelForCausalLM

    # The type is always named: by itself the vendor turns float32 into float16.
    with _step("convert the checkpoint", release):
        model = AutoModelForCausalLM.from_hugging_face(hf_model_or_dir=str(checkpoint), dtype=dtype)
        model.save_checkpoint(output_dir=str(output), save_config=True)


def build_engine(
    checkpoint: Path, recipe: Recipe, shape: ModelShape, limits: PassLimits, output: Path, scratch: Path, release: str
) -> None:
    """Vendor checkpoint -> `rank0.engine` and the vendor's `config.json` in `output`.

    Raises:
        NotReached: the model cannot be given another output.
        SettingDropped: a setting was not kept.
        VendorBuildFailed: the vendor gave up, or wrote other files.
    """
    from tensorrt_llm.builder import build
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    with _step("read the checkpoint", release):
        config = PretrainedConfig.from_json_file(config_file=str(checkpoint / CONFIG))
        config.set_rank(rank=0)
    if recipe.cache == "none" and config.quantization is not None:
        config.quantization.kv_cache_quant_algo = None  # there is no cache whose scales could be used
    marked = marked_class(
        config.architecture, states=recipe.states, cache=recipe.cache, keep_head=recipe.keep_head, release=release
    )
    settings = build_config(recipe, shape, limits, scratch, release)
    with _step("read the checkpoint", release):
        model = marked.from_checkpoint(ckpt_dir=str(checkpoint), config=config)
    with _step("build the engine", release):
        engine = build(model=model, build_config=settings)
        if engine is None:
            raise ValueError("it returned no engine")
        engine.save(engine_dir=str(output))
    _forget_timing_cache(output / CONFIG)
    missing = [name for name in ENGINE_FILES if not (output / name).is_file()]
    if missing:
        raise VendorBuildFailed(release=release, step="build the engine", problem=f"it wrote no {', '.join(missing)}")


def _forget_timing_cache(config: Path) -> None:
    """Take the scratch folder, which will be gone, out of the vendor's record: the same engine gets the same files."""
    if not config.is_file():
        return
    table = json.loads(config.read_bytes())
    if table.get("build_config", {}).get("output_timing_cache") is not None:
        table["build_config"]["output_timing_cache"] = None
        config.write_text(json.dumps(table, indent=4), encoding="utf-8")


def _step(step: str, release: str) -> AbstractContextManager[None]:
    return blaming(lambda problem: VendorBuildFailed(release=release, step=step, problem=problem))
