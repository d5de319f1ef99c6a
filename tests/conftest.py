"""What all tests share: one thread a process, nothing left to chance, names that stay."""

import os
import random
import re
import secrets
import signal
import zlib
from collections.abc import Iterator
from tempfile import gettempdir

import numpy as np
import pytest

# Results do not depend on it (a test of its own says so), and OpenMP's spinning workers make two
# busy processes on two cores many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

# A shell's background job starts with SIGINT ignored, and so would the programs that tests start
# and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time; --hypothesis-profile=default looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of a test do not depend on those before it, nor does the seed of a request without
    one, which comes from the system otherwise."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(secrets, "randbits", random.Random(seed).getrandbits)


@pytest.fixture(autouse=True, scope="session")
def own_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What drafts cost is measured anew: what former runs left on the machine does not count."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretell.engine.kept.home", lambda: home)
        yield


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names without the temporary directory of a model: workers have to agree on them."""
    if isinstance(val, str) and gettempdir() in val:
        return re.sub(rf"{re.escape(gettempdir())}/[^/]*/", "", val)
    return None
