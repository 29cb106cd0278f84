"""The version gate says in one line what of the vendor's package is missing, before anything is built."""

import importlib
import inspect
import sys
import types

import pytest
import vendor_rig
from vendor_rig import RELEASES, recipe, stand_in, vendor

from extract.engine.builder import build
from extract.tensorrt.gate import VendorDiffers, VendorMissing, VendorRelease, check_vendor, differences, find
from extract.tensorrt.surface import SURFACE
from extract.tensorrt.vendor_settings import cache_type

ALL = ("build", "run", "executor", "quantize")
ADVICE = (
    "This needs TensorRT-LLM 0.16 to 1.2.x and an NVIDIA card, best in NVIDIA's own container of that release; "
    "extract doctor says what is there, docs/tensorrt-llm.md how to begin."
)


def refused(kind, checkpoint, tmp_path):
    """The message with which a build is refused; nothing may be left of it."""
    with pytest.raises(kind) as caught:
        build(checkpoint, tmp_path / "out" / "engine", recipe())
    assert vendor_rig.left_behind(tmp_path / "out") == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("purpose", ALL)
def test_every_release_passes(release, purpose):
    with stand_in(release):
        assert check_vendor(purpose).tensorrt_llm == release


@pytest.mark.parametrize("release", RELEASES)
def test_the_kind_of_cache_is_found_in_either_home(release):
    with stand_in(release):
        for cache, name in (("none", "DISABLED"), ("paged", "PAGED")):
            assert cache_type(cache).name == name


def test_a_package_that_is_not_installed(vendor_engines, tmp_path):
    found = refused(VendorMissing, vendor_engines.checkpoint(), tmp_path)
    assert found == f"tensorrt-llm: tensorrt_llm is not installed. {ADVICE}"


def test_a_package_without_tensorrt_itself(monkeypatch):
    with stand_in():
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
        with pytest.raises(VendorMissing, match="tensorrt is not installed"):
            check_vendor("run")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OSError('libnvinfer.so.10: cannot open\\nmore')", "OSError: libnvinfer.so.10: cannot open"),
        ("ImportError('libcuda.so.1: cannot open')", "ImportError: libcuda.so.1: cannot open"),
        ("RuntimeError('')", "RuntimeError: "),
    ],
)
def test_a_package_that_does_not_import(error, said, tmp_path, monkeypatch, vendor_engines):
    (tmp_path / "tensorrt_llm.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(VendorMissing, vendor_engines.checkpoint(), tmp_path)
    assert found == f"tensorrt-llm: it is installed but does not import ({said}). {ADVICE}"


@pytest.mark.parametrize(
    ("release", "why"),
    [
        ("0.15.0", "older ones were not read"),
        ("0.9.0.dev2024", "older ones were not read"),
        ("1.3.0rc27", "newer ones have no engine builder, or were not read"),
        ("1.4.0", "newer ones have no engine builder, or were not read"),
        ("2.0.0", "newer ones have no engine builder, or were not read"),
    ],
)
def test_releases_outside_those_that_are_known(release, why, vendor_engines, tmp_path):
    with vendor():
        importlib.import_module("tensorrt_llm").__version__ = release
        found = refused(VendorRelease, vendor_engines.checkpoint(), tmp_path)
    advice = "Install one of those, or build with --runtime torch."
    assert found == f"tensorrt-llm: release {release} is installed, 0.16 to 1.2.x expected: {why}. {advice}"


def test_a_known_release_without_the_builder(monkeypatch, vendor_engines, tmp_path):
    with vendor():
        monkeypatch.setitem(sys.modules, "tensorrt_llm.builder", None)
        found = refused(VendorDiffers, vendor_engines.checkpoint(), tmp_path)
    problems = "; ".join(f"{name} is in none of tensorrt_llm.builder" for name in ("BuildConfig", "build", "Engine"))
    assert found == (
        f"tensorrt-llm 1.2.1: {problems}. Nothing was started. Releases 0.16 to 1.2.x were read to have them; "
        "install one, or build with --runtime torch."
    )


@pytest.mark.parametrize("needed", SURFACE, ids=lambda needed: needed.name)
@pytest.mark.parametrize("release", vendor_rig.OF_BOTH_KINDS)
def test_a_name_that_is_missing_is_named(needed, release, monkeypatch):
    with stand_in(release):
        check_vendor(*ALL)  # modules that take the name from its home are loaded
        for home in needed.homes:
            try:
                module = importlib.import_module(home)
            except ImportError:
                continue
            monkeypatch.delattr(module, needed.name, raising=False)
        with pytest.raises(VendorDiffers) as caught:
            check_vendor(*needed.purposes)
        missing = f"{needed.name} is in none of {', '.join(needed.homes)}"
        assert str(caught.value).startswith(f"tensorrt-llm {release}: {missing}. Nothing was started.")


def parts():
    """Every parameter, attribute, method and parameter of a method that the surface asks for."""
    for needed in SURFACE:
        for parameter in needed.parameters:
            yield needed, f"{needed.name} takes no {parameter}", ("", parameter)
        for attribute in needed.attributes:
            yield needed, f"{needed.name} has no {attribute}", (attribute, "")
        for method, parameters in needed.methods:
            yield needed, f"{needed.name} has no method {method}", (method, "")
            for parameter in parameters:
                yield needed, f"{needed.name}.{method} takes no {parameter}", (method, parameter)


def taking(names):
    """A function of these keyword parameters."""

    def found(**given):
        raise AssertionError("only asked for what it takes")

    kind = inspect.Parameter.KEYWORD_ONLY
    found.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return found


def whole_without(needed, member, parameter):
    """What the surface asks for, without one part of it."""
    members = {name: None for name in needed.attributes if name != member}
    for method, parameters in needed.methods:
        if method != member or parameter:
            members[method] = staticmethod(taking([one for one in parameters if (method, one) != (member, parameter)]))
    takes = [one for one in needed.parameters if member or one != parameter]
    if needed.attributes or needed.methods:
        return type(needed.name, (), {**members, "__signature__": taking(takes).__signature__})
    return taking(takes)


@pytest.mark.parametrize(("needed", "problem", "part"), [pytest.param(*one, id=one[1]) for one in parts()])
def test_a_part_that_is_missing_is_named_alone(needed, problem, part, monkeypatch):
    for home in needed.homes:
        module = types.ModuleType(home)
        setattr(module, needed.name, whole_without(needed, "nothing", "nothing"))
        monkeypatch.setitem(sys.modules, home, module)
        assert list(differences(needed)) == []
        setattr(module, needed.name, whole_without(needed, *part))
        assert list(differences(needed)) == [problem]
        monkeypatch.setitem(sys.modules, home, None)


def test_settings_that_fields_only_declare_are_found():
    with stand_in("0.17.0.dev2024121700"):
        for name in ("BuildConfig", "PluginConfig"):
            needed = next(one for one in SURFACE if one.name == name)
            assert find(needed).__dataclass_fields__
            assert list(differences(needed)) == []


def test_only_what_is_needed_for_a_purpose_is_asked_for(monkeypatch):
    with stand_in():
        monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings.executor", None)
        check_vendor("build", "run", "quantize")
        with pytest.raises(VendorDiffers, match="ExecutorConfig is in none of"):
            check_vendor("executor")


def test_what_the_vendor_prints_when_it_is_imported_is_no_result(capsys):
    with stand_in(noisy=True):
        check_vendor("run")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "[TensorRT-LLM] TensorRT-LLM version: 1.2.1\n")
