"""How long a worker may load its engine, or make no progress, before it is ended and another one is started.

The same for worker processes and for workers on a cluster. A hang of a driver, a library or a disk shows no other sign.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """With workers.

    Attributes:
        boot_timeout_s: until a worker has loaded its engine.
        stall_timeout_s: without any progress while it has a shard.
    """

    boot_timeout_s: float = 1800.0
    stall_timeout_s: float = 1800.0

    def lost_with(self, *, loading: bool, has_work: bool, silent_s: float) -> str | None:
        """Why to end a worker that has shown nothing for so many seconds; `None`: no reason yet."""
        if loading and silent_s > self.boot_timeout_s:
            return f"its engine was not loaded after {self.boot_timeout_s:,.0f} s"
        if not loading and has_work and silent_s > self.stall_timeout_s:
            return f"no progress for {self.stall_timeout_s:,.0f} s"
        return None


USUAL_PATIENCE = Patience()
