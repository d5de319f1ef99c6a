"""Second stage: the target answers the prompts itself. A head must guess what the target says, not
what somebody else said; nothing raises acceptance more."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.config import EngineConfig
from foretell.engine.engine import Engine
from foretell.files import sha256
from foretell.llm import LLM
from foretell.models.checkpoint import read_json
from foretell.progress import progress_bar
from foretell.sequence import FinishReason, SamplingParams, Sequence
from foretell.train.config import RegenerateConfig
from foretell.train.drive import drive
from foretell.train.files import Lines, read_lines, target_digest, write_json
from foretell.train.samples import Sample, read_samples


@dataclass
class Answers:
    """How it went."""

    num_rows: int
    num_kept: int = 0
    """Rows that were there before."""
    num_tokens: int = 0
    """Answer tokens made now."""
    failed: dict[int, str] = field(default_factory=dict[int, str])
    """Rows of samples.jsonl, counted from 0, and why they have no answer."""


class Conversation:
    """A row whose answers are replaced one by one.

    Args:
        sample: what the user says stays; whatever lies behind the last span is a request too.
        end_ids: the model's end-of-turn tokens.
    """

    def __init__(self, sample: Sample, end_ids: Collection[int]) -> None:
        self.sample = sample
        self._end_ids = end_ids
        tokens = sample.tokens.tolist()
        ends = [0, *(end for _, end in sample.spans)]
        starts = [start for start, _ in sample.spans]
        if ends[-1] < len(tokens):
            starts.append(len(tokens))
        self._asked = [tokens[a:b] for a, b in zip(ends, starts, strict=False)]
        self._closings = [tokens[end - 1] for start, end in sample.spans if end > start]
        self.tokens: list[int] = self._asked[0]
        self.spans: list[tuple[int, int]] = []

    @property
    def turn(self) -> int:
        """Answers so far."""
        return len(self.spans)

    def take(self, answer: list[int]) -> bool:
        """Appends an answer and the user's next words; False where there are none."""
        start = len(self.tokens)
        self.tokens = self.tokens + answer
        self.spans.append((start, len(self.tokens)))
        if self.turn == len(self._asked):
            return False
        asked = self._asked[self.turn]
        if answer[-1] in self._end_ids:
            asked = asked[1:] if set(asked[:1]) & set(self._end_ids) else asked
        elif self.turn <= len(self._closings) and self._closings[self.turn - 1] in self._end_ids:
            self.tokens.append(self._closings[self.turn - 1])  # it ran out of tokens
        self.tokens += asked
        return True

    def as_row(self, temperature: float) -> dict[str, Any]:
        return {
            "tokens": self.tokens[: self.spans[-1][1]],
            "spans": self.spans,
            "source": self.sample.source,
            "index": self.sample.index,
            "temperature": temperature,
        }


def regenerate(engine_config: EngineConfig, config: RegenerateConfig, run: Path) -> Answers:
    """Appends to answers.jsonl whatever rows of samples.jsonl it lacks, as they are done.

    A row's answer depends on the row and the settings alone: not on what it ran beside, nor on
    interruptions. Rows that failed are tried again by the next call.

    Raises:
        ValueError: no samples, or answers.jsonl was made with other samples or settings.
    """
    samples, path = run / "samples.jsonl", run / "answers.jsonl"
    settings = {
        "version": 1,
        "samples": _check_samples(run, engine_config.model),
        "target": engine_config.model,
        "weights": engine_config.weights,
        "max_model_len": engine_config.max_model_len,
        "max_tokens": config.max_tokens,
        "temperature": list(config.temperatures),
        "seed": config.seed,
    }
    _check_settings(path, settings)
    llm = LLM(**engine_config.options())
    todo = list(read_samples(samples, llm.engine.runtime.vocab_size))
    out = Answers(len(todo))
    with Lines(path) as lines:
        _check_settings(path, settings)  # whoever held the lock may have begun with others
        write_json(path.with_suffix(".json"), settings)
        done = {sample.index for sample in read_samples(path, llm.engine.runtime.vocab_size)}
        out.num_kept = len(done)
        todo = [sample for sample in todo if sample.index not in done]
        for sample in todo:
            if sample.given:  # nothing to answer
                lines.append(sample.as_row() | {"index": sample.index})
        out.num_kept += sum(sample.given for sample in todo)
        todo = [sample for sample in todo if not sample.given]
        with progress_bar("answers", out.num_rows, done=out.num_kept, lines=True) as advance:
            for sample, row in _answers(llm.engine, todo, config):
                if isinstance(row, str):
                    out.failed[sample.index] = row
                else:
                    lines.append(row)
                    out.num_tokens += sum(end - start for start, end in row["spans"])
                advance(1)
    write_json(path.with_suffix(".json"), settings | {"failed": out.failed})
    return out


def _check_samples(run: Path, model: str) -> str:
    """The digest of samples.jsonl.

    Raises:
        ValueError: there are no samples, they are damaged, or made for another target.
    """
    samples = run / "samples.jsonl"
    if not samples.exists():
        raise ValueError(f"{samples} is missing: make it with foretell train prepare --run {run}")
    check_target(run, model)
    digest = sha256(samples)
    if read_json(run / "samples.json").get("sha256") != digest:
        raise ValueError(f"{samples} is not what samples.json tells of: run prepare again")
    return digest


def check_target(run: Path, model: str) -> None:
    """
    Raises:
        ValueError: the run's texts were prepared for another target.
    """
    path = run / "samples.json"
    about = read_json(path) if path.exists() else {}
    if about and about.get("target_digest") != target_digest(model):
        raise ValueError(
            f"{path}: texts were prepared for {about.get('target')}, not for {model}: give --model "
            f"{about.get('target')}, or prepare another run"
        )


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists() or not any(read_lines(path)):
        return
    before = read_json(path.with_suffix(".json"))
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} was made with {name}={before.get(name)}, not {value}: give the same, or "
                "remove it to begin anew"
            )


def _answers(
    engine: Engine, samples: list[Sample], config: RegenerateConfig
) -> Iterator[tuple[Sample, dict[str, Any] | str]]:
    """Rows as they are done; in place of one that has no answer, why."""
    waiting = (Conversation(sample, engine.end_ids) for sample in samples)
    further: deque[Conversation] = deque()  # conversations go on before others start
    live: dict[str, Conversation] = {}
    refused: list[tuple[Conversation, str]] = []

    def more() -> Sequence | None:
        while conversation := further.popleft() if further else next(waiting, None):
            sequence = _sequence(conversation, config)
            try:
                engine.admit(sequence.tokens, sequence.params)
            except ValueError as error:
                refused.append((conversation, str(error)))
                continue
            live[sequence.request_id] = conversation
            return sequence
        return None

    def ended(conversation: Conversation, reason: str) -> tuple[Sample, dict[str, Any] | str]:
        row = conversation.as_row(_temperature(conversation, config)) if conversation.spans else ""
        return conversation.sample, row or reason

    for sequence in drive(engine, more):
        conversation = live.pop(sequence.request_id)
        answer = sequence.output
        if sequence.finish_reason == FinishReason.ERROR:
            yield ended(conversation, sequence.error or "failed")
        elif not set(answer) - set(engine.end_ids):
            yield ended(conversation, "an empty answer")
        elif conversation.take(answer):
            further.append(conversation)
        else:
            yield ended(conversation, "")
        while refused:
            yield ended(*refused.pop())
    while refused:
        yield ended(*refused.pop())


def _sequence(conversation: Conversation, config: RegenerateConfig) -> Sequence:
    index, turn = conversation.sample.index, conversation.turn
    digest = hashlib.blake2b(f"{config.seed} {index} {turn}".encode(), digest_size=8).digest()
    temperature = _temperature(conversation, config)
    return Sequence(
        request_id=str(index),
        tokens=list(conversation.tokens),
        params=SamplingParams(temperature=temperature, max_tokens=config.max_tokens),
        seed=int.from_bytes(digest, "little"),
    )


def _temperature(conversation: Conversation, config: RegenerateConfig) -> float:
    values = config.temperatures
    return values[conversation.sample.index % len(values)]
