"""`foretell certify`: does speculation change anything, with this model, draft and prompts?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from foretell.bench.certificate import Certificate, identify, print_part, print_verdict
from foretell.bench.certify_config import CertifyConfig
from foretell.bench.certify_law import num_tests, same_law
from foretell.bench.certify_part import Part, Rig
from foretell.bench.certify_same import num_ways, references, requests, same_text
from foretell.bench.certify_state import audit, self_acceptance, self_requests
from foretell.bench.environment import environment
from foretell.bench.run import check_writable
from foretell.bench.workloads import Conversation, by_category, default_workload, read_workload
from foretell.config import EngineConfig
from foretell.drafters import check, expand
from foretell.files import sha256, write_whole
from foretell.models.loader import load
from foretell.progress import progress_bar

LOSSY = frozenset({"typical", "threshold"})


def certify(
    engine: EngineConfig,
    config: CertifyConfig | None = None,
    *,
    prompts: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Checks that speculation changes nothing and prints a verdict.

    Args:
        engine: model, limits and the scheme to certify.
        config: how much is asked.
        prompts: JSONL of prompts, see `foretell.bench.workloads.parse`; None is our own workload.
        json: file for everything found.
        html: file for the certificate, one page.

    Returns:
        True if every part passed.

    Raises:
        ValueError: an option, the file of prompts or the model is wrong; or the rule is lossy by
            its nature, so that there is nothing to certify.
    """
    config, console = config or CertifyConfig(), console or Console()
    if engine.speculation is None:
        raise ValueError("nothing to certify: give --speculation a scheme")
    check(engine.speculation)
    if engine.speculation.verification in LOSSY:
        raise ValueError(
            f"verification={engine.speculation.verification} changes the text by its nature: "
            "certify coupled, rejection or block"
        )
    for path in (json, html):
        if path is not None:
            check_writable(path)
    conversations = read_workload(prompts) if prompts else default_workload()
    target = load(engine.model, engine.weights, max_model_len=engine.max_model_len)
    rig = Rig(engine.with_(speculation=expand(engine.speculation, target)), target, config)
    start = time.time()
    parts: list[Part] = []
    for part in run_parts(rig, spread(conversations, config)):
        parts.append(part)
        print_part(part, console)
    about = identify(rig)
    if prompts is not None:
        about["files"] |= {f"prompts: {prompts.name}": sha256(prompts)}
    about |= {
        "prompts": str(prompts.name if prompts else "foretell's own workload"),
        "seconds": round(time.time() - start, 1),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start)),
        "environment": environment(),
    }
    certificate = Certificate(about, config, parts)
    print_verdict(certificate, console)
    if json is not None:
        write_whole(json, certificate.json().encode())
    if html is not None:
        write_whole(html, certificate.html().encode())
    return certificate.passed


def run_parts(rig: Rig, conversations: list[Conversation]) -> Iterator[Part]:
    """Every part, one after the other."""
    config = rig.config
    prompts = encode(rig, conversations)
    asked = requests(prompts, config)
    rig.make(rig.engine.speculation, 1)  # a draft that cannot be loaded ends it here
    with progress_bar("plain decoding", len(asked), lines=True) as advance:
        answers = references(rig, asked, advance)
    left_out = len(asked) - len(answers)
    with progress_bar("same text", num_ways(rig) * len(answers), lines=True) as advance:
        same, bits, engines = same_text(rig, answers, left_out, advance)
    if long := len(conversations) - len(prompts):
        same.notes.append(f"{long} prompts were left out: no room for an answer in the context")
    yield same
    yield bits
    with progress_bar("same distribution", num_tests(rig) * config.samples, lines=True) as advance:
        law = same_law(rig, rig.make(None, config.batch), prompts, advance)
    yield law
    own = self_requests(asked)
    with progress_bar("acceptance 1.0", len(own), lines=True) as advance:
        accepted = self_acceptance(rig, own, advance)
    yield accepted
    some = [pair for pair in answers if not pair[0].params.grammar]
    some = some[::2] if config.crossed else some
    with progress_bar("KV audit", 2 * len(engines) * len(some), lines=True) as advance:
        audited = audit(rig, engines, some, advance)
    yield audited


def spread(conversations: list[Conversation], config: CertifyConfig) -> list[Conversation]:
    """At most ``limit`` conversations: one of each category in turn; where little is asked short
    ones, but not the shortest alone, which give drafts nothing to work with."""
    if not config.crossed:
        conversations = sorted(conversations, key=lambda c: len(c.turns[0]))
    groups = list(by_category(conversations).values())
    most = max(len(group) for group in groups)
    order = [group[i] for i in range(most) for group in groups if i < len(group)]
    few = order[: 2 * config.limit : 2]
    return few if len(few) == config.limit and not config.crossed else order[: config.limit]


def encode(rig: Rig, conversations: list[Conversation]) -> dict[str, list[int]]:
    """Token ids of each first turn, through the chat template where there is one.

    Raises:
        ValueError: no prompt leaves room for its answer.
    """
    tokenizer = rig.target.tokenizer
    limit = rig.engine.max_model_len or rig.target.config.max_position_embeddings
    made: dict[str, list[int]] = {}
    for conversation in conversations:
        text = conversation.turns[0]
        if tokenizer.has_chat_template:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text)
        if len(ids) + rig.config.max_tokens + 8 <= limit:
            made[conversation.id] = ids
    if not made:
        raise ValueError(
            f"no prompt leaves room for an answer of {rig.config.max_tokens} tokens in a context "
            f"of {limit}; lower max_tokens or take other prompts"
        )
    return made
