"""The engines' processes, seen from the one that compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foretell.models.hub import resolve

HERE = Path(__file__).parent
PEERS = {"llama.cpp": ("llama_cpp", "run_llamacpp.py"), "OpenVINO": ("openvino", "run_openvino.py")}


class Worker:
    """One engine in a process of its own, asleep between two questions."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        package = str(HERE.parent.parent)  # the foretell beside this script, installed or not
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | ({"PYTHONPATH": package} if name == "foretell" else {}),
        )

    def ask(self, do: str, **rest: Any) -> Any:
        """Raises:
        RuntimeError: the engine could not, or its process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **rest}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            last = (self.log.read().strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"its process ended with {self.process.wait()}: {last}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start(model: str, threads: int, pythons: list[Path], folder: Path | None) -> list[Worker]:
    """foretell first, then every peer that one of the pythons has.

    Raises:
        ValueError: a python does not run, or has none of the peers.
    """
    source = resolve(model)
    folder = folder or source.parent
    folder.mkdir(parents=True, exist_ok=True)
    run = [str(HERE / "run_foretell.py"), str(source), str(threads)]
    workers = [Worker("foretell", [sys.executable, *run])]
    for python in pythons:
        found = [name for name, (module, _) in PEERS.items() if _has(python, module)]
        if not found:
            raise ValueError(f"--peer-python {python}: it has neither llama_cpp nor openvino_genai")
        for name in found:
            script = str(HERE / PEERS[name][1])
            given = source
            if name == "OpenVINO":
                from . import hf_directory  # imports transformers

                given = hf_directory.write(source, folder / f"{source.stem}-hf")
            workers.append(
                Worker(name, [str(python), script, str(given), str(threads), str(folder)])
            )
    return workers


def _has(python: Path, module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", look]).returncode == 0
    except OSError as error:
        raise ValueError(f"--peer-python {python}: {error.strerror}") from None
