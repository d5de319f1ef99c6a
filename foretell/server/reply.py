"""What answers look like: the bodies and the events of OpenAI's API."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

from foretell.answer import Delta, Result
from foretell.sequence import FinishReason, Logprob, Sequence, Step
from foretell.server.splitter import Splitter, put_together
from foretell.terminal import Origins

DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(results: Iterable[Result | None], num_prompts: int = 1) -> dict[str, Any]:
    """Counts over the answers of a request; a prompt counts once, however many answers it got."""
    done = [result for result in results if result is not None]
    prompts = done[:: max(1, len(done) // num_prompts)]
    stats = [result.stats for result in done]
    prompt_tokens = sum(len(result.prompt_token_ids) for result in prompts)
    completion_tokens = sum(s.num_tokens for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    passes = sum(s.num_passes for s in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.stats.num_cached_tokens for result in prompts)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": 0,
        },
        "speculation": {
            "target_passes": passes,
            "tokens_per_pass": round(completion_tokens / passes, 4) if passes else 0.0,
            "drafted_by_position": _add_up([s.drafted_by_position for s in stats]),
            "accepted_by_position": _add_up([s.accepted_by_position for s in stats]),
        },
    }


def _ended(result: Result, splitter: Splitter | None) -> str:
    """A call that was cut ended for want of room."""
    stopped = result.finish_reason == FinishReason.STOP
    calls = splitter is not None and splitter.num_calls > 0
    return "tool_calls" if stopped and calls else str(result.finish_reason)


def _add_up(counts: list[list[int]]) -> list[int]:
    depth = max(map(len, counts), default=0)
    return [sum(c[i] for c in counts if i < len(c)) for i in range(depth)]


class Logprobs:
    """Log-probabilities in the two shapes of OpenAI's API.

    Args:
        tokenizer: of the model.
        top: how many alternatives were asked for.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self.tokenizer, self.top = tokenizer, top
        self._offset = 0  # of the next token in the text, for completions

    def chat(self, found: list[Logprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._text(token)
            whole = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": _finite(logprob), "bytes": whole}

        content = [
            {
                **entry(each.token_id, each.logprob),
                "top_logprobs": [entry(*pair) for pair in each.top[: self.top]],
            }
            for each in found
        ]
        return {"content": content, "refusal": None}

    def completion(self, found: list[Logprob]) -> dict[str, Any]:
        tokens = [self._text(each.token_id) for each in found]
        offsets: list[int] = []
        for text in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            {self._text(token): _finite(value) for token, value in each.top[: self.top]}
            for each in found
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(each.logprob) for each in found],
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0  # JSON has no infinity


class Report:
    """What each step of one answer owed to the draft.

    Args:
        tokenizer: of the model.
        sequence: the answer; its draft trees are told if it keeps them.
    """

    def __init__(self, tokenizer: Any, sequence: Sequence) -> None:
        self.tokenizer, self.traced = tokenizer, sequence.trace is not None
        self._origins = Origins(tokenizer, sequence.tokens[: sequence.num_prompt])

    def of(self, delta: Delta) -> dict[str, Any]:
        pieces = self._origins.split(delta.text, delta.token_ids, delta.from_draft)
        found: dict[str, Any] = {
            "pieces": [[text, drafted] for text, drafted in pieces],
            "from_draft": delta.from_draft,
        }
        if self.traced:
            found["trees"], rest = [], delta.token_ids
            for step in delta.steps:
                rest = rest[len(step.accepted) :]
                own, rest = rest[:1], rest[1:]
                found["trees"].append(self._tree(step, own))
        return found

    def _tree(self, step: Step, own: list[int]) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token], skip_special=False) for token in step.tokens]
        said = self.tokenizer.decode(own, skip_special=False) if own else None
        return {"texts": texts, "parents": step.parents, "accepted": step.accepted, "own": said}


class Shape:
    """Chat or plain completion: how choices are spelled.

    Args:
        chat: chat completions, else completions.
        request_id: what the client sees as the answer's id.
        model: what the client calls the model.
    """

    def __init__(self, chat: bool, request_id: str, model: str) -> None:
        self.chat = chat
        self.head = {
            "id": request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def body(self, choices: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        return {**self.head, "choices": choices, "usage": counts}

    def choice(
        self, index: int, result: Result, logprobs: Logprobs | None, splitter: Splitter | None
    ) -> dict[str, Any]:
        """One whole answer's entry."""
        end = {"finish_reason": str(result.finish_reason)}
        found = result.logprobs or []
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": result.text}
            message["refusal"] = None
            if splitter:
                text, calls = splitter.feed(result.text)
                rest, more = splitter.end()
                message["content"] = text + rest
                if splitter.num_calls:
                    message["content"] = message["content"] or None
                    message["tool_calls"] = put_together([*calls, *more])
                end["finish_reason"] = _ended(result, splitter)
            lp = logprobs.chat(found) if logprobs else None
            return {"index": index, "message": message, "logprobs": lp, **end}
        lp = logprobs.completion(found) if logprobs else None
        return {"index": index, "text": result.text, "logprobs": lp, **end}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """One event of a stream."""
        head = {**self.head, "object": "chat.completion.chunk"} if self.chat else self.head
        return event({**head, "choices": choices, **more})

    def first(self, index: int) -> dict[str, Any]:
        """The entry that says who speaks, before anything is said."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(
        self,
        index: int,
        delta: Delta,
        logprobs: Logprobs | None,
        report: Report | None,
        splitter: Splitter | None,
    ) -> dict[str, Any] | None:
        """What is new, as an entry of a chunk; None where there is nothing to tell."""
        text, calls = delta.text, list[dict[str, Any]]()
        if splitter:
            text, calls = splitter.feed(text)
            if delta.result:
                rest, more = splitter.end()
                text, calls = text + rest, [*calls, *more]
        end = _ended(delta.result, splitter) if delta.result else None
        if not (text or calls or end or report or (logprobs and delta.token_ids)):
            return None
        entry: dict[str, Any] = {"index": index}
        if self.chat:
            said: dict[str, Any] = {"content": text} if text else {}
            if calls:
                said["tool_calls"] = calls
            entry["delta"] = said
            entry["logprobs"] = logprobs.chat(delta.logprobs) if logprobs else None
        else:
            entry["text"] = text
            entry["logprobs"] = logprobs.completion(delta.logprobs) if logprobs else None
        entry["finish_reason"] = end
        if report is not None:
            entry["speculation"] = report.of(delta)
        return entry
