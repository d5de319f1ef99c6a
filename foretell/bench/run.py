"""Plain against speculative decoding, measured alternately in one run on the same prompts."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.workloads import Conversation, by_category
from foretell.config import MAX_NUM_SEQS, check_range
from foretell.files import write_whole
from foretell.sequence import FinishReason, SamplingParams

if TYPE_CHECKING:  # torch comes in with it, and --help must not wait for torch
    from foretell.answer import Result
    from foretell.llm import LLM

PLAIN = "plain"
# Rules whose text is that of plain decoding, token for token, at every temperature.
SAME_TEXT = frozenset({"coupled"})


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured.

    Raises:
        ValueError: a value is out of range; the message says what is legal.
    """

    max_tokens: int = 128
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    batch: int = 1
    """Conversations that run at once."""
    seed: int = 0
    """Same seed, same texts; every conversation gets its own from it."""

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_NUM_SEQS, "batch")
        check_range(self, 2, None, "max_tokens")
        SamplingParams(temperature=self.temperature)  # refuses what is out of range


@dataclass(frozen=True)
class Arm:
    """One way to decode, compared with the others."""

    name: str
    llm: LLM
    speculate: bool = True
    same_text: bool = True
    """Does it promise the text of plain decoding?"""


@dataclass(frozen=True)
class Measured:
    """One answer of one arm. Times in seconds."""

    id: str
    category: str
    turn: int
    arm: str
    num_prompt_tokens: int
    num_tokens: int
    num_passes: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    ttft: float
    gaps: list[float]
    """Between each token and the one before; 0 for tokens that came in one step."""
    wall: float
    """This answer's share of the time its batch took, prefill included."""
    finish_reason: str
    differs_at: int | None = None
    """First token that is not plain decoding's; None if all are the same."""


@dataclass
class Measurement:
    """Everything measured so far, in order."""

    answers: list[Measured] = field(default_factory=list[Measured])
    skipped: list[str] = field(default_factory=list[str])
    """Turns left out because they do not fit into the context with their answer."""
    complete: bool = True
    """False after an interruption; what was measured before it is whole."""


def measure(
    arms: SequenceOf[Arm],
    conversations: list[Conversation],
    config: BenchConfig,
    room: int,
    advance: Callable[[int], None] = lambda turns: None,
) -> Measurement:
    """Asks every turn of every conversation once for each arm.

    The arms take turns prompt by prompt, in an order that is reversed from one prompt to the next,
    so that a machine that gets slower or hotter does so for all of them. Later turns of a
    conversation follow on the first arm's answers, whoever answers them, so that all arms always
    see the same prompt. Ctrl-C ends it early and keeps what is whole.

    Args:
        arms: the first one is what the others are compared with.
        conversations: what to ask; those of one category share a batch.
        room: longest prompt plus answer in tokens.
        advance: told how many turns are done.

    Raises:
        ValueError: the engine failed an answer, or there was none to ask for.
    """
    assert len({arm.name for arm in arms}) == len(arms) > 0
    result = Measurement()
    seeds = {id(c): config.seed + i for i, c in enumerate(conversations)}
    count = 0
    try:
        _warm_up(arms, conversations[0], config, room)
        for group in _batches(conversations, config.batch):
            histories: list[list[dict[str, str]]] = [[] for _ in group]
            for turn in range(max(len(c.turns) for c in group)):
                asked: list[tuple[Conversation, list[dict[str, str]], list[int]]] = []
                for conversation, history in zip(group, histories, strict=True):
                    # A turn left out leaves its history short: later turns are left out too.
                    if turn < len(conversation.turns) and len(history) == 2 * turn:
                        history.append({"role": "user", "content": conversation.turns[turn]})
                        ids = arms[0].llm.chat_prompt(history)
                        if len(ids) + config.max_tokens > room:
                            result.skipped.append(f"{conversation.id} turn {turn + 1}")
                        else:
                            asked.append((conversation, history, ids))
                if asked:
                    params = [_params(config, seeds[id(c)]) for c, _, _ in asked]
                    order = arms if count % 2 == 0 else arms[::-1]
                    count += 1
                    taken = {
                        arm.name: _timed(arm, [ids for _, _, ids in asked], params) for arm in order
                    }
                    result.answers.extend(_compare(arms, asked, taken, turn))
                    for (_, history, _), answer in zip(asked, taken[arms[0].name][0], strict=True):
                        history.append({"role": "assistant", "content": answer.text})
                advance(sum(turn < len(c.turns) for c in group))
    except KeyboardInterrupt:
        result.complete = False
    if result.complete and not result.answers:
        raise ValueError(
            "nothing was measured: no prompt fits into the context with its answer; "
            "lower max_tokens or take other prompts"
        )
    return result


def _batches(conversations: list[Conversation], size: int) -> Iterable[list[Conversation]]:
    for group in by_category(conversations).values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _params(config: BenchConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature, max_tokens=config.max_tokens, seed=seed % 2**63
    )


def _warm_up(
    arms: SequenceOf[Arm], conversation: Conversation, config: BenchConfig, room: int
) -> None:
    """First runs pay for compilation and page faults: one answer that nobody counts, to a prompt
    that is not too long for that."""
    ids = arms[0].llm.chat_prompt([{"role": "user", "content": conversation.turns[0]}])
    params = replace(_params(config, config.seed), max_tokens=min(32, config.max_tokens))
    for arm in arms:
        fits = ids[: max(1, min(256, room - config.max_tokens))]
        arm.llm.generate([fits] * config.batch, params, speculate=arm.speculate)


def _timed(
    arm: Arm, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[SequenceOf[Result], float]:
    start = time.perf_counter()
    answers = arm.llm.generate(prompts, params, speculate=arm.speculate)
    return answers, time.perf_counter() - start


def _compare(
    arms: SequenceOf[Arm],
    asked: list[tuple[Conversation, list[dict[str, str]], list[int]]],
    taken: dict[str, tuple[SequenceOf[Result], float]],
    turn: int,
) -> Iterable[Measured]:
    for i, (conversation, _, _) in enumerate(asked):
        reference = taken[arms[0].name][0][i].token_ids
        for arm in arms:
            answers, wall = taken[arm.name]
            answer = answers[i]
            if answer.finish_reason == FinishReason.ERROR:
                raise ValueError(f"prompt {conversation.id}, {arm.name}: {answer.error}")
            times = answer.stats.token_times
            yield Measured(
                id=conversation.id,
                category=conversation.category,
                turn=turn + 1,
                arm=arm.name,
                num_prompt_tokens=answer.stats.num_prompt_tokens,
                num_tokens=len(answer.token_ids),
                num_passes=answer.stats.num_passes,
                drafted_by_position=list(answer.stats.drafted_by_position),
                accepted_by_position=list(answer.stats.accepted_by_position),
                ttft=answer.stats.ttft,
                gaps=[after - before for before, after in pairwise(times)],
                wall=wall / len(asked),
                finish_reason=str(answer.finish_reason),
                differs_at=first_difference(reference, answer.token_ids),
            )


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter counting as one."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def check_writable(path: Path) -> None:
    """
    Raises:
        ValueError: nothing can be written there; told before hours of measuring, not after.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    try:
        if path.is_file() or not path.exists():  # else a pipe or a device
            tempfile.TemporaryFile(dir=path.parent).close()  # what is written first lies beside it
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_json(path: Path, measurement: Measurement, facts: dict[str, Any]) -> None:
    """Writes everything measured, with what it was measured on.

    Raises:
        OSError: the file cannot be written.
    """
    head = {**facts, "complete": measurement.complete, "skipped": measurement.skipped}
    answers = [json.dumps(_rounded(asdict(answer))) for answer in measurement.answers]
    # An answer a line: times of hundreds of tokens are not for reading one below the other.
    text = (
        json.dumps(head, indent=1)[:-2] + ',\n "answers": [\n' + ",\n".join(answers) + "\n ]\n}\n"
    )
    write_whole(path, text.encode())


def _rounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Microseconds are plenty."""
    for name in ("ttft", "wall"):
        answer[name] = round(answer[name], 6)
    answer["gaps"] = [round(gap, 6) for gap in answer["gaps"]]
    return answer
