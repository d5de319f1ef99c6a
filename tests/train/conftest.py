from __future__ import annotations

import pytest

from tests.train import rig


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return rig.write_model(tmp_path_factory.mktemp("model"))
