"""What comes back: the parts of an answer as they come, and the whole when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.sequence import FinishReason, Logprob, Sequence, Stats, Step


@dataclass(frozen=True)
class Result:
    """One answer."""

    request_id: str
    index: int
    """Which of the request's n answers."""
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None
    prompt_logprobs: list[Logprob | None] | None
    finish_reason: FinishReason
    from_draft: list[bool]
    """For each token: was it the draft's guess?"""
    stats: Stats
    error: str | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Result:
        """The answer of a sequence that has ended."""
        assert sequence.finish_reason is not None
        params = sequence.params
        return cls(
            request_id=sequence.request_id,
            index=sequence.index,
            prompt_token_ids=sequence.tokens[: sequence.num_prompt],
            text=sequence.detokenizer.text if sequence.detokenizer else "",
            token_ids=sequence.output,
            logprobs=sequence.logprobs if params.logprobs is not None else None,
            prompt_logprobs=(
                sequence.prompt_logprobs if params.prompt_logprobs is not None else None
            ),
            finish_reason=sequence.finish_reason,
            from_draft=list(sequence.from_draft),
            stats=replace(sequence.stats),
            error=sequence.error,
        )


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer; `result` comes with the last one."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool]
    logprobs: list[Logprob]
    """One for each token, or none at all where none were asked for."""
    steps: list[Step]
    """Its draft trees, where they were asked for (`Sequence.trace`)."""
    result: Result | None = None


class Follower:
    """Says what became of a sequence since it was last asked."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.ended = False
        self._characters = self._tokens = self._steps = 0

    def delta(self) -> Delta | None:
        """What is new and certain; None where nothing is, and behind the end."""
        sequence, detokenizer = self.sequence, self.sequence.detokenizer
        if self.ended:
            return None
        text = detokenizer.text[: detokenizer.certain] if detokenizer else ""
        delta = Delta(
            sequence.request_id,
            sequence.index,
            text[self._characters :],
            sequence.tokens[sequence.num_prompt + self._tokens :],
            sequence.from_draft[self._tokens :],
            sequence.logprobs[self._tokens :],
            (sequence.trace or [])[self._steps :],
            Result.of(sequence) if sequence.finished else None,
        )
        self._characters = max(self._characters, len(text))
        self._tokens = sequence.num_output
        self._steps += len(delta.steps)
        self.ended = sequence.finished
        return delta if delta.text or delta.token_ids or delta.result else None
