"""Prompt lookup: what followed these tokens the last time is the guess. No model.

The longest end of the text that occurred before (ngram_min to ngram_max tokens) is matched, its
most recent occurrence wins, and the tokens behind that occurrence are the draft. Where they run
into the end of the text the draft goes on from itself, so repeating text is continued in full.

Saxena, *Prompt Lookup Decoding* (2023). The index is a suffix automaton (Blumer et al. 1985)
grown token by token, so neither the length of the text nor the n-gram range shows in the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foretell.config import SpeculationConfig
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask, Commit, Drafter, DraftRuntime, Needs
from foretell.spec.seats import Least
from foretell.spec.tree import TokenTree, from_lists, roots

MAX_HOPS = 64
"""Most suffixes of a text whose last occurrence one new token refreshes."""
LONGEST_PAUSE = 32
"""Most steps between two tries where drafts keep failing."""
_WEIGHT, _KEPT = 6.0, 1 - 1 / 128
"""What is thought of a match beforehand, in observations, and what of these each new one leaves."""


class NgramIndex:
    """For each position of a growing text: where its longest suffix occurred last, before it.

    `extend` costs O(1) amortised: automaton states and matching statistics do, and at most
    `MAX_HOPS` last occurrences are refreshed. Lengths are always exact; occurrences are the most
    recent for ngram_max <= MAX_HOPS, else in a very repetitive text an earlier one.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.tokens: list[int] = []
        self.match: list[int] = []  # last position of the earlier occurrence, -1 for none
        self.length: list[int] = []  # of the longest match at each position, at most `longest`
        self.operations = 0  # loop turns so far: tests bound them
        # Automaton: state 0 is the empty string. A state's strings end at the same positions.
        self._next: list[dict[int, int]] = [{}]
        self._link = [0]
        self._len = [0]
        self._recent = [-1]
        self._last = 0
        self._state, self._length = 0, 0  # the longest suffix that occurred before

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        state, length = self._step(token)
        found = self._recent[state] if length >= self.shortest else -1
        self.match.append(found)
        self.length.append(length)
        self._grow(token, position)
        state = self._trim(state, length)  # growing may have split the state
        self._state, self._length = state, length
        for _ in range(MAX_HOPS):
            if self._len[state] < self.shortest or state == 0:
                break
            self.operations += 1
            self._recent[state] = position
            state = self._link[state]

    def _step(self, token: int) -> tuple[int, int]:
        """Longest suffix, the new token included, that the text before it holds."""
        state, length = self._state, self._length
        while state and token not in self._next[state]:
            self.operations += 1
            state = self._link[state]
            length = self._len[state]
        if token not in self._next[state]:
            return 0, 0
        length = min(length + 1, self.longest)
        return self._trim(self._next[state][token], length), length

    def _trim(self, state: int, length: int) -> int:
        """The state on ``state``'s suffix path that holds its suffix of ``length`` tokens."""
        while state and self._len[self._link[state]] >= length:
            self.operations += 1
            state = self._link[state]
        return state

    def _grow(self, token: int, position: int) -> None:
        new = self._add({}, self._len[self._last] + 1, 0, position)
        state, self._last = self._last, new
        while token not in self._next[state]:
            self.operations += 1
            self._next[state][token] = new
            if state == 0:
                return
            state = self._link[state]
        old = self._next[state][token]
        if self._len[old] == self._len[state] + 1:
            self._link[new] = old
            return
        part = self._add(
            dict(self._next[old]), self._len[state] + 1, self._link[old], self._recent[old]
        )
        self._link[old] = self._link[new] = part
        while self._next[state].get(token) == old:
            self.operations += 1
            self._next[state][token] = part
            if state == 0:
                return
            state = self._link[state]

    def _add(self, edges: dict[int, int], length: int, link: int, recent: int) -> int:
        self._next.append(edges)
        self._len.append(length)
        self._link.append(link)
        self._recent.append(recent)
        return len(self._len) - 1

    def matches(self, most: int) -> list[tuple[int, int]]:
        """Occurrences of the text's end, with different tokens behind them: their last position
        and how many tokens match. The longest and most recent comes first, then earlier ones along
        the chain of matches."""
        out: list[tuple[int, int]] = []
        seen: set[int] = set()
        at, length = len(self.tokens) - 1, self.longest
        for _ in range(4 * most):
            if at < 0 or len(out) == most:
                break
            at, length = self.match[at], min(length, self.length[at])
            if at < 0:
                break
            self.operations += 1
            if self.tokens[at + 1] not in seen:
                seen.add(self.tokens[at + 1])
                out.append((at, length))
        return out

    def continuation(self, match: int, count: int) -> list[int]:
        """``count`` tokens behind an occurrence; past the text's end it goes on from itself."""
        draft = self.tokens[match + 1 : match + 1 + count]
        start = len(draft)
        for i in range(start, count):
            draft.append(draft[i - start])
        return draft


@dataclass(eq=False)
class _Slot:
    """What is kept of the sequence in one slot."""

    sequence: Sequence
    index: NgramIndex
    num_read: int = 0  # tokens of the sequence that are in the index
    drafted_at: int = -1  # text length at the last draft, -1 for none open
    tokens: list[int] = field(default_factory=list[int])  # its tree, root first
    parents: list[int] = field(default_factory=list[int])
    guess: list[int] = field(default_factory=list[int])  # behind the longest match, drafted or not
    length: int = 0  # of that match
    debt: int = 0  # failed drafts less accepted tokens
    pause: int = 0  # steps to go without a draft


class PromptLookup(Drafter):
    """Drafts from n-grams of prompt and answer. Nothing is drafted where nothing matches.

    Drafting pauses by itself. A draft of which nothing was accepted adds 1 to a debt, each
    accepted token takes 1 off; once the debt exceeds ``patience``, each further failure doubles
    the steps until the next try, up to `LONGEST_PAUSE`. It counts steps, never time, so a run
    can be repeated exactly.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Drafter.Options):
        ngram_min: int = 2
        """Fewest tokens that must match."""
        ngram_max: int = 8
        """Longer matches than that count as equal: the most recent wins."""
        branches: int = 1
        """Different continuations that share the budget as a tree."""
        patience: int = 4
        """Failed drafts, less accepted tokens, before drafting pauses; 0 never pauses."""

        def __post_init__(self) -> None:
            if not 1 <= self.ngram_min <= self.ngram_max:
                raise ValueError(
                    f"ngram_min={self.ngram_min}, ngram_max={self.ngram_max}: must be "
                    "1 <= ngram_min <= ngram_max"
                )
            if not 1 <= self.branches <= 16:
                raise ValueError(f"branches={self.branches}: must be from 1 to 16")
            if self.patience < 0:
                raise ValueError(f"patience={self.patience}: must be 0 (never pauses) or more")

    options: Options

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        self.needs = Needs(max_nodes=config.k, prediction=True)
        self._slots: dict[int, _Slot] = {}
        longest = self.options.ngram_max
        self._tries = [_WEIGHT] * (longest + 1)
        self._hits = [_WEIGHT * length / (length + 3) for length in range(longest + 1)]
        """[ngram_max + 1] tokens drafted behind a match of so many tokens, and those accepted."""

    def observe(self, commit: Commit) -> None:
        """Indexes what became final, so that a long prompt is paid for chunk by chunk."""
        for sequence, start, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            self._read(sequence, start + len(tokens))

    def propose(self, ask: Ask) -> TokenTree:
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        chances: list[list[float]] = []
        for sequence, budget, depth, least in zip(
            ask.sequences, ask.budgets, ask.depths, ask.least, strict=True
        ):
            slot = self._read(sequence, len(sequence.tokens))
            self._learn(slot)
            tree = ([sequence.tokens[-1]], [-1], [1.0])
            if slot.pause and budget:
                slot.pause -= 1
            elif budget:
                self._draft(slot, budget, depth, least, *tree)
                slot.drafted_at = len(sequence.tokens)
                slot.tokens, slot.parents, _ = tree
            tokens.append(tree[0])
            parents.append(tree[1])
            chances.append(tree[2])
        if all(len(row) == 1 for row in tokens):
            return roots(ask.roots)
        return replace(from_lists(tokens, parents), chances=chances)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def _read(self, sequence: Sequence, end: int) -> _Slot:
        """The slot's state with the first ``end`` tokens indexed, made anew for a new sequence."""
        slot = self._slots.get(sequence.slot)
        if slot is None or slot.sequence is not sequence or slot.num_read > len(sequence.tokens):
            index = NgramIndex(self.options.ngram_min, self.options.ngram_max)
            slot = self._slots[sequence.slot] = _Slot(sequence, index)
        start, asked = slot.num_read, sequence.num_prompt
        if sequence.prediction and start < asked <= end:
            # As if the prompt had been answered with the prediction and its end came once more.
            slot.index.extend(sequence.tokens[start:asked])
            slot.index.extend(sequence.prediction)
            start = max(0, asked - self.options.ngram_max)
        slot.index.extend(sequence.tokens[start:end])
        slot.num_read = max(slot.num_read, end)
        return slot

    def _draft(
        self,
        slot: _Slot,
        budget: int,
        depth: int,
        least: Least,
        tokens: list[int],
        parents: list[int],
        chances: list[float],
    ) -> None:
        """Adds nodes to a tree of only its root: branches grow in turn, one level at a time. Each
        token that is right makes the match behind it longer."""
        index = slot.index
        matches = index.matches(min(self.options.branches, budget))
        longest, left = min(budget, depth), 1.0
        # They differ in their first token, so no two share a node.
        drafts = [(index.continuation(at, longest), length) for at, length in matches]
        slot.guess, slot.length = drafts[0] if drafts else ([], 0)
        if slot.guess and self._chance(slot.length) < least.first:
            return
        ends = dict.fromkeys(range(len(drafts)), 0)
        for level in range(longest):
            for branch, end in list(ends.items()):
                if len(tokens) > budget:
                    return
                draft, length = drafts[branch]
                chance = self._chance(length + level) * (chances[end] if level else left)
                if chance < least.node:
                    del ends[branch]
                    continue
                left -= 0 if level else chance
                tokens.append(draft[level])
                parents.append(end)
                chances.append(chance)
                ends[branch] = len(tokens) - 1

    def _chance(self, length: int) -> float:
        """That a token behind a match of so many tokens is right."""
        length = min(length, self.options.ngram_max)
        return self._hits[length] / self._tries[length]

    def _compare(self, slot: _Slot, since: list[int]) -> None:
        """Learns from what was guessed, in the tree or not, how often a match is right."""
        for level, (token, guess) in enumerate(zip(since, slot.guess, strict=False)):
            at = min(slot.length + level, self.options.ngram_max)
            self._tries[at] = self._tries[at] * _KEPT + 1
            self._hits[at] = self._hits[at] * _KEPT + (token == guess)
            if token != guess:
                break

    def _learn(self, slot: _Slot) -> None:
        """Compares the last draft with what was committed since."""
        since = slot.sequence.tokens[slot.drafted_at :] if slot.drafted_at >= 0 else []
        if not since:
            return
        self._compare(slot, since)
        drafted, slot.drafted_at = len(slot.tokens) > 1, -1
        if not drafted or not self.options.patience:
            return
        accepted, node = 0, 0
        edges = {edge: i for i, edge in enumerate(zip(slot.parents, slot.tokens, strict=True))}
        for token in since:
            if (node, token) not in edges:
                break
            accepted, node = accepted + 1, edges[node, token]
        patience = self.options.patience
        slot.debt = max(0, slot.debt - accepted) if accepted else slot.debt + 1
        if not accepted and slot.debt > patience:
            slot.pause = min(LONGEST_PAUSE, 2 ** (slot.debt - patience))
        slot.debt = min(slot.debt, patience + 5)
