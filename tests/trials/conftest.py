"""Trials: what went wrong somewhere in a system like this one, tried here; tests/README.md lists the claims."""

import number_rig
import pytest


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> number_rig.Subjects:
    """Checkpoints and engines of `number_rig`; do not change their files."""
    return number_rig.Subjects(tmp_path_factory.mktemp("subjects"))
