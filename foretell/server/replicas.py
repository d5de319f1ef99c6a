"""Where a request goes among engines that serve one model, how many there should be, and what is
said of all of them together. Knows nothing of how they are run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

_TEXT = 2048
"""Characters of a prompt that tell conversations apart; of token ids a quarter."""
_PAGES_IN_USE = 0.8
"""Share of KV pages from which on another replica is wanted: beyond it requests wait for pages."""
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


def conversation(body: bytes) -> str | None:
    """What the turns of one conversation have in common, of a request's body: its beginning up to
    the first message of the user, or the beginning of its prompt. None if there is none."""
    try:
        asked = json.loads(body)
        messages, prompt = asked.get("messages"), asked.get("prompt")
        if isinstance(messages, list):
            roles = [message["role"] for message in messages]
            first = messages[: roles.index("user") + 1] if "user" in roles else messages
            start: Any = [first, asked.get("tools")]
        elif isinstance(prompt, str):
            start = prompt[:_TEXT]
        elif isinstance(prompt, list) and prompt:
            start = prompt[0][:_TEXT] if isinstance(prompt[0], str) else prompt[: _TEXT // 4]
        else:
            return None
        return json.dumps(start, sort_keys=True)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None  # whoever gets it says what is wrong with it


def choose(key: str | None, loads: Mapping[str, int], margin: int) -> str:
    """The replica for a request.

    The one that has the conversation's pages, by rendezvous hashing: when a replica comes or goes,
    only its own conversations move. The least loaded one where that is ahead by more than a margin,
    or where there is no conversation.

    Args:
        key: of the conversation.
        loads: requests in progress by replica; not empty.
        margin: requests.
    """
    least = min(loads, key=lambda name: (loads[name], _rank(key or "", name)))
    if key is None:
        return least
    home = max(loads, key=lambda name: _rank(key, name))
    return home if loads[home] <= loads[least] + margin else least


def _rank(key: str, name: str) -> bytes:
    return blake2b(f"{name}\0{key}".encode(errors="replace"), digest_size=8).digest()


def wanted(replicas: int, requests: float, each: int, pages_in_use: Iterable[float]) -> float:
    """How many replicas there should be.

    Args:
        replicas: that run now.
        requests: in progress or waiting, all together.
        each: requests that one replica runs at once.
        pages_in_use: share of each replica's KV pages.
    """
    return max(requests / each, sum(pages_in_use) / _PAGES_IN_USE if replicas else 0.0)


def joint_health(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What replicas that take requests say of themselves, as of one server."""
    names = ("running", "waiting", "kv_pages", "kv_pages_free")
    status = {"status": "ok", "replicas": len(parts)}
    return status | {name: sum(part[name] for part in parts) for name in names}


def joint_metrics(texts: Mapping[str, str]) -> str:
    """Prometheus' text of each replica, by its name, as one in which a label tells them apart."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # what is said of one, and its samples
    for replica, text in texts.items():
        heads, samples = list[str](), list[str]()
        for line in text.splitlines():
            if line.startswith("#"):
                heads, samples = families.setdefault(line.split()[2], ([], []))
                if line not in heads:
                    heads.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [found[2], f'replica="{replica}"']))
                samples.append(f"{found[1]}{{{labels}}} {found[3]}")
    return "\n".join(line for both in families.values() for part in both for line in part) + "\n"
