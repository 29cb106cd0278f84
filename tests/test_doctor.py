"""`extract doctor`: true on this machine, and still standing where packages, drivers or files are broken or missing."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, extract, spawn
from stand_in.rig import stand_in

import extract.doctor as doctor_module
from extract.cli.doctor import WIDTH, diagnosis_text
from extract.doctor import Diagnosis, doctor, hardware, imports
from extract.doctor.facts import Card, Cuda, Facts, Package
from extract.doctor.hardware import Smi, SmiCard, Space, nvidia_smi
from extract.doctor.hub import hub
from extract.doctor.imports import Import, try_imports
from extract.doctor.readiness import runtimes, supported
from extract.doctor.wanted_packages import Requirement, requirements

Package_ = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package_:
    """Put a module of a given text in front of all others."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, text: str) -> Path:
        (folder / f"{name}.py").write_text(text)
        return folder

    return write


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    return doctor(120.0)


@pytest.fixture
def ready(here: Diagnosis) -> Facts:
    """The facts of this machine, as if it had a card and all packages."""
    return dataclasses.replace(
        here.facts,
        packages=tuple(dataclasses.replace(one, problem="") for one in here.facts.packages),
        smi=Smi(cards=(smi_card("NVIDIA H200", 150 * 10**9, 149 * 10**9, "580.1", "9.0", "Disabled"),)),
        cuda=Cuda(
            built_for="13.0",
            cards=(Card(name="NVIDIA H200", compute_capability="9.0", total_bytes=150 * 10**9, free_bytes=1),),
        ),
        vendor={
            "tensorrt-llm": Package(name="tensorrt-llm", installed="1.2.1"),
            "tensorrt": Package(name="tensorrt", installed="10.14.1.48"),
            "nvidia-modelopt": Package(name="nvidia-modelopt", installed="0.37.0"),
        },
    )


def smi_card(name: str, total: int, free: int, driver: str, capability: str, mig: str) -> SmiCard:
    return SmiCard(name=name, total_bytes=total, free_bytes=free, driver=driver, compute_capability=capability, mig=mig)


def verdicts(facts: Facts) -> dict[str, tuple[bool, str, tuple[str, ...]]]:
    return {one.name: (one.ready, one.why, one.install) for one in runtimes(facts)}


class TestThisMachine:
    def test_it_knows_what_is_installed(self, here):
        assert here.ready
        for package in here.facts.packages:
            if not package.extra or package.installed:
                assert (package.problem, package.install) == ("", "")
                assert package.installed == metadata.version(package.name)

    def test_it_knows_the_cpu_as_engines_do(self, here):
        from extract.cpu.implementations import kernels_here
        from extract.engine.device import cpu_level

        assert here.facts.cpu.instruction_set == cpu_level()
        assert here.facts.cpu.threads == len(os.sched_getaffinity(0))
        assert here.facts.cpu.kernels["float32"] == kernels_here("float32")
        assert set(here.facts.cpu.kernels) == {"float32", "bfloat16", "int8"}

    def test_it_knows_whether_torch_has_cards(self, here):
        import torch

        assert here.facts.cuda.built_for == torch.version.cuda
        assert len(here.facts.cuda.cards) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)

    def test_memory_and_disks_are_those_of_the_system(self, here):
        facts = here.facts
        assert facts.memory.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert 0 < facts.memory.free_bytes <= facts.memory.total_bytes
        assert 0 < facts.cache.free_bytes <= facts.cache.total_bytes

    def test_the_command_says_it_in_lines_of_a_hundred_columns_and_ends_with_the_runtimes(self, here):
        lines = diagnosis_text(here).splitlines()
        assert all(len(line) <= WIDTH for line in lines if "pip install" not in line)
        assert {line[:11] for line in lines} <= {f"{name:<11}" for name in NAMES}
        assert next(line for line in lines if line.startswith("ready")) == "ready      torch on the CPU"
        assert [line.split(",")[0] for line in lines if line.startswith(("ready", "not ready"))][-1].endswith(
            "quantize"
        )

    def test_it_imports_nothing_heavy_itself(self):
        python = (
            "import sys, extract.cli.doctor, extract.doctor as d\nd.requirements = lambda: []\nd.doctor(60)\n"
            "sys.exit(' '.join({'torch', 'transformers', 'datasets', 'numba', 'tensorrt_llm'} & set(sys.modules)))"
        )
        assert spawn(python=python).err == "\n"


NAMES = (
    "extract",
    "packages",
    "wrong",
    "",
    "cpu",
    "kernels",
    "memory",
    "cache",
    "hub cache",
    "torch",
    "card",
    "vendor",
)
NAMES = (*NAMES, "optional", "ready", "not ready")

RAISES = "raise OSError('libcudart.so.13: cannot open shared object file\\nand more')"
BROKEN = {
    "raises": (RAISES, "does not import (OSError: libcudart.so.13: cannot open shared object file)"),
    "raises without a word": ("raise KeyError", "does not import (KeyError)"),
    "leaves": ("import sys; sys.exit(3)", "does not import (SystemExit: 3)"),
    "ends Python": ("import os; os._exit(7)", "does not import (importing it ends the Python process (code 7))"),
    "crashes": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "does not import (importing it ends the Python process (signal 11))",
    ),
    "prints": ("print('hello' * 9999); raise ImportError('x')", "does not import (ImportError: x)"),
    "does not parse": ("def (", "does not import (SyntaxError: "),
}


class TestBrokenPackages:
    @pytest.mark.parametrize("how", BROKEN)
    def test_a_package_that_breaks_is_named_and_breaks_nothing_else(self, how, fake, monkeypatch):
        text, problem = BROKEN[how]
        fake("safetensors", text)
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("safetensors", ">=0.6"), CLICK])
        found = doctor(60.0)
        safetensors, click = found.facts.packages
        assert safetensors.problem.startswith(problem)
        assert safetensors.install == 'pip install --force-reinstall "safetensors>=0.6"'
        assert (click.name, click.problem) == ("click", "")
        assert not found.ready
        assert found.runtimes[0].why == f"safetensors: {safetensors.problem}"

    def test_a_package_that_hangs_is_not_waited_for(self, fake):
        fake("slow_one", "import time; time.sleep(600)")
        fake("behind_it", "")
        start = time.monotonic()
        found = try_imports([["slow_one", "behind_it"], ["json"]], 3.0)
        assert time.monotonic() - start < 30
        assert found["slow_one"] == Import(
            problem="was still importing after 3 s (extract doctor --seconds 12)", known=False
        )
        assert found["behind_it"].problem.startswith("was not tried in time")
        assert found["json"].problem == ""

    def test_the_whole_command_stands_where_everything_is_broken(self, fake, tmp_path):
        for name in ("torch", "numpy", "pyarrow", "numba", "datasets", "transformers", "tensorrt_llm", "tqdm"):
            folder = fake(name, RAISES)
        ended = spawn("doctor", environment={"PYTHONPATH": str(folder), "HOME": str(tmp_path), "PATH": str(tmp_path)})
        assert (ended.code, ended.err) == (4, "")
        assert (
            "wrong      torch: does not import (OSError: libcudart.so.13: cannot open shared object file)" in ended.out
        )
        assert "--index-url https://download.pytorch.org/whl/cpu" in ended.out
        assert "wrong      datasets: " in ended.out
        assert "           without it: all but Hugging Face datasets as a source\n" in ended.out
        assert "C++ compiler: none" in " ".join(ended.out.split())
        assert "not ready  torch on the CPU, because: " in ended.out
        assert "not ready  TensorRT-LLM, because: its release is not known (0.16 to 1.2.x is needed)" in ended.out
        said = " ".join(ended.out.split())
        assert (
            "torch on the CPU, because: numba, numpy, pyarrow, torch, tqdm, transformers are missing or broken" in said
        )

    def test_a_tensorrt_llm_that_has_what_we_use_of_it_is_found_in_order(self, monkeypatch):
        monkeypatch.setattr(doctor_module, "requirements", lambda: [CLICK])
        with stand_in("1.2.1"):
            vendor = doctor(60.0).facts.vendor["tensorrt-llm"]
        assert (vendor.installed, vendor.problem) == ("1.2.1", "")

    def test_a_tensorrt_llm_that_lacks_what_we_use_of_it_is_not(self, fake, monkeypatch):
        monkeypatch.setattr(doctor_module, "requirements", lambda: [CLICK])
        fake("tensorrt", "__version__ = '10.0'")
        fake("tensorrt_llm", "__version__ = '1.2.1'")
        vendor = doctor(60.0).facts.vendor["tensorrt-llm"]
        assert vendor.installed == "1.2.1"
        assert vendor.problem.startswith(
            "cannot be used (VendorDiffers: tensorrt-llm 1.2.1: BuildConfig is in none of "
        )

    def test_a_missing_package_comes_with_what_to_type(self, monkeypatch):
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("not-there", ">=1"), CLICK])
        found = doctor(60.0)
        assert found.facts.packages[0].problem == "not installed"
        text = diagnosis_text(found)
        assert 'wrong      not-there: not installed\n           pip install "not-there>=1"\n' in text
        assert "not ready  torch on the CPU, because: not-there: not installed\n" in text

    def test_an_old_package_is_named_with_the_version_that_is_wanted(self, monkeypatch):
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("click", ">=99")])
        (click,) = doctor(60.0).facts.packages
        assert click.problem == f"{metadata.version('click')} is installed, >=99 is wanted"
        assert click.install == 'pip install "click>=99"'

    def test_metadata_without_a_module_are_named(self, monkeypatch):
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("click", "")])
        monkeypatch.setattr(doctor_module, "_is_there", lambda module: False)
        (click,) = doctor(60.0).facts.packages
        assert click.problem == f"{metadata.version('click')} is installed, but there is no such module"

    def test_what_only_one_thing_needs_leaves_the_rest_ready(self, ready):
        packages = [
            dataclasses.replace(one, problem="not installed")
            if one.name in ("datasets", "gguf", "matplotlib", "jinja2")
            else one
            for one in ready.packages
        ]
        assert all(verdict[0] for verdict in verdicts(dataclasses.replace(ready, packages=tuple(packages))).values())

    def test_a_torch_that_fails_on_its_cards_keeps_the_cpu(self, fake, monkeypatch):
        fake("torch", FAKE_TORCH.format(init="raise RuntimeError('Found no NVIDIA driver on your system.\\nPlease')"))
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("torch", ">=2.11")])
        found = doctor(60.0)
        assert found.ready
        assert found.runtimes[1].why == "RuntimeError: Found no NVIDIA driver on your system."
        assert found.runtimes[1].install == ("an NVIDIA driver, or in a container: --gpus all",)

    def test_cards_are_those_that_torch_lists_with_the_code_that_it_has_for_them(self, fake, monkeypatch):
        fake("torch", FAKE_TORCH.format(init="pass"))
        monkeypatch.setattr(doctor_module, "requirements", lambda: [Requirement("torch", ">=2.11")])
        found = doctor(60.0)
        new, old = found.facts.cuda.cards
        assert (new.name, new.compute_capability, new.total_bytes, new.free_bytes, new.problem) == (
            "card 0",
            "9.0",
            8,
            5,
            "",
        )
        assert old.problem == "this torch has no code for compute capability 6.1 (it has sm_80, sm_90, compute_90)"
        assert found.runtimes[1].ready


CLICK = Requirement("click", ">=8.1")

FAKE_TORCH = """
from types import SimpleNamespace as N
__version__ = "2.13.0"
version = N(cuda="13.0", hip=None)

def init():
    {init}

cuda = N(
    init=init,
    get_arch_list=lambda: ["sm_80", "sm_90", "compute_90"],
    device_count=lambda: 2,
    get_device_properties=lambda i: N(name=f"card {{i}}", major=(9, 6)[i], minor=i, total_memory=8),
    mem_get_info=lambda i: (5, 8),
)
"""


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return folder


class TestCards:
    def test_nvidia_smi_is_read_field_by_field(self, tmp_path, monkeypatch):
        lines = (
            "echo 'NVIDIA H200, 143771, 143000, 580.65.06, 9.0, Enabled'\necho 'Quadro, [N/A], [N/A], 580, 6.1, [N/A]'"
        )
        monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "nvidia-smi", lines)))
        one, other = nvidia_smi().cards
        assert one == smi_card("NVIDIA H200", 143771 * 2**20, 143000 * 2**20, "580.65.06", "9.0", "Enabled")
        assert (other.total_bytes, other.mig) == (None, "")

    def test_a_driver_that_does_not_know_the_newer_fields_is_asked_for_the_others(self, tmp_path, monkeypatch):
        text = 'case "$1" in *compute_cap*) echo "Field is not valid"; exit 2;; esac\necho "Tesla, 16, 8, 440.33"'
        monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "nvidia-smi", text)))
        assert nvidia_smi().cards == (smi_card("Tesla", 16 * 2**20, 8 * 2**20, "440.33", "", ""),)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("echo 'NVIDIA-SMI has failed because'; exit 9", "nvidia-smi ended with 9: NVIDIA-SMI has failed because"),
            ("exit 6", "nvidia-smi ended with 6: no message"),
            ("exec /bin/sleep 60", "nvidia-smi did not answer within 0.5 s"),
        ],
    )
    def test_one_that_fails_or_hangs_is_a_fact(self, text, problem, tmp_path, monkeypatch):
        monkeypatch.setattr(hardware, "SMI_S", 0.5 if "sleep" in text else 10.0)
        monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "nvidia-smi", text)))
        assert nvidia_smi() == Smi(problem=problem)

    def test_one_that_cannot_be_run_is_a_fact(self, tmp_path, monkeypatch):
        folder = program(tmp_path / "bin", "nvidia-smi", "")
        (folder / "nvidia-smi").write_bytes(b"\x7fELF no program")
        monkeypatch.setenv("PATH", str(folder))
        assert nvidia_smi().problem.startswith("nvidia-smi cannot be run: ")

    def test_the_line_of_a_card_names_all_that_is_known(self, here, ready):
        text = diagnosis_text(dataclasses.replace(here, facts=ready))
        assert (
            "card NVIDIA H200, compute capability 9.0, 149.0 GB of 150.0 GB free, driver 580.1, MIG disabled"
            in " ".join(text.split())
        )


class TestVerdicts:
    def test_a_machine_that_has_all_of_it_is_ready_for_all_of_it(self, ready):
        assert set(verdicts(ready).values()) == {(True, "", ())}

    def test_a_torch_without_cuda_beside_a_card_is_to_be_replaced(self, ready):
        found = verdicts(dataclasses.replace(ready, cuda=Cuda()))["torch on a card"]
        assert found[1] == "this torch is built without CUDA"
        assert found[2][0].startswith("pip install --force-reinstall")

    @pytest.mark.parametrize("release", ["0.15.0", "1.3.0rc11", "1.4.0", "dev"])
    def test_a_release_that_is_not_supported_is_said_with_those_that_are(self, release, ready):
        vendor = {**ready.vendor, "tensorrt-llm": Package(name="tensorrt-llm", installed=release)}
        ok, why, install = verdicts(dataclasses.replace(ready, vendor=vendor))["TensorRT-LLM"]
        assert not ok
        assert why.startswith(f"{release} is installed, 0.16 to 1.2.x is needed")
        assert '"tensorrt-llm>=0.16,<1.3"' in install[0]

    @pytest.mark.parametrize(
        "release", ["0.16.0", "0.17.0.dev2024121700", "0.21.0", "1.0.0rc4", "1.2.1", "1.2.1.post1"]
    )
    def test_releases_with_an_engine_builder_are_supported(self, release):
        assert supported(release)

    def test_a_vendor_package_that_does_not_import_says_why(self, ready):
        broken = Package(name="tensorrt-llm", installed="1.2.1", problem="does not import (ImportError: libnvinfer)")
        vendor = {**ready.vendor, "tensorrt-llm": broken}
        found = verdicts(dataclasses.replace(ready, vendor=vendor))
        assert found["TensorRT-LLM"][1] == "does not import (ImportError: libnvinfer)"
        assert found["extract quantize"][1] == "TensorRT-LLM is not ready"

    def test_quantising_needs_modelopt_too(self, ready):
        vendor = {**ready.vendor, "nvidia-modelopt": Package(name="nvidia-modelopt", problem="not installed")}
        found = verdicts(dataclasses.replace(ready, vendor=vendor))
        assert found["TensorRT-LLM"][0]
        assert found["extract quantize"][1] == "nvidia-modelopt: not installed"
        assert "nvidia-modelopt" in found["extract quantize"][2][0]

    def test_without_a_card_tensorrt_llm_is_of_no_use(self, ready):
        found = verdicts(dataclasses.replace(ready, smi=Smi(problem="no nvidia-smi on PATH"), cuda=Cuda()))
        assert found["torch on a card"][1].endswith("the driver shows no card (no nvidia-smi on PATH)")
        assert found["TensorRT-LLM"][1] == "no NVIDIA card"

    def test_an_old_python_is_the_first_thing_to_change(self, ready, monkeypatch):
        monkeypatch.setattr(doctor_module, "LEAST_PYTHON", (99, 0))
        python = doctor_module._python()
        found = verdicts(dataclasses.replace(ready, python=python))["torch on the CPU"]
        assert found[1].endswith(", 99.0 or newer is needed")

    @pytest.mark.parametrize("not_ready", [False, True])
    def test_the_exit_code_tells_whether_the_torch_runtime_is_ready(self, not_ready, here, monkeypatch, capsys):
        monkeypatch.setattr(doctor_module, "doctor", lambda seconds: dataclasses.replace(here, ready=not not_ready))
        ended: Ended = extract(capsys, "doctor", "--json")
        assert (ended.code, ended.err) == (4 if not_ready else 0, "")
        found: Any = json.loads(ended.out)
        assert found["ready"] is not not_ready
        assert [one["name"] for one in found["runtimes"]] == [one.name for one in here.runtimes]
        assert {one["name"] for one in found["facts"]["packages"]} == {one.name for one in requirements()}


class TestRequirements:
    @pytest.mark.parametrize(
        ("wanted", "version", "allowed"),
        [
            (">=2.0", "2", True),
            (">=2.0", "1.26.4", False),
            (">=5.24,<5.25", "5.24.9", True),
            (">=5.24,<5.25", "5.25.0", False),
            (">=5.24,<5.25", "5.3", False),
            (">=2.11", "2.13.0+cpu", True),
            (">=0.16,<1.3", "1.3.0rc11", False),
            ("==1.5", "1.5.0", True),
            ("!=1.5", "1.5", False),
            (">1.5", "1.5.1", True),
            ("<=1.5", "1.5.1", False),
            ("~=1.5", "0.1", True),
            ("", "0.1", True),
        ],
    )
    def test_versions_are_compared_by_their_numbers(self, wanted, version, allowed):
        assert Requirement("any", wanted).allows(version) is allowed

    def test_they_are_those_of_the_project(self):
        import tomllib

        project = tomllib.loads((Path(doctor_module.__file__).parent.parent.parent / "pyproject.toml").read_text())[
            "project"
        ]
        assert [f"{one.name}{one.wanted}" for one in requirements() if not one.extra] == project["dependencies"]

    def test_without_a_checkout_they_come_from_the_metadata(self, monkeypatch, tmp_path):
        from extract.doctor import wanted_packages as module

        monkeypatch.setattr(module, "__file__", str(tmp_path / "extract" / "doctor" / "wanted_packages.py"))
        lines = ["torch>=2.11", "transformers<5.25,>=5.24", 'tensorrt-llm<1.3,>=0.16; extra == "tensorrt-llm"']
        monkeypatch.setattr(metadata, "requires", lambda name: lines)
        assert requirements() == [
            Requirement("torch", ">=2.11"),
            Requirement("transformers", "<5.25,>=5.24"),
            Requirement("tensorrt-llm", "<1.3,>=0.16", "tensorrt-llm"),
        ]


class TestHubAndDisk:
    def test_the_hub_cache_is_found_counted_and_its_switches_named(self, tmp_path, monkeypatch):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("models--a--b", "models--c", "datasets--d--e", "version.txt"):
            (tmp_path / "hub" / name).mkdir(parents=True)
        found = hub()
        assert (found.space.path, found.num_models, found.num_datasets) == (str(tmp_path / "hub"), 2, 1)
        assert found.offline == ("HF_HUB_OFFLINE",)

    def test_the_hub_cache_is_where_huggingface_hub_looks(self, monkeypatch):
        from huggingface_hub import constants

        assert hub().space.path == constants.HF_HUB_CACHE

    def test_a_directory_that_is_not_there_yet_has_the_disk_of_its_parent(self, tmp_path):
        found = hardware.disk(tmp_path / "a" / "b")
        assert found == dataclasses.replace(
            hardware.disk(tmp_path), path=str(tmp_path / "a" / "b"), free_bytes=found.free_bytes
        )

    def test_a_directory_that_cannot_be_written_says_so(self, tmp_path):
        (tmp_path / "file").touch()
        assert hardware.disk(tmp_path / "file" / "cache").problem == f"{tmp_path / 'file'} cannot be written"

    def test_limits_of_a_container_are_shown(self, here, monkeypatch):
        files = {
            "/sys/fs/cgroup/memory.max": ["2147483648"],
            "/sys/fs/cgroup/cpu.max": ["150000 100000"],
            "/proc/meminfo": ["MemTotal: 8388608 kB"],
        }
        monkeypatch.setattr(hardware, "_lines", lambda path: files.get(path, []))
        memory = hardware.memory()
        assert memory == Space(total_bytes=2**33, free_bytes=None, limit_bytes=2**31)
        facts = dataclasses.replace(here.facts, memory=memory, cpu=hardware.this_cpu())
        text = diagnosis_text(dataclasses.replace(here, facts=facts))
        assert "memory     ? of 8.6 GB free, limited to 2.1 GB\n" in text
        assert "a quota of 1.5 CPUs" in " ".join(text.split())


def test_no_python_to_start_is_a_fact(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    found = imports.try_imports([["json"]], 5.0)
    assert found["json"].problem == "no Python process can be started (No such file or directory)"
