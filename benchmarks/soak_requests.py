"""What the clients of soak.py ask for: a few hundred requests, each known by its number."""

from __future__ import annotations

import json
import random
from typing import Any

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "to", "dog", "by"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look", "parameters": SCHEMA}}
    for name in ("look_up", "look_down")
]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\nAnswer with "
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A chat template that knows tools, for a model whose own does not."""

FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    {"tools": TOOLS},
    {"grammar": 'start: /[a-z ]{1,40}/ "."'},
]
EXTRAS: list[dict[str, Any]] = [
    {"n": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"stop": ["\n\n", "sat"]},
    {"logit_bias": {"28": 4, "30": -100}, "min_tokens": 1},
    {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"ignore_eos": True},
]
NONSENSE: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": 5}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
    ("/v1/completions", {"prompt": "x", "grammar": "start: %%"}),
    ("/v1/completions", []),
    ("/v1/completions", {"prompt": "x " * 9000}),
    ("/v1/completions", {"prompt": "x", "tools": []}),
    ("/v1/completions", {"prompt": "x", "speculation": {"k": 99}}),
    ("/v1/completions", {"prompt": "\ud83d"}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "gpt"}),
    ("/detokenize", {"tokens": [10**8]}),
    ("/nowhere", {}),
]
"""Each of them is a 4xx."""


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Route and body of one request; the same number gives the same."""
    rng = random.Random(number)
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 120)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "seed": number}
    if (temperature := rng.choice([None, 0, 0.7, 1.0])) is not None:
        body["temperature"] = temperature
    for extra in EXTRAS:
        if rng.random() < 0.12:
            body |= extra
    chat, logprobs = rng.random() < 0.5, rng.random() < 0.15
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.3:
            body["messages"] += [
                {"role": "assistant", "content": "It ran."}, {"role": "user", "content": "And?"}
            ]  # fmt: skip
        if rng.random() < 0.4:
            body |= rng.choice(FORMS)
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
        return "/v1/chat/completions", body
    body["prompt"] = text if rng.random() < 0.8 else [rng.randint(100, 9000) for _ in range(40)]
    if logprobs:
        body["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        body["grammar"] = json.dumps(SCHEMA)
    return "/v1/completions", body


def told(choices: list[dict[str, Any]]) -> str:
    """What a whole answer says, without what differs each time."""
    return json.dumps([_one(choice) for choice in sorted(choices, key=lambda c: c["index"])])


def _one(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", {"content": choice.get("text")})
    return {
        "text": message["content"] or "",
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "end": choice["finish_reason"],
        "logprobs": _logprobs([choice["logprobs"]]),
    }


def told_by_stream(events: list[dict[str, Any]]) -> str:
    """The same of a stream's events put together."""
    found: dict[int, dict[str, Any]] = {}
    parts = [choice for event in events for choice in event["choices"]]
    for part in parts:
        one = found.setdefault(
            part["index"], {"text": "", "calls": [], "end": None, "logprobs": []}
        )
        delta = part.get("delta", {"content": part.get("text")})
        one["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(one["calls"]):
                one["calls"].append(dict(call["function"]))
            else:
                one["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        one["end"] = part["finish_reason"] or one["end"]
        one["logprobs"].append(part["logprobs"])
    for one in found.values():
        one["logprobs"] = _logprobs(one["logprobs"])
    return json.dumps([found[index] for index in sorted(found)])


def _logprobs(parts: list[dict[str, Any] | None]) -> list[Any]:
    out: list[Any] = []
    for part in filter(None, parts):
        out += part["content"] if "content" in part else part["token_logprobs"]
    return out
