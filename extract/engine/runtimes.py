"""Open an engine directory on this machine: every check that needs no numbers, the runtime it names, then its probe."""

from pathlib import Path

from extract.engine.contract import Runtime, check_files, read_contract
from extract.engine.device import check_device
from extract.engine.fetching import local_engine
from extract.engine.replay import replay_probe


def load_runtime(engine: str | Path, *, threads: int | None = None, share: bool = True) -> Runtime:
    """Open an engine on this machine: once, for several calls of `stream` and `run`; `close` it afterwards.

    Args:
        engine: engine directory, or the address of one.
        threads: CPU threads of the forward pass; `None`: the engine's own number, else all that this process may use.
        share: compute common prefixes and exact duplicates of a pass once, where the engine's decoder can.

    Raises:
        EngineRefused: no contract, another format version, changed files, another device, missing instructions, other
            weights, width or type, or a failed probe. Each message says found, expected and what to do.
    """
    directory = local_engine(str(engine))
    contract = read_contract(directory)
    vendor = contract.runtime.name == "tensorrt-llm"
    own_on_card = contract.runtime.decoder == "own" and contract.device.type == "cuda"
    if not vendor and not own_on_card:  # they look for a card that fits; the vendor's asks for its releases first
        check_device(directory, contract)
    check_files(directory, contract)
    runtime: Runtime
    if vendor:
        from extract.tensorrt.open_runtime import open_tensorrt_runtime

        runtime = open_tensorrt_runtime(directory, contract)
    elif own_on_card:
        from extract.cuda.opening import open_cuda_runtime

        runtime = open_cuda_runtime(directory, contract, share=share)
    elif contract.runtime.decoder == "own":
        from extract.cpu.runtime import open_cpu_runtime

        runtime = open_cpu_runtime(directory, contract, threads=threads, share=share)
    else:
        from extract.engine.torch_runtime import open_torch_runtime

        runtime = open_torch_runtime(directory, contract, threads=threads)
    replay_probe(directory, runtime)
    return runtime
