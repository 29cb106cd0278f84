"""Open an engine that TensorRT-LLM built: release and card first, then the vendor's own loading, then its tensors."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from extract.engine.contract import Contract, EngineDoesNotFit, Runtime
from extract.errors import EngineRefused
from extract.tensorrt.blaming import blaming
from extract.tensorrt.card import Card
from extract.tensorrt.gate import check_vendor

ENGINE_FILE = "rank0.engine"
REBUILD = "An engine file is read by the release that wrote it alone: install that one, or build the engine here."


class NotLoaded(EngineRefused):
    """TensorRT did not take an engine that looks right."""

    template = (
        "{path}: TensorRT-LLM {release} does not load it: {problem}. What it wrote above says more. Let nothing else "
        "run on the card; if that does not help, build the engine again, for smaller passes (--pass-tokens)."
    )


def open_tensorrt_runtime(directory: Path, contract: Contract, card: Card | None = None) -> Runtime:
    """Load an engine onto a card.

    Args:
        directory: an engine whose files have been checked.
        contract: its contract.
        card: the one that the process holds already; `None`: the first free one that fits.

    Raises:
        EngineRefused: another release of TensorRT or TensorRT-LLM, another kind of card, or an engine whose inputs and
            outputs are not what the contract says.
    """
    versions = check_vendor("executor" if contract.cache == "paged" else "run")
    identity = contract.runtime
    for field, found, expected in (
        ("TensorRT-LLM", versions.tensorrt_llm, identity.version),
        ("TensorRT", versions.tensorrt, identity.tensorrt),
    ):
        if found != expected:
            raise EngineDoesNotFit(path=directory, field=field, expected=expected, found=found, advice=REBUILD)
    if card is None:
        from extract.tensorrt.cuda_card import claim_card

        card = claim_card(contract.device, directory)
    try:
        if contract.cache == "paged":
            from extract.tensorrt.executor_runtime import ExecutorRuntime

            with _loading(directory, contract.runtime.version):
                return ExecutorRuntime(directory, contract, card)
        return _open_session(directory, contract, card)
    except BaseException:
        card.close()
        raise


def _loading(directory: Path, release: str) -> AbstractContextManager[None]:
    return blaming(lambda problem: NotLoaded(path=directory, release=release, problem=problem))


def _open_session(directory: Path, contract: Contract, card: Card) -> Runtime:
    from tensorrt_llm.runtime.session import Session

    from extract.tensorrt.session_runtime import SessionRuntime

    # The vendor's package is imported, so its plugins are registered; only now can the engine be read.
    with _loading(directory, contract.runtime.version):
        session: Any = Session.from_serialized_engine(engine=(directory / ENGINE_FILE).read_bytes())
        return SessionRuntime(directory, contract, session, card)


def engine_memory(directory: Path, release: str) -> int | None:
    """Bytes of activations that an engine file plans for, as TensorRT says; `None` where it does not."""
    from tensorrt_llm.runtime.session import Session

    with _loading(directory, release):
        session: Any = Session.from_serialized_engine(engine=(directory / ENGINE_FILE).read_bytes())
    found = getattr(session.engine, "device_memory_size_v2", None)
    return None if found is None else int(found)
