"""Budgets and schemes that change from step to step: same text, and nothing gets lost."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from foretell import drafters
from foretell.config import SpeculationConfig
from foretell.engine import calibrate
from foretell.engine.engine import Engine
from foretell.engine.watch import MOST_FEATURES
from foretell.spec.acceptance import Outcome
from foretell.spec.budget import FixedBudget
from foretell.spec.costs import KNOTS, Costs
from foretell.spec.seats import Grant, limit
from foretell.spec.tree import MAX_NODES
from tests import heads, tiny
from tests.engine.test_same_text import PROMPTS, SETTINGS, plain, speculative
from tests.fakes import Scripted

SCHEMES = [
    "prompt-lookup:k=8,ngram_min=1,adaptive=true",
    "draft-model:weights=int4,k=4,adaptive=true",
    "draft-model:weights=int4,depth=4,topk=3,nodes=14,adaptive=true",
    f"{heads.scheme('eagle-norms')},k=3,adaptive=true",
    f"{heads.scheme('medusa')},depth=4,topk=3,nodes=14,adaptive=true",
    "tests.fakes:Hostile,k=63,adaptive=true",
    "prompt-lookup:k=8,ngram_min=1+draft-model:weights=int4,k=4",
    f"prompt-lookup:k=6,ngram_min=1+{heads.scheme('eagle3')},k=3+{heads.scheme('medusa')},k=4",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Costs that other tests measured are nobody's business."""
    monkeypatch.setattr("foretell.engine.kept.home", lambda: tmp_path)


class Restless(FixedBudget):
    """Grants at random: often none, often to another scheme than the step before."""

    def __init__(self, seed: int, mixed: bool = True) -> None:
        self.rng, self.mixed = random.Random(seed), mixed

    def choose(self, seats, rows):
        grants = []
        one = self.rng.randrange(len(seats[0].limits))
        for seat in seats:
            m = self.rng.randrange(len(seat.limits)) if self.mixed else one
            most, depth = seat.limits[m]
            nodes = min(self.rng.randint(0, most), rows) if self.rng.random() < 0.4 else 0
            rows -= nodes
            grants.append(Grant(nodes, min(depth, nodes), m))
        return grants


def restless(scheme: str, name: str, seed: int = 0, **options):
    llm = speculative(scheme, name, **options)
    llm.engine.scheduler.budget = Restless(seed, not llm.engine.drafting.sampled)
    return llm


@pytest.mark.parametrize(("n", "name"), list(enumerate(["greedy", "seeded", "penalties"])))
@pytest.mark.parametrize(("s", "scheme"), list(enumerate(SCHEMES)), ids=range(len(SCHEMES)))
def test_the_text_whatever_is_chosen(s, scheme, n, name):
    """Wide and narrow limits in turn, so that every scheme and every setting has either."""
    narrow = {"max_num_seqs": 3, "max_num_batched_tokens": 66}
    llm = restless(scheme, name, n, **(narrow if (s + n) % 2 else {}))
    for _ in range(2):  # the second time through the prefix cache
        results = llm.generate(PROMPTS, SETTINGS[name])
        assert tiny.ids(results) == plain(name)
    assert sum(result.stats.drafted for result in results) > 0
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    tiny.check_idle(llm)


@pytest.mark.parametrize("scheme", SCHEMES, ids=range(len(SCHEMES)))
def test_the_text_under_the_controller(scheme):
    llm = speculative(scheme, "greedy")
    for _ in range(2):
        assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    tiny.check_idle(llm)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_text_under_sampled_drafts(rule):
    scheme = f"draft-model:weights=int4,k=4,verification={rule}+prompt-lookup:k=6,ngram_min=1"
    for seed in (0, 1):
        llm = restless(scheme, "greedy", seed)
        assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
        assert not llm.engine.metrics.drafter_errors


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"max_num_seqs": 3}])
def test_a_drafter_that_caught_up_is_as_good_as_one_that_watched(name, options):
    """The target drafting for itself is never refused, however long it was not shown anything and
    whoever filled the pages that it shares."""
    llm = restless("draft-model:weights=target,k=4,adaptive=true", name, **options)
    shown = []
    watch = llm.engine.drafting.watches[0]
    missing = watch.missing

    def spy(sequences):
        shown.append(sum(watch.behind(sequence) for sequence in sequences))
        return missing(sequences)

    watch.missing = spy
    for _ in range(3):  # through pages with and without the draft's KV
        results = llm.generate(PROMPTS, SETTINGS[name])
        assert tiny.ids(results) == plain(name)
        assert all(result.stats.accepted == result.stats.drafted for result in results)
        assert sum(result.stats.drafted for result in results) > 20
    assert any(result.stats.num_cached_tokens for result in results)
    assert max(shown) > 30


def test_pages_are_shared_though_the_draft_never_saw_them():
    llm = tiny.llm("draft-model:weights=int4,k=4,adaptive=true")
    llm.engine.scheduler.budget = Never()
    prompt = list(range(2, 42))
    forward = llm.engine.runtime.forward
    llm.engine.runtime.forward = lambda *_: pytest.fail("the draft was run")
    for _ in range(2):
        result = llm.generate([prompt], tiny.greedy(max_tokens=8))[0]
    assert result.stats.num_cached_tokens == 36
    llm.engine.runtime.forward = forward
    tiny.check_idle(llm)


class Never(FixedBudget):
    def choose(self, seats, rows):
        return [Grant() for _ in seats]


def test_a_head_that_is_off_keeps_few_features_and_its_pages():
    llm = tiny.llm(f"{heads.scheme('eagle3')},k=3,adaptive=true")
    llm.engine.scheduler.budget = Never()
    watch, most = llm.engine.drafting.watches[0], 0
    [sequence] = llm.sequences(list(range(2, 12)), tiny.greedy(max_tokens=200), True)
    llm.engine.add(sequence)
    with torch.inference_mode():
        while not sequence.finished:
            llm.engine.step()
            most = max(most, watch.behind(sequence))
    assert MOST_FEATURES // 2 <= most < MOST_FEATURES
    again = llm.generate([sequence.tokens[:-1]], tiny.greedy(max_tokens=2))[0]
    assert again.stats.num_cached_tokens > 190
    tiny.check_idle(llm)


@pytest.mark.parametrize("name", ["eagle-norms", "eagle3"])
def test_a_head_that_was_off_knows_what_one_that_watched_does(name):
    """Of several answers that begin and end at different times; and while it was off, steps were
    not looked at answer by answer."""
    logits, looks = [], []
    for adaptive in ("true", "false"):
        llm = tiny.llm(f"{heads.scheme(name)},k=3,adaptive={adaptive}", max_num_seqs=3)
        engine, drafting = llm.engine, llm.engine.drafting
        engine.scheduler.budget, missing = Never(), drafting.watches[0].missing
        looks.append(0)

        def look(sequences, missing=missing):
            looks[-1] += 1
            return missing(sequences)

        drafting.watches[0].missing = look
        lengths = (60, 8, 70, 70)
        params = [tiny.greedy(max_tokens=n, ignore_eos=True) for n in lengths]
        pairs = zip(PROMPTS, params, strict=False)
        asked = [llm.sequences(prompt, each, True)[0] for prompt, each in pairs]
        with torch.inference_mode():
            for sequence in asked:
                engine.add(sequence)
            for _ in range(50):
                engine.step()
            running = engine.scheduler.running
            assert len(running) == 3
            drafting._catch_up(0, running)
        slots = [sequence.slot for sequence in running]
        logits.append(drafting.drafters[0]._logits[slots])
    assert torch.equal(*logits)
    assert looks[0] < 20


def fix_costs(monkeypatch) -> None:
    """A clock of its own for the controller: what it learns does not depend on the machine."""
    target, propose, observe = Costs.learn_target, Costs.learn_propose, Costs.learn_observe

    def passes(self, rows, keys, more, seconds):
        target(self, rows, keys, more, 0.004 * (1 + 0.2 * (rows - 1)))

    monkeypatch.setattr(Costs, "learn_target", passes)
    monkeypatch.setattr(Costs, "learn_beside", lambda *_: None)
    monkeypatch.setattr(Costs, "learn_propose", lambda *given: propose(*given[:-1], 0.001))
    monkeypatch.setattr(Costs, "learn_observe", lambda *given: observe(*given[:-1], 0.0001))


def test_a_useless_draft_is_left_alone_and_a_perfect_one_used(monkeypatch):
    fix_costs(monkeypatch)
    params = tiny.greedy(max_tokens=40)
    plain = tiny.plain(PROMPTS, params)
    answers = {tuple(p): answer for p, answer in zip(PROMPTS, plain, strict=True)}
    monkeypatch.setattr(Scripted, "answers", answers)
    drafted = {}
    for name in ("Oracle", "Hostile"):
        llm = tiny.llm(f"tests.fakes:{name},k=5,adaptive=true", max_num_seqs=1)
        for _ in range(3):
            results = llm.generate(PROMPTS, params)
        drafted[name] = sum(result.stats.drafted for result in results)
        passes = sum(result.stats.num_passes for result in results)
        assert name != "Oracle" or passes < 0.5 * 40 * len(PROMPTS)
    assert drafted["Oracle"] > 10 * drafted["Hostile"]


def test_costs_are_measured_once(tmp_path):
    scheme = "prompt-lookup:k=4,adaptive=true"
    first = tiny.llm(scheme).engine
    (path,) = (tmp_path / "costs").iterdir()
    assert first.metrics.num_steps == first.metrics.drafted == 0
    assert not first.cache.idle
    costs = json.loads(path.read_text())
    again = tiny.llm(scheme).engine.drafting.controller.costs
    assert again.state()["rows"] == pytest.approx(costs["rows"])
    path.write_text("{}")  # damaged: measured anew
    tiny.llm(scheme)
    assert json.loads(path.read_text())["seen"]
    tiny.llm("prompt-lookup:k=5,adaptive=true")
    assert len(list((tmp_path / "costs").iterdir())) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [0] * len(KNOTS)},
        {"propose": [[0, 0, 0]]},
        {"observe": [[1e-300, 1e-300]]},
        {"rows": [10**400] * len(KNOTS)},
        {"seen": [float("inf")] * len(KNOTS)},
        {"rows": {str(i): 1 for i in range(len(KNOTS))}},
        "[" * 100_000,
        b"\xff\xfe",
        "[]",
    ],
    ids=range(9),
)
def test_damaged_costs_are_measured_anew(changes, tmp_path):
    scheme = "prompt-lookup:k=4,adaptive=true"
    want = tiny.ids(tiny.llm(scheme).generate(PROMPTS[:2], tiny.greedy()))
    (path,) = (tmp_path / "costs").iterdir()
    if isinstance(changes, dict):
        changes = json.dumps(json.loads(path.read_text()) | changes)
    damaged = changes if isinstance(changes, bytes) else changes.encode()
    path.write_bytes(damaged)
    assert tiny.ids(tiny.llm(scheme).generate(PROMPTS[:2], tiny.greedy())) == want
    assert path.read_bytes() != damaged


def test_what_was_learnt_of_drafts_outlasts_a_restart(tmp_path):
    scheme = "tests.fakes:Hostile,k=4,adaptive=true"
    with tiny.llm(scheme) as llm:
        want = tiny.ids(llm.generate(PROMPTS, tiny.greedy()))
        for _ in range(60):  # how often it asks by itself is a matter of time
            llm.engine.drafting.controller.learn(0, [Outcome(0, 4, 4, 0, 4)])
    (path,) = (tmp_path / "acceptance").iterdir()
    assert json.loads(path.read_text())[0]["asked"] > 40
    again = tiny.llm(scheme)
    (record,) = again.engine.drafting.controller.schemes
    assert record.asked == pytest.approx(32)
    assert again.engine.drafting.controller.probes[0].free == 0
    assert tiny.ids(again.generate(PROMPTS, tiny.greedy())) == want
    path.write_text('[{"tries": [1, 2')
    assert tiny.ids(tiny.llm(scheme).generate(PROMPTS, tiny.greedy())) == want


def test_what_cannot_be_kept_is_learnt_again(tmp_path):
    (tmp_path / "acceptance").write_text("a file where a directory should be")
    with tiny.llm("prompt-lookup:k=4,adaptive=true") as llm:
        assert llm.generate(PROMPTS[:1], tiny.greedy())[0].token_ids


def test_costs_of_other_kernels_are_not_believed(tmp_path, monkeypatch):
    """What drafts are worth is the same with them."""
    scheme = "prompt-lookup:k=4,adaptive=true"
    for digest in ("one", "one", "another"):
        monkeypatch.setattr(calibrate, "code_digest", lambda digest=digest: digest)
        tiny.llm(scheme).close()
    assert len(list((tmp_path / "costs").iterdir())) == 2
    assert len(list((tmp_path / "acceptance").iterdir())) == 1


def test_the_controller_is_told_of_all_steps_though_few_are_looked_at():
    """Where nothing is drafted for long."""
    llm = tiny.llm("tests.fakes:Hostile,k=4,adaptive=true", max_num_seqs=1)
    llm.engine.scheduler.budget = Never()
    controller, passed, learnt = llm.engine.drafting.controller, [], []
    controller.passed = lambda seconds, steps: passed.append((seconds, steps))
    controller.costs.learn_target = lambda *given: learnt.append(given)
    llm.generate([PROMPTS[0]], tiny.greedy(max_tokens=100, ignore_eos=True))
    steps = llm.engine.metrics.num_steps
    assert steps - 5 <= sum(steps for _, steps in passed) <= steps
    assert len(learnt) == len(passed) < 0.4 * steps
    assert all(seconds > 0 for seconds, _ in passed)


def test_costs_seen_less_than_never_count_as_not_seen(tmp_path):
    scheme = "prompt-lookup:k=4,adaptive=true"
    tiny.llm(scheme)
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seen": [-1] * len(KNOTS)}))
    assert tiny.llm(scheme).generate(PROMPTS[:1], tiny.greedy())[0].token_ids


def test_a_first_start_that_compiles_measures_all_the_same(tmp_path, monkeypatch):
    """Kernels compile in the first step: the clock starts behind it."""
    clock, inner = [0.0], Engine.step

    def slow_at_first(self, *given):
        clock[0] += 1e-3 if self.metrics.num_steps else 60.0
        return inner(self, *given)

    monkeypatch.setattr(Engine, "step", slow_at_first)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    tiny.llm("prompt-lookup:k=4,adaptive=true")
    (path,) = (tmp_path / "costs").iterdir()
    sizes = [knot for knot in KNOTS if knot <= MAX_NODES]
    assert all(json.loads(path.read_text())["seen"][: len(sizes)])


def test_costs_that_time_did_not_suffice_for_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "MOST_SECONDS", 0.0)
    llm = tiny.llm("prompt-lookup:k=4,adaptive=true")
    assert not (tmp_path / "costs").exists()
    tiny.check_idle(llm)
    llm.close()
    assert not (tmp_path / "costs").exists()


def test_nobody_is_asked_while_nothing_pays():
    """Neither seats nor drafts are made in the steps that a choice of nothing serves."""
    llm = tiny.llm("tests.fakes:Hostile,k=4,adaptive=true", max_num_seqs=1)
    seats, inner = [], llm.engine.scheduler.seat
    llm.engine.scheduler.seat = lambda sequence: seats.append(1) or inner(sequence)
    for probes in llm.engine.drafting.controller.probes:
        probes.free = probes.trials = 0
        probes.earn = lambda seconds, steps: None
        probes.price = 1.0
    want = tiny.ids(tiny.llm().generate(PROMPTS[:1], tiny.greedy(max_tokens=200)))
    assert tiny.ids(llm.generate(PROMPTS[:1], tiny.greedy(max_tokens=200))) == want
    assert len(seats) < 60
    tiny.check_idle(llm)


def test_a_scheme_is_asked_only_for_those_that_may_draft():
    llm = tiny.llm("prompt-lookup:k=4,ngram_min=1,adaptive=true")
    llm.engine.scheduler.budget = Restless(3)
    asks, inner = [], llm.engine.drafting.drafters[0].propose

    def propose(ask):
        asks.append(ask)
        return inner(ask)

    llm.engine.drafting.drafters[0].propose = propose
    assert tiny.ids(llm.generate(PROMPTS, tiny.greedy())) == plain("greedy")
    assert any(len(ask.sequences) < len(PROMPTS) for ask in asks)
    assert all(all(ask.budgets) for ask in asks)


def test_two_schemes_with_kv_are_refused():
    with pytest.raises(ValueError, match="draft-model and draft-model both keep KV"):
        tiny.llm("draft-model:weights=int4,k=2+draft-model:weights=target,k=3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt-lookup:k=2+prompt-lookup:adaptive=false", "adaptive is said with the first"),
        ("prompt-lookup:k=2,adaptive=false+medusa:model=x", "one scheme only"),
        ("prompt-lookup:adaptive=maybe", "true or false"),
        ("prompt-lookup+medusa:verification=block", "verification is said with the first"),
        ("auto+medusa:model=x", "auto chooses schemes and options itself"),
        ("auto:ngram_min=1", "auto chooses schemes and options itself"),
        ("auto:k=3", "auto chooses k itself"),
    ],
)
def test_what_cannot_be_said(text, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig.parse(text)


@pytest.mark.parametrize("given", [{"adaptive": "false"}, {"also": ("eagle",)}])
def test_what_cannot_be_said_in_python(given):
    with pytest.raises(ValueError, match="must be"):
        SpeculationConfig(method="prompt-lookup", **given)


def test_what_can_be_said():
    both = SpeculationConfig.parse("prompt-lookup:k=3+eagle:model=/a+b/c,k=2")
    assert both is not None
    assert (both.method, both.k) == ("prompt-lookup", 3)
    assert [(s.method, s.k, s.options) for s in both.also] == [("eagle", 2, {"model": "/a+b/c"})]
    auto = tiny.llm("auto:adaptive=true").config.speculation
    assert auto is not None
    assert (auto.method, auto.k, auto.also) == ("prompt-lookup", 8, ())
    assert limit(3, 9, 5, 2) == (3, 1)


def test_a_path_that_is_there_may_end_in_a_plus_and_a_name(tmp_path):
    (tmp_path / "a+b+eagle").mkdir()
    one = SpeculationConfig.parse(f"mtp:model={tmp_path}/a+b+eagle")
    assert one is not None
    assert (one.options, one.also) == ({"model": f"{tmp_path}/a+b+eagle"}, ())
    two = SpeculationConfig.parse(f"mtp:model={tmp_path}/a+b+eagle+prompt-lookup")
    assert two is not None
    assert one.options == two.options
    assert [s.method for s in two.also] == ["prompt-lookup"]
    other = SpeculationConfig.parse(f"mtp:model={tmp_path}/none+prompt-lookup")
    assert other is not None
    assert [s.method for s in other.also] == ["prompt-lookup"]


def test_auto_takes_a_packaged_head_where_somebody_chooses(monkeypatch):
    monkeypatch.setattr(
        drafters, "packaged_head", lambda method, sizes: "head" if method == "eagle" else None
    )
    auto = drafters.expand(SpeculationConfig(method="auto"), tiny.model())
    assert [each.method for each in (auto, *auto.also)] == ["prompt-lookup", "eagle"]
    always = drafters.expand(SpeculationConfig(method="auto", adaptive=False), tiny.model())
    assert (always.method, always.adaptive, always.also) == ("prompt-lookup", False, ())
