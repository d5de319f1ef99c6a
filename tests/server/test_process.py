"""`foretell serve` as a process: where it listens, what it logs, and how it is told to stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading

import httpx2 as httpx
import pytest

from tests.server import rig

FLAGS = ["--weights=f32", "--threads=1", "--kv-memory=8MiB", "--port=0"]
LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "seed": 1}


@pytest.fixture
def served():
    """The process, its address, and the lines that it has written."""
    path = str(rig.model().path)
    command = [sys.executable, "-m", "foretell", "serve", f"--model={path}", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    found = threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert found.wait(120), lines
    yield process, re.search(r"http://\S+", "".join(lines))[0], lines, reader
    process.kill()
    process.wait()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_it_has_begun(served, how):
    process, url, lines, reader = served
    assert url.startswith("http://127.0.0.1:")
    with httpx.Client(base_url=url, timeout=120) as http:
        expected = http.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            events = answer.iter_lines()
            told = [next(events)]
            process.send_signal(how)
            told += events
        parts = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == expected
        assert [line for line in told if line][-1] == "data: [DONE]"
    assert process.wait(60) == (130 if how == signal.SIGINT else -how)
    reader.join(10)
    logged = [json.loads(line) for line in lines[1:] if line != "foretell: interrupted\n"]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in logged)
    requests = [line for line in logged if line["logger"] == "foretell.server.requests"]
    assert [line["status"] for line in requests] == [200, 200]
    assert "uvicorn.error" not in {line["logger"] for line in logged}


def test_an_address_that_is_taken_is_one_line(served):
    _, url, _, _ = served
    port = url.rpartition(":")[2]
    path = str(rig.model().path)
    command = [sys.executable, "-m", "foretell", "serve", f"--model={path}", *FLAGS[:-1]]
    done = subprocess.run([*command, f"--port={port}"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 2
    assert re.search(rf"foretell: cannot listen on 127.0.0.1:{port} .*--port", done.stderr)
    assert "Traceback" not in done.stderr
