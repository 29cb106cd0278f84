"""The process in which packages are imported for the first time: `python -m extract.doctor.import_trial NAME...`.

Reports line by line, so that whoever started it knows how far it came when a package hangs or ends the process. What
packages print goes nowhere. Of torch it also reports the cards, since the driver too may end a process; TensorRT-LLM is
also held to the names that we use of it.
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main(names: list[str]) -> None:
    """Import each and report, as JSON, `{"begin": NAME}` and then `{"end": NAME, "problem": ..., ...}`."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def say(**facts: Any) -> None:
        report.write(json.dumps(facts) + "\n")
        report.flush()

    for name in names:
        say(begin=name)
        start = time.monotonic()
        module, problem = tried(functools.partial(importlib.import_module, name))
        facts: dict[str, Any] = {"version": str(getattr(module, "__version__", "") or "")}
        if module is not None and name == "torch":
            found, trouble = tried(functools.partial(cards_of, module))
            facts["cuda"] = found if found is not None else {"problem": trouble}
        if module is not None and name == "tensorrt_llm":
            _, problem = tried(check_names)
        say(end=name, problem=problem, seconds=round(time.monotonic() - start, 2), **facts)


def tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """What an action gives, or in one line why it gives nothing; packages may raise anything, `SystemExit` included."""
    try:
        return action(), ""
    except BaseException as error:
        said = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__


def check_names() -> None:
    """Hold the vendor's package to every name that we use of it; raises if it differs."""
    from extract.tensorrt.gate import check_vendor

    check_vendor("build", "run", "executor")


def cards_of(torch: Any) -> dict[str, Any]:
    """What torch says of CUDA: the version that it is built for, and each card that it sees."""
    facts: dict[str, Any] = {"built_for": torch.version.cuda, "hip": getattr(torch.version, "hip", None), "cards": []}
    if facts["built_for"] is None:
        return facts
    _, facts["problem"] = tried(torch.cuda.init)
    if facts["problem"]:
        return facts
    facts["architectures"] = list(torch.cuda.get_arch_list())
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory, _ = tried(functools.partial(torch.cuda.mem_get_info, index))
        facts["cards"].append(
            {
                "name": about.name,
                "compute_capability": f"{about.major}.{about.minor}",
                "total_bytes": about.total_memory,
                "free_bytes": None if memory is None else memory[0],
            }
        )
    return facts


if __name__ == "__main__":
    main(sys.argv[1:])
