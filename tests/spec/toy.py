"""A target and a draft small enough to write every text's probability down, and a run of the real
sampling and verification code over them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from foretell.config import Verification
from foretell.runtime.sampling import History, Shape, ShapeRow, draw, law, shape_logits
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask
from foretell.spec.grow_tree import Frontier, grow_tree
from foretell.spec.noise import gumbel, uniform
from foretell.spec.shape import filtered
from foretell.spec.shape import law as draft_law
from foretell.spec.tree import TokenTree, from_lists
from foretell.spec.tree_shape import TreeShape
from foretell.spec.verify import verify

VOCAB = 6
PROMPT = (1, 2, 2)
LENGTH = 3
CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1, 1, 2)
CPU = torch.device("cpu")
Text = tuple[int, ...]


@cache
def target_logits(text: Text) -> tuple[float, ...]:
    """What the target says after that answer: depends on the last two tokens."""
    rng = np.random.default_rng([11, *(PROMPT + text)[-2:]])
    return tuple((1.6 * rng.normal(size=VOCAB)).astype(np.float32).tolist())


@cache
def draft_logits(text: Text) -> tuple[float, ...]:
    """Half the target, half its own."""
    rng = np.random.default_rng([12, *(PROMPT + text)[-2:]])
    own = 1.6 * rng.normal(size=VOCAB)
    mixed = 0.6 * np.array(target_logits(text)) + 0.5 * own
    return tuple(mixed.astype(np.float32).tolist())


def texts(longest: int) -> list[Text]:
    every = (itertools.product(range(VOCAB), repeat=n) for n in range(longest + 1))
    return [text for group in every for text in group]


def reference_law(text: Text, params: SamplingParams) -> np.ndarray:
    """The definitions of every parameter, written plainly in float64; no ties expected."""
    logits = np.array(target_logits(text), np.float64)
    if params.allowed_token_ids is not None:
        logits[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    logits[list(params.bad_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in range(VOCAB):
        if token in PROMPT + text:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        logits[token] -= params.frequency_penalty * text.count(token)
        logits[token] -= params.presence_penalty * (token in text)
    if params.greedy:
        return np.eye(VOCAB)[logits.argmax()]
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0.0
    return p / p.sum()


def text_law(params: SamplingParams) -> dict[Text, float]:
    """The probability of every text of LENGTH tokens."""
    laws = {text: reference_law(text, params) for text in texts(LENGTH - 1)}
    return {
        text: float(np.prod([laws[text[:i]][token] for i, token in enumerate(text)]))
        for text in itertools.product(range(VOCAB), repeat=LENGTH)
    }


class Shaped:
    """Shaped logits of every text, by the real code, each made with the draft path starting at
    every possible place: where it starts must not show."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.texts = texts(LENGTH + 1)
        self.place = {text: i for i, text in enumerate(self.texts)}
        logits = torch.tensor([target_logits(text) for text in self.texts])
        self.logits = self._shape(logits, lambda text: 0)
        for start in (lambda text: len(text), lambda text: len(text) // 2):
            assert torch.equal(self.logits, self._shape(logits, start))
        self.p = law(self.logits, [self._row((), 0)] * len(self.texts))
        drafts = torch.tensor([draft_logits(text) for text in self.texts])
        every = [params] * len(self.texts)
        self.raw_drafts = drafts
        self.q = draft_law(filtered(drafts, every), every)

    def _row(self, text: Text, start: int) -> ShapeRow:
        return ShapeRow(Shape(self.params, History(PROMPT, text[:start])), text[start:])

    def _shape(self, logits: Tensor, start: Callable[[Text], int]) -> Tensor:
        return shape_logits(logits, [self._row(text, start(text)) for text in self.texts])

    def at(self, rows: list[Text]) -> Tensor:
        return torch.tensor([self.place[text[: LENGTH + 1]] for text in rows])


_shaped: dict[str, Shaped] = {}


def simulate(
    rule: Verification,
    kind: str,
    parents: tuple[int, ...] | TreeShape,
    params: SamplingParams,
    count: int,
    threshold: float = 0.3,
) -> Counter[Text]:
    """The first LENGTH tokens of ``count`` sequences, each with its own seed.

    Args:
        kind: how drafts are made: ``argmax``, ``coupled`` or ``sampled``. With a shape, which
            `grow_tree` follows, ``sampled`` decides alone.
    """
    if repr(params) not in _shaped:
        _shaped[repr(params)] = Shaped(params)
    shaped = _shaped[repr(params)]
    answers: list[Text] = [()] * count
    while active := [s for s in range(count) if len(answers[s]) < LENGTH]:
        bases = [answers[s] for s in active]
        roots = [len(PROMPT) + len(text) - 1 for text in bases]
        if isinstance(parents, tuple):
            tree = make_drafts(kind, parents, shaped, active, bases, roots)
        else:
            tree = grown_drafts(kind, parents, shaped, active, bases)
        width = tree.tokens.shape[1]
        prefixes = [
            base + tuple(path)
            for base, row, above in zip(
                bases, tree.tokens.tolist(), tree.parents.tolist(), strict=True
            )
            for path in paths(row, above)
        ]
        at = shaped.at(prefixes)
        seeds = [s for s in active for _ in range(width)]
        positions = [len(PROMPT) + len(text) for text in prefixes]
        greedy = [params.greedy] * len(prefixes)
        outcomes = verify(
            rule,
            tree,
            choices=draw(shaped.logits[at], greedy, seeds, positions).reshape(-1, width),
            p=shaped.p[at].reshape(len(active), width, VOCAB),
            coins=uniform(active, roots, 1, width),
            threshold=threshold,
        )
        for b, (s, out) in enumerate(zip(active, outcomes, strict=True)):
            assert not out.failed
            gained = [int(tree.tokens[b, i]) for i in out.path] + [out.next_token]
            answers[s] = (*answers[s], *gained)[:LENGTH]
    return Counter(answers)


def paths(tokens: list[int], parents: SequenceOf[int]) -> list[list[int]]:
    out: list[list[int]] = [[]]
    for i in range(1, len(parents)):
        out.append([*out[parents[i]], tokens[i]])
    return out


def make_drafts(
    kind: str,
    parents: tuple[int, ...],
    shaped: Shaped,
    seeds: list[int],
    bases: list[Text],
    roots: list[int],
) -> TokenTree:
    rng = np.random.default_rng([5, len(seeds), sum(roots)])
    rows: list[list[int]] = []
    probs = torch.zeros(len(bases), len(parents), VOCAB)
    if kind == "coupled":  # [depth, B, V] for the tokens one and two below each root
        near = [gumbel(seeds, [root + d for root in roots], VOCAB, CPU) for d in (1, 2)]
        noise = torch.stack(near).double().numpy()
    for b, base in enumerate(bases):
        tokens = [0]
        for i in range(1, len(parents)):
            text = base + tuple(paths(tokens, parents[:i])[parents[i]])
            q = shaped.q[shaped.place[text[: LENGTH + 1]]].double().numpy()
            taken = [tokens[j] for j in range(1, i) if parents[j] == parents[i]]
            probs[b, parents[i]] = torch.from_numpy(q)
            if kind == "coupled":
                with np.errstate(divide="ignore"):
                    score = np.log(q) + noise[len(text) - len(base), b]
            else:
                score = q + 1e-9
            score[taken] = -np.inf
            token = int(score.argmax())
            if kind == "sampled":
                left = np.where(np.isin(np.arange(VOCAB), taken), 0.0, q)
                # where nothing is left to draw, any token: the rule must see that it is none
                token = int(rng.choice(VOCAB, p=left / left.sum())) if left.sum() else token
            tokens.append(token)
        rows.append(tokens)
    tree = from_lists(rows, [list(parents)] * len(rows))
    if kind != "sampled":
        return tree
    return replace(tree, probs=probs)


def grown_drafts(
    kind: str, shape: TreeShape, shaped: Shaped, seeds: list[int], bases: list[Text]
) -> TokenTree:
    """Trees by the growing loop, with the noise and seeds that an engine would use."""
    sequences = [
        Sequence("", [*PROMPT, *base], shaped.params, seed=seed, slot=0)
        for base, seed in zip(bases, seeds, strict=True)
    ]
    above = bases

    def step(frontier: Frontier) -> Tensor:
        nonlocal above
        pairs = zip(frontier.parents, frontier.tokens, strict=True)
        above = [(*above[parent], token) for parent, token in pairs]
        return shaped.raw_drafts[shaped.at(above)]

    budgets = [shape.num_nodes] * len(bases)
    return grow_tree(
        Ask(sequences, budgets, kind == "sampled"),
        budgets,
        shaped.raw_drafts[shaped.at(bases)],
        step,
        shape,
        lambda s, t: gumbel(s, t, VOCAB, CPU),
        DraftVocab(VOCAB),
    )
