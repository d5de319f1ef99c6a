"""What text cannot show: acceptance of a target that drafts for itself, and the bytes in KV."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretell.bench.certify_part import Part, Request, Rig, begin, check_drafter, guarded, leave
from foretell.bench.certify_same import Pairs
from foretell.llm import LLM
from foretell.progress import Advance
from foretell.sequence import SamplingParams, Sequence

Rebuilt = tuple[list[int], dict[str, Tensor]]
"""A text that was computed in one go, alone, and its KV by layer group, see `_cells`."""
_COPIES = 2
"""The audit asks everything twice: the second time prompts come out of the prefix cache."""


def self_acceptance(rig: Rig, asked: list[Request], advance: Advance) -> Part:
    """A target that drafts for itself with the same weights must never be refused."""
    part = Part(
        "acceptance 1.0",
        "a target that drafts for itself is never refused: drafts see the same positions, KV, "
        "sampling and noise as the target",
    )
    with guarded(part):
        _check_acceptance(part, rig, asked, advance)
    return part


def _check_acceptance(part: Part, rig: Rig, asked: list[Request], advance: Advance) -> None:
    own = f"draft-model:weights=target,adaptive=false,k={min(rig.speculation.k, 8)}"
    llm = rig.make(own, rig.config.batch)
    ids, params = [r.ids for r in asked], [r.params for r in asked]
    for request, answer in zip(asked, llm.generate(ids, params, progress=advance), strict=True):
        stats = answer.stats
        part.count("drafted", stats.drafted)
        part.count("accepted", stats.accepted)
        if stats.accepted != stats.drafted:
            part.fail(
                f"{request.name}: {stats.accepted} of {stats.drafted} accepted; by position "
                f"{stats.accepted_by_position} of {stats.drafted_by_position}"
            )
    check_drafter(part, llm, part.counts.get("drafted", 0))
    _check_pages(part, llm, "self-drafting")


def self_requests(asked: list[Request]) -> list[Request]:
    """Settings that a draft follows too: temperature and filters, no history and no grammar."""
    plain = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "logprobs")
    other = {name for name in SamplingParams.__dataclass_fields__ if name not in plain}
    default = SamplingParams()
    return [
        request
        for request in asked
        if all(getattr(request.params, name) == getattr(default, name) for name in other)
    ]


def audit(rig: Rig, engines: list[LLM], answers: Pairs, advance: Advance) -> Part:
    """KV of requests that still run, against a clean rebuild of the same text; then the pages.

    Args:
        engines: those that answered everything before; nothing of that may be left in them.
        answers: what is asked, and what was answered, which they should be about to say.
    """
    part = Part(
        "KV audit",
        "KV of the target, and of the draft where it has its own, is that of a clean rebuild, "
        "byte by byte; every page comes back",
    )
    with guarded(part):
        clean = rig.make(rig.speculation, 1, prefix_caching=False)
        for at in range(0, len(answers), rig.config.batch):
            group = answers[at : at + rig.config.batch]
            rebuilt = [_rebuild(clean, [*asked.ids, *said.token_ids]) for asked, said in group]
            for llm in [*engines] * _COPIES:
                _check_kv(part, rig, llm, clean, [r for r, _ in group], rebuilt)
                advance(len(group))
        for llm in engines:
            _check_pages(part, llm, "after everything")
        if not part.counts.get("requests"):
            part.fail("no answer was long enough to be looked at while it runs: other prompts")
    return part


def _check_kv(
    part: Part, rig: Rig, llm: LLM, clean: LLM, asked: list[Request], rebuilt: list[Rebuilt]
) -> None:
    each = [(request.ids, replace(request.params, ignore_eos=True)) for request in asked]
    half = begin(llm, each, rig.config.max_tokens // 2, stay=True)
    for request, sequence, whole in zip(asked, half, rebuilt, strict=True):
        if not sequence.finished:
            if whole[0][: len(sequence.tokens)] != sequence.tokens:  # beyond its end, say
                whole = _rebuild(clean, list(sequence.tokens))
            _compare(part, llm, request, sequence, whole[1])
            part.count("requests")
    leave(llm, half)


def _rebuild(clean: LLM, tokens: list[int]) -> Rebuilt:
    # With room for more than its first token, or it would have ended and let its pages go.
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (copy,) = begin(clean, [(tokens, params)], 1, stay=True)
    cells = _cells(clean, copy, len(tokens))
    leave(clean, [copy])
    return tokens, cells


def _compare(
    part: Part, llm: LLM, request: Request, sequence: Sequence, whole: dict[str, Tensor]
) -> None:
    """Every cell that is final, of every layer."""
    assert sequence.num_computed < len(sequence.tokens)
    for group, mine in _cells(llm, sequence, sequence.num_computed).items():
        count = sequence.num_computed
        if group == "draft" and llm.engine.drafter:
            count = min(count, llm.engine.drafter.needs.max_positions or count)
            if not sequence.speculate:  # the drafter failed and no longer watches
                continue
        mine, theirs = mine[:, :count], whole[group][:, :count]
        part.count(f"{group} cells", count)
        if not torch.equal(mine, theirs):
            wrong = (mine != theirs).flatten(2).any(2)  # [2 * layers, count]
            first = int(wrong.any(0).nonzero()[0])
            layer = int(wrong[:, first].nonzero()[0]) // 2
            most = float((mine[:, first].float() - theirs[:, first].float()).abs().max())
            part.fail(
                f"{request.name}: KV of the {group} differs from position {first} on (layer "
                f"{layer}, by up to {most:.3g}; the prompt has {len(request.ids)} tokens, "
                f"{int(wrong.any(0).sum())} of {count} cells differ)"
            )


def _cells(llm: LLM, sequence: Sequence, count: int) -> dict[str, Tensor]:
    """The first ``count`` cells of a sequence by layer group: [2 * layers, count, Hkv, D], K and V
    in turn."""
    kv, pages = llm.engine.runtime.kv, sequence.pages
    assert kv is not None
    return {
        group: torch.stack(
            [c[pages].transpose(1, 2).flatten(0, 1)[:count] for pair in layers for c in pair]
        )
        for group, layers in kv.layers.items()
    }


def _check_pages(part: Part, llm: LLM, when: str) -> None:
    engine = llm.engine
    try:
        engine.check()
    except AssertionError as error:
        part.fail(f"{when}: the engine's books do not agree: {error}")
    cache = engine.cache
    part.count("pages", cache.num_pages)
    if engine.has_work or cache.num_free != cache.num_pages:
        part.fail(f"{when}: {cache.num_pages - cache.num_free} of {cache.num_pages} pages are lost")
