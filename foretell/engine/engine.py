"""One step of the engine: propose, run, verify, commit, observe. Host control only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

import torch

from foretell.config import EngineConfig, Verification
from foretell.engine.admit import check_request
from foretell.engine.cache import PageCache
from foretell.engine.choose import Choice, choose, prompt_logprobs, shape_of
from foretell.engine.drafting import Drafting, merge_needs
from foretell.engine.metrics import Metrics
from foretell.engine.rows import Span, lay_out
from foretell.engine.scheduler import Item, Scheduler
from foretell.runtime.runner import Runtime
from foretell.sequence import FinishReason, SamplingParams, Sequence, Step
from foretell.spec.drafter import Commit, Drafter
from foretell.spec.forced import MOST_FORCED, with_forced
from foretell.spec.seats import Limit, Seat, limit
from foretell.spec.tree import TokenTree, depths, roots

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
                failed=self._drafter_failed,
            )
        self.scheduler = Scheduler(
            config,
            self.cache,
            self._forget,
            self._seat,
            self.drafting.budget if self.drafting else None,
        )
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

    def step(self) -> list[Sequence]:
        """One target pass.

        Returns:
            Sequences with new tokens or an end.
        """
        phase, start = self.metrics.phase, self.metrics.now()
        with phase("schedule"):
            news = self.drain()
            items = self.scheduler.schedule()
            for item in items:
                self.runtime.set_pages(item.sequence.slot, item.sequence.pages)
        if not items:
            return news
        with phase("propose"):
            tree = with_forced(self._propose(items), [item.forced for item in items])
        with phase("pack"):
            rows, spans = lay_out(items, tree, self._wants_prompt)
        with phase("forward"):
            output = self.runtime.forward_target(rows)
        with phase("sample"):
            choice = choose(
                self.rule, items, spans, tree, output.logits, self.end_ids, self.threshold
            )
        try:
            with phase("commit"):
                starts, trees = [item.sequence.num_computed for item in items], tree.lists()
                for i, (item, span) in enumerate(zip(items, spans, strict=True)):
                    try:
                        prompt_logprobs(item, span, output.logits)
                        if item.reaches_end:
                            self._commit(item, trees[i], i, choice)
                        else:
                            item.sequence.num_computed += item.num_run
                    except Exception as error:  # its tokenizer, say: the others go on
                        log.error("an answer failed", exc_info=error)
                        self._fail(item.sequence, f"its step failed: {error!r}")
                    if item.reaches_end or item.sequence.finished:
                        news.append(item.sequence)
            with phase("observe"):
                self._observe(items, spans, starts, choice, output.features)
                if self.drafting:
                    seconds = self.metrics.now() - start
                    self.drafting.learn(items, tree, choice.outcomes, len(rows), seconds)
                self._retire(items)
        except BaseException:  # Ctrl-C too: half-written sequences cannot go on
            self._give_up([item.sequence for item in items], "the step that made it failed")
            raise
        self.metrics.step(len(items), len(rows))
        return news

    # ---- stops of a step, in order

    def drain(self) -> list[Sequence]:
        """Takes in new sequences and ends aborted ones, which it returns."""
        ended: list[Sequence] = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Sequence):
                self.scheduler.add(message)
                continue
            for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
                if sequence.request_id == message:
                    self._finish(sequence, FinishReason.ABORT)
                    self.scheduler.remove(sequence)
                    ended.append(sequence)
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

    def _tokens_left(self, sequence: Sequence) -> int:
        room = self.runtime.max_model_len - len(sequence.tokens)
        if sequence.params.max_tokens is None:
            return room
        return min(room, sequence.params.max_tokens - sequence.num_output)

    def _propose(self, items: list[Item]) -> TokenTree:
        if self.drafting is None:
            return roots([item.sequence.tokens[-1] for item in items])
        return self.drafting.propose(items)

    def _commit(
        self, item: Item, tree: tuple[list[int], list[int]], i: int, choice: Choice
    ) -> None:
        """Appends what was accepted, one token at a time; what follows the first end never was."""
        sequence, outcome = item.sequence, choice.outcomes[i]
        assert outcome is not None
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
    ) -> None:
        """Shows the drafter every row that became final, finished sequences included: their pages
        may serve others."""
        if self.drafting is None:
            return
        seen = [
            i
            for i, item in enumerate(items)
            if item.sequence.speculate and item.sequence.finish_reason != FinishReason.ERROR
        ]
        if not seen:
            return
        final: list[int] = []
        for i in seen:
            accepted = items[i].sequence.num_computed - starts[i] - items[i].num_run
            final.extend(range(spans[i].row, spans[i].row + items[i].num_run))
            if accepted:
                root, outcome = spans[i].row + items[i].num_run - 1, choice.outcomes[i]
                assert outcome is not None
                final.extend(root + node for node in outcome.path[:accepted])
        commit = Commit(
            [items[i].sequence for i in seen],
            [starts[i] for i in seen],
            [
                items[i].sequence.tokens[starts[i] : items[i].sequence.num_computed + 1]
                for i in seen
            ],
            None if features is None else features[final],  # [sum T, F]
        )
        self.drafting.observe(commit)

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
            self.drafting.forget(slots)

    def _drafter_failed(self, where: str, error: Exception) -> None:
        self.metrics.drafter_errors += 1
        self.metrics.last_drafter_error = f"{where}: {type(error).__name__}: {error}"
        if self.metrics.drafter_errors == 1:
            log.warning("the drafter failed, its drafts are dropped (%s)", error, exc_info=True)

    @staticmethod
    def _wants_prompt(sequence: Sequence) -> int | None:
        """First position whose row must give prompt log-probabilities, None for no such row."""
        if sequence.params.prompt_logprobs is None:
            return None
        return max(len(sequence.prompt_logprobs) - 1, 0)

    def check(self) -> None:
        """Asserts every invariant of host state; tests and idle loops call it."""
        self.scheduler.check()
