"""Open an engine directory on this machine: every check that needs no numbers, the runtime it names, then its probe.

Files are hashed before they are opened, but for the weights of a card: those are hashed while they are read, because
the processor has nothing else to do then. A runtime whose weights turn out to be others is never handed out.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from extract.cpu.weights import WEIGHTS_FILE
from extract.engine.contract import Contract, Runtime, check_files, read_contract
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
    load = partial(_opened, directory, contract, threads=threads, share=share)
    if own_on_card:
        runtime = load_while_hashing(directory, contract, load)
    else:
        check_files(directory, contract)
        runtime = load()
    replay_probe(directory, runtime)
    return runtime


def load_while_hashing(directory: Path, contract: Contract, load: Callable[[], Runtime]) -> Runtime:
    """Check an engine's files, its weights by other threads while `load()` reads them.

    Args:
        directory: of the engine.
        contract: its contract.
        load: opens it; called when all other files are checked.

    Raises:
        EngineChanged: of any file; also where `load` failed, which then is no wonder.
    """
    weights = tuple(file for file in contract.files if file.name == WEIGHTS_FILE)
    others = tuple(file for file in contract.files if file.name != WEIGHTS_FILE)
    check_files(directory, replace(contract, files=others))
    with ThreadPoolExecutor(1, thread_name_prefix="extract-hash") as pool:
        checked = pool.submit(check_files, directory, replace(contract, files=weights))
        try:
            runtime = load()
        except Exception:
            checked.result()
            raise
        try:
            checked.result()
        except Exception:
            runtime.close()
            raise
    return runtime


def _opened(directory: Path, contract: Contract, *, threads: int | None, share: bool) -> Runtime:
    """The runtime that the contract names."""
    if contract.runtime.name == "tensorrt-llm":
        from extract.tensorrt.open_runtime import open_tensorrt_runtime

        return open_tensorrt_runtime(directory, contract)
    if contract.runtime.decoder != "own":
        from extract.engine.torch_runtime import open_torch_runtime

        return open_torch_runtime(directory, contract, threads=threads)
    if contract.device.type == "cuda":
        from extract.cuda.opening import open_cuda_runtime

        return open_cuda_runtime(directory, contract, share=share)
    from extract.cpu.runtime import open_cpu_runtime

    return open_cpu_runtime(directory, contract, threads=threads, share=share)
