"""How much memory this process takes now, and at most since a moment. Linux tells; elsewhere nothing is known."""

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start() -> int | None:
    """Forget the peak so far; returns the bytes in memory now."""
    try:
        _CLEAR.write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return None
    return _bytes("VmRSS:")


def peak() -> int | None:
    """Most bytes that were in memory at once since `start`."""
    return _bytes("VmHWM:")


def _bytes(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
