"""The patch of a vendor's source: found by structure, right when it runs, byte for byte undone, refused when unsure.

The vendor trees are made here, in our own words, in the documented shape: the decoder base class does its work in the
documented order. The patched method is run, with tensors that know what they are.
"""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import extract

from extract import assets
from extract.errors import BadValue
from extract.patching import DEFAULT_PATCH, OtherKind, apply, check, revert
from extract.patching.patch import MAX_LINES, Kind, Patch, load_patch
from extract.patching.rewriting import OtherPatch, SourceNotWritten
from extract.patching.source_place import StructureNotKnown
from extract.patching.vendor_tree import NoVendorTree, PatchRefused, ReleaseNotCovered

PATCH = load_patch(DEFAULT_PATCH)
KINDS = [kind.name for kind in PATCH.kinds]
NAME = "extract_hidden_states"

STAND_INS = '''
class Tensor:
    """Knows where it comes from, and how it was marked."""

    def __init__(self, origin):
        self.origin, self.shape, self.marked = origin, (5, 8), []

    def mark_output(self, name=None, dtype=None):
        self.marked.append((name, dtype))
        MARKED.append((self.origin, name, dtype))

    def _scaled(self, other):
        return Tensor(self.origin)

    __mul__ = __truediv__ = __imul__ = _scaled


class PretrainedModel:
    def __init__(self, config):
        self.config = config


def gather_last_token_logits(states, last_token_ids, remove_input_padding):
    return Tensor("last of " + states.origin)


def allgather(states, group, gather_dim):
    return Tensor("ranks of " + states.origin)


def index_select(states, dim, index):
    return Tensor("order of " + states.origin)
'''

DECODER = """
class DecoderModelForCausalLM(PretrainedModel):

    def __init__(self, config, transformer, lm_head):
        super().__init__(config)
        self.transformer = transformer
        self.lm_head = lm_head
        self.mup_width_multiplier = getattr(config, 'mup_width_multiplier', None)

    def forward(self,
                input_ids: Tensor,
                {parameters}):
        attention_params = fill(self, attention_params)
        given = dict(input_ids=input_ids, use_cache=use_cache)
        {split}

        hidden_states = self.transformer.forward(**given)
        if use_cache:
            hidden_states, presents = hidden_states

        {join}

        if self.config.mapping.is_last_pp_rank():
            all_hidden_states = hidden_states
            hidden_states = gather_last_token_logits(
                hidden_states, last_token_ids,
                default_net().plugin_config.remove_input_padding)

            # rows of states -> rows of logits
            lm_logits = self.lm_head(hidden_states)
            if self.mup_width_multiplier is not None:
                lm_logits = lm_logits / self.mup_width_multiplier
            {softcap}
            lm_logits.mark_output('logits', self.config.logits_dtype)
        else:
            hidden_states.mark_output('hidden_states_output', self.config.dtype)

        if use_cache and not default_net().plugin_config.paged_kv_cache:
            for i, present in enumerate(presents):
                present.mark_output(f'present_key_value_{{i}}', self.config.kv_dtype)
            if self.config.mapping.is_last_pp_rank():
                return (lm_logits, presents, hidden_states)
            return (hidden_states, presents)
        if self.config.mapping.is_last_pp_rank():
            return lm_logits, hidden_states, all_hidden_states
        return hidden_states


def fuse(model):
    return model
"""

COMMON = ("position_ids", "use_cache", "last_token_ids", "attention_mask", "kv_cache_params", "attention_params")
LATER = ("hidden_states", "prompt_embedding_table", "prompt_tasks", "prompt_vocab_size", "lora_params")

JOIN = """if self.config.mapping.cp_size > 1:
            hidden_states = allgather(hidden_states, self.config.mapping.cp_group, gather_dim=0)
            hidden_states = index_select(hidden_states, 0, cp_join_index)"""


@dataclass(frozen=True)
class Release:
    """A release, and what of the decoder base class may differ between releases."""

    name: str
    parameters: tuple[str, ...] = (*COMMON, "mrope_params", *LATER, "spec_decoding_params")
    split: str = "cp_join_index = None"
    join: str = JOIN
    softcap: str = "if getattr(self.config, 'softcap', None):\n                lm_logits = lm_logits * 2.0"

    def source(self) -> str:
        """The text of modeling_utils.py."""
        parameters = ",\n                ".join(f"{name}=None" for name in self.parameters)
        filled = DECODER.format(parameters=parameters, split=self.split, join=self.join, softcap=self.softcap)
        return f"# Nothing of a vendor's.\n{STAND_INS}\n{filled}"


RELEASES = [
    Release("0.16.0", (*COMMON, *LATER), softcap="pass"),
    Release("0.17.0.dev2024121700", (*COMMON, *LATER, "spec_decoding_params"), softcap="pass"),
    Release("0.18.2"),
    Release("0.21.0", split="cp_join_index = given.pop('cp_join_index', None)"),
    Release("1.0.0", join=f"# reorder\n        {JOIN}"),
    Release("1.1.0", join=JOIN.replace("cp_size > 1", "has_cp()")),
    Release("1.2.1"),
]
SOURCE = RELEASES[-1].source()


@dataclass
class Tree:
    """A vendor tree on disk."""

    root: Path
    package: Path = field(init=False)
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        self.package = self.root / "tensorrt_llm"
        self.file = self.package / "models" / "modeling_utils.py"

    def write(self, source: str | bytes, release: str | None = "1.2.1") -> "Tree":
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(source if isinstance(source, bytes) else source.encode())
        if release is not None:
            (self.package / "version.py").write_text(f'# of the vendor\n__version__ = "{release}"\n')
        return self

    def model(self, name: str, text: str) -> None:
        folder = self.package / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(text)

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "TensorRT-LLM").write(SOURCE)


def forward(
    source: bytes, *, use_cache: bool = False, paged: bool = False, last_rank: bool = True, cp_size: int = 1
) -> tuple[list[tuple[str, str, str]], Any]:
    """Run `DecoderModelForCausalLM.forward`: all that was marked, as (origin, name, dtype), and what it returned."""
    plugins = SimpleNamespace(paged_kv_cache=paged, remove_input_padding=True)
    marked: list[tuple[str, str, str]] = []
    module: dict[str, Any] = {
        "MARKED": marked,
        "fill": lambda model, params: params,
        "default_net": lambda: SimpleNamespace(plugin_config=plugins),
    }
    exec(compile(source, "modeling_utils.py", "exec"), module)
    tensor = module["Tensor"]

    class Transformer:
        def forward(self, use_cache: bool, **given: object) -> object:
            states = tensor("norm" if last_rank else "layers")
            return (states, [tensor("present")]) if use_cache else states

    mapping = SimpleNamespace(
        cp_size=cp_size, cp_group=[0], has_cp=lambda: cp_size > 1, is_last_pp_rank=lambda: last_rank
    )
    config = SimpleNamespace(
        mapping=mapping,
        dtype="bfloat16",
        logits_dtype="float32",
        kv_dtype="fp8",
        softcap=30.0,
        mup_width_multiplier=2.0,
    )
    model = module["DecoderModelForCausalLM"](config, Transformer(), lambda states: tensor(f"head of {states.origin}"))
    return marked, model.forward(tensor("ids"), use_cache=use_cache)


CACHES = {"none": {}, "paged": {"use_cache": True, "paged": True}, "continuous": {"use_cache": True}}
STATES = {"tokens": "norm", "last": "last of norm"}


class TestTheRightTensor:
    @pytest.mark.parametrize("cache", CACHES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
    def test_the_last_stage_marks_the_final_norms_output_and_returns_what_it_did(self, release, kind, cache, tree):
        tree.write(release.source(), release.name)
        before, returned_before = forward(tree.file.read_bytes(), **CACHES[cache])
        change = apply(tree.root, PATCH, kind)
        after, returned = forward(tree.file.read_bytes(), **CACHES[cache])
        assert (change.changed, change.written, change.release, change.kind) == (True, True, release.name, kind)
        assert [mark for mark in after if mark not in before] == [(STATES[kind], NAME, "bfloat16")]
        assert [mark for mark in after if mark in before] == before
        assert [_origins(one) for one in returned] == [_origins(one) for one in returned_before]

    @pytest.mark.parametrize("cache", CACHES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_earlier_stage_marks_what_it_did(self, kind, cache, tree):
        before, _ = forward(tree.file.read_bytes(), last_rank=False, **CACHES[cache])
        apply(tree.root, PATCH, kind)
        after, _ = forward(tree.file.read_bytes(), last_rank=False, **CACHES[cache])
        assert after == before
        assert after[0] == ("layers", "hidden_states_output", "bfloat16")

    @pytest.mark.parametrize("kind", KINDS)
    def test_with_context_parallelism_the_tokens_of_all_ranks_are_marked_in_order(self, kind, tree):
        apply(tree.root, PATCH, kind)
        marked, _ = forward(tree.file.read_bytes(), cp_size=2)
        assert (STATES[kind].replace("norm", "order of ranks of norm"), NAME, "bfloat16") in marked

    def test_all_tokens_are_marked_unless_the_last_is_asked_for(self, tree, capsys):
        assert extract(capsys, "patch", "apply", "--tree", tree.root).code == 0
        assert ("norm", NAME, "bfloat16") in forward(tree.file.read_bytes())[0]


def _origins(returned: Any) -> Any:
    return [one.origin for one in returned] if isinstance(returned, list) else returned.origin


def as_tabs(text: str) -> str:
    """Indented by tabs; continued lines too."""
    return re.sub(r"^( {4})+", lambda found: "\t" * (len(found[0]) // 4), text, flags=re.MULTILINE)


FORMS: dict[str, Callable[[str], bytes]] = {
    "as released": str.encode,
    "carriage returns": lambda text: text.replace("\n", "\r\n").encode(),
    "old Mac line ends": lambda text: text.replace("\n", "\r").encode(),
    "mixed line ends": lambda text: text.replace("class", "class ").replace(":\n", ":\r\n").encode(),
    "tabs": lambda text: as_tabs(text).encode(),
    "white space behind lines": lambda text: text.replace("\n", " \t\n").encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "latin-1": lambda text: b"# coding: latin-1\n" + text.replace("Nothing", "Für dich").encode("latin-1"),
    "form feed": lambda text: text.replace("\nclass", "\f\nclass").encode(),
    "no line end at the end": lambda text: text.rstrip().encode(),
    "a comment behind the anchor": lambda text: text.replace("= hidden_states\n", "= hidden_states  # all\n").encode(),
    "two spaces": lambda text: text.replace("    ", "  ").encode(),
}


class TestBytes:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("form", FORMS)
    def test_only_the_lines_are_added_and_reverting_leaves_no_trace(self, form, kind, tree):
        original = FORMS[form](SOURCE)
        tree.write(original)
        expected = list(PATCH.kinds[KINDS.index(kind)].lines)
        apply(tree.root, PATCH, kind)
        lines = tree.file.read_bytes().splitlines(keepends=True)
        ours = [number for number, line in enumerate(lines) if line.strip().decode("latin-1") in expected]
        assert [lines[number].strip().decode() for number in ours] == expected
        assert b"".join(line for number, line in enumerate(lines) if number not in ours) == original
        assert {_ending(lines[number]) for number in ours} == {_ending(lines[ours[0] - 1])}
        assert (STATES[kind], NAME, "bfloat16") in forward(tree.file.read_bytes())[0]
        assert revert(tree.root, PATCH).changed
        assert tree.file.read_bytes() == original

    def test_a_second_time_changes_nothing_and_says_so(self, tree, capsys):
        apply(tree.root, PATCH, "last")
        once = tree.files()
        again = extract(capsys, "patch", "apply", "--tree", tree.root, "--kind", "last")
        assert (again.code, again.out) == (0, f"unchanged  {tree.file}: it is patched already, kind last\n")
        assert tree.files() == once

    def test_reverting_what_is_not_patched_says_so(self, tree, capsys):
        before = tree.files()
        ended = extract(capsys, "patch", "revert", "--tree", tree.root)
        assert (ended.code, ended.out) == (0, f"unchanged  {tree.file}: it is not patched\n")
        assert tree.files() == before

    @pytest.mark.parametrize("action", ["apply", "revert"])
    def test_a_dry_run_prints_the_change_and_makes_none(self, action, tree, capsys):
        if action == "revert":
            apply(tree.root, PATCH, "tokens")
        before = tree.files()
        ended = extract(capsys, "patch", action, "--tree", tree.root, "--dry-run")
        sign = "+" if action == "apply" else "-"
        assert ended.code == 0
        for line in PATCH.kinds[0].lines:
            assert f"\n{sign}            {line}\n" in ended.out
        assert ended.out.endswith(": kind tokens; a dry run: nothing was changed\n")
        assert tree.files() == before

    def test_the_diff_is_one_that_patch_applies(self, tree, tmp_path):
        import shutil
        import subprocess

        if shutil.which("patch") is None:
            pytest.skip("needs the program `patch`")
        tree.write(SOURCE.replace("\n", "\r\n"))
        diff = apply(tree.root, PATCH, "tokens", dry_run=True).diff
        ran = subprocess.run(["patch", "--binary", "-p1"], cwd=tree.root, input=diff.encode(), capture_output=True)
        assert ran.returncode == 0, ran.stdout
        assert check(tree.root, PATCH).kind == "tokens"

    def test_mode_and_links_are_kept(self, tree, tmp_path):
        tree.file.chmod(0o640)
        twin, real = tmp_path / "cached.py", tmp_path / "real.py"
        os.link(tree.file, twin)  # as package managers share files between environments
        apply(tree.root, PATCH, "tokens")
        assert stat.S_IMODE(tree.file.stat().st_mode) == 0o640
        assert twin.read_bytes() == SOURCE.encode()
        tree.file.rename(real)
        tree.file.symlink_to(real)
        assert revert(tree.root, PATCH).changed
        assert tree.file.is_symlink()
        assert real.read_bytes() == SOURCE.encode()

    def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(self, tree, monkeypatch):
        before = tree.files()

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SourceNotWritten, match=r"cannot be written: No space left on device\. Nothing was changed"):
            apply(tree.root, PATCH, "tokens")
        assert tree.files() == before


def _ending(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


LINE = "            all_hidden_states = hidden_states\n"
MARK = "            # extract: hidden-states {}, {} (extract patch): the final norm's output, [T, H]\n"
CALL = "            all_hidden_states.mark_output('extract_hidden_states', self.config.dtype)\n"
HEAD = "            lm_logits = self.lm_head(hidden_states)\n"

OTHERS = {
    "no class": (("class DecoderModel", "class Decoder"), "it should hold class DecoderModelForCausalLM once, and"),
    "two classes": (
        ("def fuse(", "class DecoderModelForCausalLM:\n    pass\n\ndef fuse("),
        "it should hold class DecoderModelForCausalLM once, and holds it 2 times",
    ),
    "no method": (("def forward(", "def onward("), "should hold method forward once, and holds it not at all"),
    "two methods": (("\n\ndef fuse(", "\n    def forward(self):\n        pass\n\ndef fuse("), "holds it 2 times"),
    "no anchor": (
        ("all_hidden_states", "every_state"),
        "`all_hidden_states = hidden_states` once, and holds it not at",
    ),
    "two anchors": ((LINE, LINE + LINE), "`all_hidden_states = hidden_states` once, and holds it 2 times"),
    "another value": ((LINE, LINE.replace("= hidden", "= 2 * hidden")), "holds it not at all"),
    "no if around it": (
        ("if self.config.mapping.is_last_pp_rank():\n" + LINE, "if True:\n" + LINE),
        "is not directly inside `if ....is_last_pp_rank():`",
    ),
    "in an elif": (
        (
            "if self.config.mapping.is_last_pp_rank():\n" + LINE,
            f"if x.is_last_pp_rank():\n            pass\n        elif y:\n{LINE}",
        ),
        "is not directly inside `if ....is_last_pp_rank():`",
    ),
    "deeper": ((LINE, f"            if self.on():\n    {LINE}"), "is not directly inside `if ....is_last_pp_rank():`"),
    "head before": (
        (LINE, HEAD + LINE, HEAD + "            if", "            if"),
        "does its work in another order than `self.transformer.forward(...)`, `all_hidden_states = hidden_states`",
    ),
    "two heads": ((HEAD, HEAD + HEAD), "should hold `self.lm_head(...)` once, and holds it 2 times"),
    "no gather": (("gather_last_token_logits(\n", "gathered(\n"), "hidden_states = gather_last_token_logits(...)"),
    "more on the line": ((LINE, LINE.rstrip() + "; kept = True\n"), "holds other code beside"),
    "name taken": (
        ("'logits', self", "'extract_hidden_states', self"),
        'already uses the name "extract_hidden_states"',
    ),
    "marked by hand": ((LINE, LINE + CALL), 'already uses the name "extract_hidden_states", and it is not this patch'),
    "no Python": (("def fuse(model)", "def fuse(model"), "it is no Python that can be read"),
    "no text": (("def fuse", "\0def fuse"), "it is no Python that can be read"),
    "an older patch": ((LINE, LINE + MARK.format(0, "tokens") + CALL), "version 0 of this patch"),
    "a newer patch": ((LINE, LINE + MARK.format(23, "x") + CALL), "holds version 23 of this patch"),
    "half of it": ((LINE, LINE + MARK.format(1, "tokens")), "lines of this patch that were changed or moved"),
    "other dtype": (
        (LINE, LINE + MARK.format(1, "tokens") + CALL.replace("self.config.dtype", "None")),
        "were changed",
    ),
    "moved": ((HEAD, HEAD + MARK.format(1, "tokens") + CALL), "were changed or moved"),
    "twice": ((LINE, LINE + 2 * (MARK.format(1, "tokens") + CALL)), "holds this patch twice"),
}


def changed(source: str, steps: tuple[str, ...]) -> str:
    for old, new in zip(steps[::2], steps[1::2], strict=True):
        assert old in source
        source = source.replace(old, new)
    return source


class TestRefused:
    @pytest.mark.parametrize("other", OTHERS)
    def test_another_structure_is_refused_with_the_reason_and_left_alone(self, other, tree, capsys):
        steps, reason = OTHERS[other]
        tree.write(changed(SOURCE, steps))
        before = tree.files()
        ended = extract(capsys, "patch", "apply", "--tree", tree.root)
        assert (ended.code, ended.out) == (4, "")
        assert ended.err.startswith(f"extract: {tree.file}: ")
        assert reason in ended.err
        assert ended.err.endswith(" Nothing was changed.\n")
        assert tree.files() == before
        found = check(tree.root, PATCH)
        assert reason in found.problem
        assert (found.kind, found.applicable) == (None, ())

    @pytest.mark.parametrize("other", ["an older patch", "half of it", "other dtype", "moved", "twice"])
    def test_lines_of_ours_that_are_not_exactly_this_patch_are_not_reverted(self, other, tree):
        tree.write(changed(SOURCE, OTHERS[other][0]))
        before = tree.files()
        with pytest.raises(PatchRefused):
            revert(tree.root, PATCH)
        assert tree.files() == before

    def test_another_kind_is_to_be_reverted_first(self, tree, capsys):
        apply(tree.root, PATCH, "last")
        before = tree.files()
        ended = extract(capsys, "patch", "apply", "--tree", tree.root)
        assert ended.code == 4
        assert ended.err == (
            f"extract: {tree.file}: it is patched already, with kind last, and kind tokens is asked for. Nothing was "
            f"changed. First: extract patch revert --tree {tree.root}\n"
        )
        assert tree.files() == before
        with pytest.raises(OtherKind):
            apply(tree.root, PATCH, "tokens", dry_run=True)

    @pytest.mark.parametrize("release", ["0.15.0", "1.3.0rc11", "2.0", "main", None])
    def test_another_release_is_refused(self, release, tree):
        (tree.package / "version.py").unlink()
        tree.write(SOURCE, release)
        found = r"this is tensorrt_llm \S+" if release else "no release is named in tensorrt_llm/version.py"
        with pytest.raises(ReleaseNotCovered, match=rf"{found}.*, and the patch is for 0\.16 to 1\.2\.x\. Nothing was"):
            apply(tree.root, PATCH, "tokens")
        assert tree.file.read_text() == SOURCE

    @pytest.mark.parametrize("release", ["0.16", "0.16.0.dev1", "0.21.0", "1.0.0rc4", "1.2.1", "v1.2.3"])
    def test_a_release_is_covered_by_its_first_two_numbers(self, release, tree):
        tree.write(SOURCE, release)
        assert apply(tree.root, PATCH, "tokens").written

    def test_a_newer_release_can_still_be_reverted(self, tree):
        apply(tree.root, PATCH, "tokens")
        tree.write(tree.file.read_bytes(), "1.3.0")
        assert revert(tree.root, PATCH).written
        assert tree.file.read_text() == SOURCE

    def test_the_metadata_of_an_installed_package_names_its_release(self, tree):
        (tree.package / "version.py").unlink()
        metadata = tree.root / "tensorrt_llm-0.21.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.4\nName: tensorrt-llm\nVersion: 0.21.0\n\nVersion: 9\n")
        assert check(tree.root, PATCH).release == "0.21.0"

    def test_a_directory_without_the_package_is_refused(self, tmp_path):
        for directory in (tmp_path, tmp_path / "gone"):
            with pytest.raises(NoVendorTree, match="Give the root of the source tree, the site-packages directory"):
                check(directory, PATCH)

    def test_a_release_that_has_no_engine_builder_any_more_is_named(self, tree):
        tree.write(SOURCE, "1.3.0")
        tree.file.unlink()
        expected = r"tensorrt_llm 1\.3\.0 without models/modeling_utils\.py \(the patch is for 0\.16 to 1\.2\.x\)"
        with pytest.raises(NoVendorTree, match=expected):
            apply(tree.root, PATCH, "tokens")

    @pytest.mark.parametrize("action", ["check", "apply", "revert"])
    def test_without_a_tree_there_is_nothing_to_do(self, action, capsys):
        ended = extract(capsys, "patch", action)
        assert ended.code == 2
        assert ended.err == f"extract: {action} needs a tree: give --tree DIR. See extract patch --help\n"

    def test_an_unknown_kind_is_refused(self, tree):
        with pytest.raises(BadValue, match='kind is "first", expected one of "tokens", "last"'):
            apply(tree.root, PATCH, "first")


LLAMA = "from ..modeling_utils import DecoderModelForCausalLM\n\nclass LlamaModel(DecoderModelForCausalLM):\n    pass\n"
MODELS = {
    "llama": LLAMA,
    "mamba": "class MambaModel:\n    def forward(self):\n        return 0\n",
    "deci": LLAMA.replace("Llama", "Deci").replace("pass", "def forward(self, x):\n        return self.head(x)"),
    "eagle": """
from ..llama.model import LlamaModel as Base

class EagleModel(Base):
    def forward(self, *args):
        return super().forward(*args)
""",
    "drafter": """
import tensorrt_llm.models.llama.model as llama

class DrafterMixin:
    def forward(self, *args):
        states = super().forward(*args)
        return states

class BadMixin:
    def forward(self, *args):
        return None

class DrafterModel(DrafterMixin, llama.LlamaModel):
    pass

class BadModel(BadMixin, llama.LlamaModel):
    pass
""",
    "namesake": "class DecoderModelForCausalLM:\n    pass\n\nclass Lost(DecoderModelForCausalLM):\n    pass\n",
}
TABLE = """
from .llama.model import LlamaModel
NAME = "Gemma"

MODEL_MAP = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    NAME: LlamaModel,
    "MambaForCausalLM": MambaModel,
    "Mamba2ForCausalLM": MambaModel,
    "DeciLM": DeciModel,
    "Eagle": EagleModel,
    "Drafter": DrafterModel,
    "Elsewhere": Elsewhere,
    "Lost": Lost,
}
"""


class TestCheck:
    @pytest.fixture
    def models(self, tree: Tree) -> Tree:
        for name, text in MODELS.items():
            tree.model(name, text)
        (tree.package / "models" / "__init__.py").write_text(TABLE)
        return tree

    def test_models_that_the_base_class_does_not_reach_are_named_with_the_reason(self, models):
        reach = check(models.root, PATCH).reach
        assert reach.num_reached == 3  # Llama, Eagle, Drafter
        assert {one.model: (one.architectures, one.why) for one in reach.unreached} == {
            "BadModel": ((), "BadMixin's forward does not call super().forward"),
            "DeciModel": (("DeciLM",), "its forward does not call super().forward"),
            "Elsewhere": (("Elsewhere",), "its class is not below models/"),
            "Lost": (("Lost",), "does not derive from DecoderModelForCausalLM"),
            "MambaModel": (
                ("MambaForCausalLM", "Mamba2ForCausalLM"),
                "does not derive from DecoderModelForCausalLM",
            ),
        }

    def test_the_reach_does_not_depend_on_whether_the_tree_is_patched(self, models):
        before = check(models.root, PATCH).reach
        apply(models.root, PATCH, "tokens")
        assert check(models.root, PATCH).reach == before

    def test_what_is_known_of_a_model_is_said_beside_what_was_found(self, models):
        models.model("mamba", MODELS["mamba"].replace("MambaModel", "MambaForCausalLM"))
        (models.package / "models" / "__init__.py").write_text("MODEL_MAP = {'M': MambaForCausalLM}\n")
        found = next(one for one in check(models.root, PATCH).reach.unreached if one.model == "MambaForCausalLM")
        assert found.about == PATCH.untouched["MambaForCausalLM"]

    def test_a_file_that_is_no_python_is_named(self, models):
        models.model("broken", "class (:\n")
        assert check(models.root, PATCH).reach.unread == ("models/broken/model.py",)

    @pytest.mark.parametrize("where", ["root", "package"])
    @pytest.mark.parametrize("state", ["not patched, can be", "patched (tokens)", "refused"])
    def test_the_command_says_the_state_and_exits_with_4_only_if_refused(self, state, where, models, capsys):
        if state.startswith("patched"):
            apply(models.root, PATCH, "tokens")
        if state == "refused":
            models.write(SOURCE, "1.3.0")
        ended = extract(capsys, "patch", "check", "--tree", models.root if where == "root" else models.package)
        assert (ended.code, ended.err) == (4 if state == "refused" else 0, "")
        lines = ended.out.splitlines()
        assert lines[:3] == [
            f"file       {models.file}",
            f"release    {'1.3.0' if state == 'refused' else '1.2.1'}",
            f"state      {state}",
        ]
        assert "reached    3 models of the vendor's table" in lines
        assert "missed     DeciModel: its forward does not call super().forward" in lines

    def test_as_json_it_is_all_there(self, models, capsys):
        import json

        found = json.loads(extract(capsys, "patch", "check", "--tree", models.root, "--json").out)
        assert found["applicable"] == KINDS
        assert found["kind"] is None
        assert len(found["reach"]["unreached"]) == 5


class TestThePatchItself:
    def test_every_shipped_patch_is_valid_and_listed(self, capsys):
        listed = extract(capsys, "patch", "list").out
        for name in assets.names("patches"):
            assert load_patch(name).kinds
            assert f"patch      {name}, version {load_patch(name).version}, for" in listed

    @pytest.mark.parametrize("kind", PATCH.kinds, ids=lambda kind: kind.name)
    def test_it_is_at_most_six_lines_and_marks_the_one_name(self, kind):
        assert len(kind.lines) <= MAX_LINES == 6
        assert "\n".join(kind.lines).count(PATCH.output_name) == 1
        assert len(kind.lines[0]) <= 100

    def test_the_output_has_the_name_that_our_own_builds_give_it(self):
        marked_model = pytest.importorskip("extract.tensorrt.marked_model")
        assert PATCH.output_name == marked_model.OUTPUT_NAME

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"lines": ("# one",)}, "lines"),
            ({"lines": ("# one", *["x = 1"] * 6)}, "lines"),
            ({"lines": ("# one", "    x = 1")}, "lines"),
            ({"lines": ("# one", "x = ")}, "lines"),
            ({"lines": ("# één", "x = 1")}, "lines"),
            ({"anchor": "x = 1; y = 2"}, "anchor"),
            ({"anchor": "x ="}, "anchor"),
        ],
    )
    def test_a_kind_that_could_not_be_applied_is_refused(self, changes, reason):
        fields = {"name": "k", "summary": "s", "anchor": "x = 1", "lines": ("# one", "x = 1")}
        Kind(**fields)
        with pytest.raises(ValueError, match=f"^{reason}: "):
            Kind(**{**fields, **changes})

    def test_a_first_line_that_does_not_name_version_and_kind_is_refused(self):
        import dataclasses

        with pytest.raises(ValueError, match="lines that begin with"):
            dataclasses.replace(PATCH, version=2)
        assert isinstance(PATCH, Patch)

    def test_refusals_are_of_one_family_with_exit_code_4(self):
        for cls in (NoVendorTree, ReleaseNotCovered, StructureNotKnown, OtherPatch, OtherKind, SourceNotWritten):
            assert issubclass(cls, PatchRefused)
            assert cls.exit_code == 4
