"""Open an engine directory on this machine: every check that needs no numbers, the runtime it names, then its probe."""

from pathlib import Path

from extract.engine.contract import Runtime, check_files, read_contract
from extract.engine.device import check_device
from extract.engine.replay import replay_probe


def load_runtime(directory: Path, *, threads: int | None = None, share: bool = True) -> Runtime:
    """Open an engine directory on this machine.

    Args:
        directory: the engine.
        threads: CPU threads of the forward pass; `None`: the engine's own number, else all that this process may use.
        share: compute common prefixes and exact duplicates of a pass once, where the engine's decoder can.

    Raises:
        EngineRefused: no contract, another format version, changed files, another device, missing instructions, other
            weights, width or type, or a failed probe. Each message says found, expected and what to do.
    """
    contract = read_contract(directory)
    vendor = contract.runtime.name == "tensorrt-llm"
    if not vendor:  # the vendor's runtime asks for its releases first, and takes a card that fits
        check_device(directory, contract)
    check_files(directory, contract)
    runtime: Runtime
    if vendor:
        from extract.tensorrt.open_runtime import open_tensorrt_runtime

        runtime = open_tensorrt_runtime(directory, contract)
    elif contract.runtime.decoder == "own":
        from extract.cpu.runtime import open_cpu_runtime

        runtime = open_cpu_runtime(directory, contract, threads=threads, share=share)
    else:
        from extract.engine.torch_runtime import open_torch_runtime

        runtime = open_torch_runtime(directory, contract, threads=threads)
    replay_probe(directory, runtime)
    return runtime
