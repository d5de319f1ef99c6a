"""One step of the engine: propose, run, verify, commit, observe. Host control only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import TypeVar

import torch

from foretell.config import EngineConfig, Verification
from foretell.engine.admit import check_request
from foretell.engine.ahead import Ahead
from foretell.engine.cache import PageCache
from foretell.engine.choose import Choice, prepare, prompt_logprobs, shape_of
from foretell.engine.device import Device
from foretell.engine.drafting import Drafting
from foretell.engine.metrics import Metrics
from foretell.engine.one_token import OneToken, scheme_for
from foretell.engine.rows import Span, final, lay_out, wants_prompt
from foretell.engine.schedule import Ordinary, Schedule
from foretell.engine.scheduler import Item, Scheduler
from foretell.runtime.runner import Runtime
from foretell.sequence import FinishReason, SamplingParams, Sequence, Step
from foretell.spec.drafter import Drafter, merge_needs
from foretell.spec.forced import MOST_FORCED
from foretell.spec.seats import Limit, Seat, limit
from foretell.spec.tree import TokenTree, depths, roots

T = TypeVar("T")
log = logging.getLogger("foretell")


class Engine:
    """Steps sequences to their end, many at once, with or without a drafter.

    Args:
        config: limits and defaults.
        runtime: target and KV memory, already allocated.
        drafters: the schemes; none for plain decoding.
        eos_token_ids: the model's own end-of-text ids.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        drafters: SequenceOf[Drafter],
        eos_token_ids: frozenset[int],
    ) -> None:
        assert runtime.kv is not None
        self.config = config
        self.runtime = runtime
        self.drafter = drafters[0] if drafters else None
        self.end_ids = eos_token_ids
        speculation = config.speculation
        self.rule: Verification = speculation.verification if speculation else "coupled"
        self.threshold = speculation.threshold if speculation else 1.0
        self.metrics = Metrics()
        self.cache = PageCache(
            runtime.kv.num_pages,
            config.page_size,
            prefix_caching=config.prefix_caching,
            lookahead=merge_needs(drafters).lookahead if drafters else 0,
        )
        self.drafting: Drafting | None = None
        if drafters:
            assert speculation
            self.drafting = Drafting(
                drafters,
                adaptive=speculation.adaptive,
                sampled=self.rule in ("rejection", "block"),
                cache=self.cache,
                max_model_len=runtime.max_model_len,
                vocab_size=runtime.vocab_size,
                failed=lambda where, error: self.metrics.drafter_failed(where, error),
            )
        self.scheduler = Scheduler(
            config,
            self.cache,
            self._forget,
            self._seat,
            self.drafting.budget if self.drafting else None,
        )
        self.ahead = Ahead(runtime, self.scheduler)
        self.device = Device(runtime, lambda work: self.metrics.worked(work))
        self._inbox: deque[Sequence | str] = deque()
        """New sequences and ids to abort, in order: an abort concerns what came before it."""

    @property
    def k(self) -> int:
        """Draft tokens of a sequence and step at most."""
        return self.drafting.k if self.drafting else 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Safe from any thread."""
        self._inbox.append(sequence)

    def admit(self, ids: list[int], params: SamplingParams) -> None:
        """Refuses what could never be served, before anything is queued.

        Raises:
            ValueError: the prompt or a parameter, with the numbers.
        """
        check_request(
            ids,
            params,
            vocab_size=self.runtime.vocab_size,
            max_model_len=self.runtime.max_model_len,
            end_ids=self.end_ids,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request's sequences before the next step. Safe from any thread."""
        self._inbox.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self.scheduler.waiting or self.scheduler.running)

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Sequence]:
        """One target pass.

        Args:
            meanwhile: what the caller has to do anyway, done once the pass is under way.

        Returns:
            Sequences with new tokens or an end.
        """
        phase, start = self.metrics.phase, self.metrics.now()
        self.device.begin()
        with phase("schedule"):
            news = self.drain()
            items = self.scheduler.schedule()
        if not items:
            self.device.end()
            if meanwhile:
                meanwhile()
            return news
        way = self._way(items)
        with phase("propose"):
            asked = self.metrics.now()
            tree = way.draft()
            drafting = self.metrics.now() - asked
        with phase("pack"):
            rows, spans = self.ahead.take(items, tree) or lay_out(items, tree, wants_prompt)
        with phase("ahead"):
            target = way.target(rows, spans)
            way.draw(prepare(items, spans, tree, self.end_ids), target)
            self._take_in()
            self.ahead.while_computing(items, self._lasts)
            if meanwhile:
                meanwhile()
        with phase("forward"):
            output = self.device.wait(target)
        with phase("sample"):
            choice = way.choice(output)
        try:
            with phase("commit"):
                starts = [item.sequence.num_computed for item in items]
                for i, (item, span) in enumerate(zip(items, spans, strict=True)):
                    try:
                        prompt_logprobs(item, span, output.logits)
                        if item.reaches_end:
                            self._commit(item, i, choice)
                        else:
                            item.sequence.num_computed += item.num_run
                    except Exception as error:  # its tokenizer, say: the others go on
                        log.error("an answer failed", exc_info=error)
                        self._fail(item.sequence, f"its step failed: {error!r}")
                    if item.reaches_end or item.sequence.finished:
                        news.append(item.sequence)
            with phase("observe"):
                if self.drafting:
                    took = self.metrics.now() - start - drafting
                    self.drafting.learn(items, tree, choice, len(rows), took, drafting)
                    self._observe(items, spans, starts, choice, output.features, way.followed)
                self._retire(items)
        except BaseException:  # Ctrl-C too: half-written sequences cannot go on
            self._give_up([item.sequence for item in items], "the step that made it failed")
            raise
        self.metrics.step(len(items), len(rows))
        self.device.end()
        return news

    # ---- stops of a step, in order

    def _take_in(self) -> None:
        """New sequences, up to the first abort: that has to wait while a pass is under way."""
        while self._inbox and isinstance(message := self._inbox[0], Sequence):
            self.scheduler.add(message)
            self._inbox.popleft()

    def drain(self) -> list[Sequence]:
        """Takes in new sequences and ends aborted ones, which it returns."""
        ended: list[Sequence] = []
        self._take_in()
        while self._inbox:
            message = self._inbox.popleft()
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                if sequence.request_id == message:
                    self._finish(sequence, FinishReason.ABORT)
                    self.scheduler.remove(sequence)
                    ended.append(sequence)
            self._take_in()
        return ended

    def _seat(self, sequence: Sequence) -> Seat:
        """What may be drafted now; every path of it could still be emitted."""
        length, left = len(sequence.tokens), self._tokens_left(sequence)
        forced = ()
        if sequence.grammar and sequence.speculate:
            room = self.runtime.max_model_len - length
            forced = sequence.grammar.forced(limit(MOST_FORCED, MOST_FORCED, room, left).depth)
        if self.drafting is None:
            return Seat(sequence.slot, length, [Limit(0, 0)], [0], forced)
        return self.drafting.seat(sequence, left, forced)

    def _lasts(self, sequence: Sequence) -> bool:
        return self._tokens_left(sequence) > 1

    def _tokens_left(self, sequence: Sequence) -> int:
        room = self.runtime.max_model_len - len(sequence.tokens)
        if sequence.params.max_tokens is None:
            return room
        return min(room, sequence.params.max_tokens - sequence.num_output)

    def _way(self, items: list[Item]) -> Schedule:
        """The schedule of single drafted tokens, where that gains something and all can go it."""
        if self.drafting and self.device.overlaps and self.rule == "coupled":
            m = scheme_for(self.drafting, items, self._lasts, self.end_ids)
            if m is not None:
                return OneToken(self.device, items, self.drafting, m)
        return Ordinary(self.device, items, self.ahead, self._propose, self.rule, self.threshold)

    def _propose(self, items: list[Item]) -> TokenTree:
        if self.drafting is None:
            return roots([item.sequence.tokens[-1] for item in items])
        return self.drafting.propose(items)

    def _commit(self, item: Item, i: int, choice: Choice) -> None:
        """Appends what was accepted, one token at a time; what follows the first end never was."""
        sequence, outcome, tree = item.sequence, choice.outcomes[i], choice.trees[i]
        assert outcome is not None
        assert tree is not None
        start = sequence.num_computed + item.num_run
        tokens, parents = tree
        new = [tokens[node] for node in outcome.path]
        if not outcome.failed:
            new.append(outcome.next_token)
        shape = shape_of(sequence, self.end_ids)
        count = 0
        for count, token in enumerate(new, start=1):
            sequence.tokens.append(token)
            sequence.from_draft.append(count <= len(outcome.path))
            if (top := sequence.params.logprobs) is not None:
                sequence.logprobs.append(choice.logprob(i, count - 1, token, top))
            if reason := self._end(sequence, token, shape.stop_ids):
                self._finish(sequence, reason)
                break
        if outcome.failed and not sequence.finished:  # a bad row behind an end never was
            self._finish(sequence, FinishReason.ERROR, choice.errors[i])
        shape.history.extend(new[:count])
        final = min(len(outcome.path), max(0, count - 1))
        sequence.num_computed = start + final
        moved = [(node, at) for at, node in enumerate(outcome.path[:final], 1) if node != at]
        if moved:
            root = start - 1
            self.runtime.move(
                sequence.slot,
                [root + node for node, _ in moved],
                [root + at for _, at in moved],
            )
        accepted = min(count, len(outcome.path))
        if sequence.trace is not None:
            sequence.trace.append(Step(tokens, parents, outcome.path[:accepted]))
        self.metrics.count(sequence, depths(parents), accepted, count, item.scheme)

    def _end(self, sequence: Sequence, token: int, ends: tuple[int, ...]) -> FinishReason | None:
        if token in ends:  # its text is not part of the answer
            return FinishReason.STOP
        if sequence.detokenizer and sequence.detokenizer.push(token):
            return FinishReason.STOP
        if sequence.grammar and sequence.grammar.extend(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._tokens_left(sequence) <= 0 else None

    def _observe(
        self,
        items: list[Item],
        spans: list[Span],
        starts: list[int],
        choice: Choice,
        features: torch.Tensor | None,
        followed: int | None,
    ) -> None:
        """The drafters catch up; where the stream overlaps, while the next step is scheduled."""
        assert self.drafting
        commit = final(items, spans, starts, choice.outcomes, features)
        if commit is None:
            return
        soon = [item.sequence for item in items if item.budget and self.device.overlaps]
        if work := self.drafting.observe(commit, soon, followed):
            self.device.leave(self.device.submit("catch-up", work))

    def _retire(self, items: list[Item]) -> None:
        """Shares finished pages, gives scratch back, and lets ended sequences go."""
        for item in items:
            sequence = item.sequence
            if sequence.finish_reason != FinishReason.ERROR:
                end = self.drafting.shareable(sequence) if self.drafting else None
                self.cache.publish(sequence, end)
            if sequence.finished:
                self.scheduler.remove(sequence)
            else:
                self.cache.trim(sequence, len(sequence.tokens))

    # ---- ends and mistakes

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.finish_reason, sequence.error = reason, error
        if sequence.detokenizer:
            sequence.detokenizer.finish()
        self.metrics.num_finished += 1
        self.metrics.num_failed += reason == FinishReason.ERROR

    def fail_running(self, message: str) -> None:
        """Ends all that runs, where steps fail again and again; what waits may go on."""
        self._give_up(list(self.scheduler.running), message)

    def _give_up(self, sequences: list[Sequence], message: str) -> None:
        for sequence in sequences:
            self._fail(sequence, message)
            self.scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, message: str) -> None:
        if not sequence.finished:
            with suppress(Exception):  # it may be the tokenizer that failed
                self._finish(sequence, FinishReason.ERROR, message)

    def _forget(self, slots: list[int]) -> None:
        if self.drafting:
            self.drafting.forget(slots, busy=bool(self.device.pending))

    def check(self) -> None:
        """Asserts every invariant of host state; tests and idle loops call it."""
        self.scheduler.check()
