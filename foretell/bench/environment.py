"""What a measurement was made on: enough to make it again."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from foretell.attention.pool import num_threads

PACKAGES = ("foretell", "torch", "transformers", "numpy", "numba", "gguf")


def environment() -> dict[str, object]:
    """Versions, processor, threads and commit; no names of machines, users or folders."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "commit": _commit(),
        "command": shlex.join([_program(), *sys.argv[1:]]),
    }


def told(environment: Mapping[str, Any]) -> dict[str, str]:
    """What a page says of an `environment`."""
    packages: Mapping[str, str] = environment["packages"]
    return {
        "processor": f"{environment['cpu']}, threads: {environment['threads']}",
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "commit": environment["commit"] or "unknown",
        "command": environment["command"],
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "foretell" if name == "__main__.py" else name


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit the package runs from, with ``+changes`` if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            [*git, *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        # A package installed below somebody else's repository has no commit of its own.
        if not run("ls-files", "--", Path(__file__).name):
            return None
        changed = run("status", "--porcelain", "--untracked-files=no", "--", "..")
        return run("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
