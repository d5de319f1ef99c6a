"""The OpenAPI document tells the truth: requests made from it, and answers held against it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foretell.server import schema
from tests.server import rig

SCHEMATHESIS = Path(sys.executable).with_name("st")


@pytest.fixture(scope="module")
def server():
    with rig.running() as made:
        yield made
        made.wait_idle()


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="needs schemathesis")
@pytest.mark.parametrize("phase", ["fuzzing", pytest.param("coverage", marks=pytest.mark.slow)])
def test_whatever_the_document_allows_is_answered_as_it_says(server, phase, tmp_path):
    # What fields have to do with each other is beyond JSON schema: legal bodies may be refused.
    asked = ["-n", "10", "--phases", phase, "--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run(
        [SCHEMATHESIS, "run", server.url + "/openapi.json", *asked],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "Tested: 8" in done.stdout


def test_answers_are_as_the_document_says(server):
    of_chat = server.chat(max_tokens=3, logprobs=True, top_logprobs=2, n=2)
    schema.CHAT.model_validate(of_chat)
    plain = server.complete(prompt="the the the", max_tokens=9, logprobs=2)
    schema.COMPLETION.model_validate(plain)
    schema.MODELS.model_validate(server.http.get("/v1/models").json())
    schema.HEALTH.model_validate(server.http.get("/health").json())
    schema.ERROR.model_validate(server.post("/v1/completions").json())
    document = server.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for route in methods.values():
            assert set(route["responses"]) >= {"200", "4XX", "5XX"}, path
            assert "422" not in route["responses"]
