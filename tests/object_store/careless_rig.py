"""A server in front of a store that drops the condition of a write, as some stores do."""

from contextlib import AbstractContextManager

import proxy_rig


def careless(endpoint: str) -> AbstractContextManager[str]:
    """The endpoint of a store that overwrites whatever it is told to create."""
    return proxy_rig.proxy(endpoint, dropped=("if-none-match",))
