"""TensorRT-LLM through its stand-in: engines built once a session; what is not told here is in `vendor_rig`."""

import pytest
import vendor_rig


@pytest.fixture(scope="session")
def vendor_engines(tmp_path_factory: pytest.TempPathFactory) -> vendor_rig.VendorEngines:
    """Checkpoints and engines; do not change their files."""
    return vendor_rig.VendorEngines(tmp_path_factory.mktemp("vendor-engines"))
