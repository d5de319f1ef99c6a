"""The controller in a simulated engine: never slower than plain, nearly the best fixed setting."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.spec.acceptance import Acceptance, Outcome, ladder
from foretell.spec.budget import Controller, FixedBudget, Probes
from foretell.spec.choice import Choice
from foretell.spec.costs import Costs, Terms
from foretell.spec.seats import Grant, Limit, Seat
from tests.spec.world import Draft, World, controller

ROWS = [0.015, 0.04, 0.12]
"""What a further row costs, in passes of one: as measured at a short context, and far worse."""
BATCHES = [1, 2, 4, 8, 16, 32]


def good() -> Draft:
    return Draft(lambda slot, step: 0.75, level=4e-4, call=1e-4)


def bursty() -> Draft:
    """As prompt lookup: nothing to copy, then everything."""
    copies = lambda slot, step: (step // 60 + slot) % 2  # noqa: E731
    return Draft(
        lambda slot, step: 0.9 if copies(slot, step) else 0.1,
        found=lambda slot, step: 0.8 if copies(slot, step) else 0.15,
    )


def useless() -> Draft:
    return Draft(lambda slot, step: 0.02, level=5e-4, call=1e-4)


DRAFTS = {"good": good, "bursty": bursty, "useless": useless}


def compare(draft, batch, row, steps: int) -> tuple[float, float]:
    """The controller against plain decoding and against the best fixed setting."""
    world = lambda: World([draft()], batch, row=row)  # noqa: E731
    plain = world().run(steps, [Grant()])
    fixed = [world().run(steps, [Grant(k, k)]) for k in (1, 2, 3, 4, 6, 8)]
    adapted = world()
    found = adapted.run(steps, controller(adapted))
    return found / plain, found / max(plain, *fixed)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", DRAFTS)
def test_never_slower_and_nearly_the_best_fixed_setting(name, batch, row):
    """From nothing known but costs; what learning takes is counted."""
    of_plain, of_best = compare(DRAFTS[name], lambda step: batch, row, max(600, 1600 // batch))
    assert of_plain >= 0.98
    assert of_best >= (0.94 if batch < 32 else 0.92)


@pytest.mark.parametrize("row", ROWS)
def test_acceptance_that_changes_on_the_way(row):
    changing = lambda: Draft(  # noqa: E731
        lambda slot, step: 0.85 if step // 300 % 2 else 0.05, level=4e-4, call=1e-4
    )
    of_plain, of_best = compare(changing, lambda step: 1, row, 2400)
    assert of_plain >= 0.98
    assert of_best >= 0.95


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", DRAFTS)
def test_load_that_goes_up_and_down(name, row):
    """A new batch every hundred steps: sequences that nothing is known of make up most of it."""
    of_plain, of_best = compare(DRAFTS[name], lambda step: BATCHES[step // 100 % 6], row, 1200)
    assert of_plain >= 0.97
    assert of_best >= 0.9


def test_without_calibration_it_learns_on_the_way():
    world = World([good()], lambda step: 1)
    adaptive = controller(world, calibrated=False)
    world.run(300, adaptive)
    late = world.run(600, adaptive)
    assert late > 0.95 * max(World([good()], lambda s: 1).run(600, [Grant(k, k)]) for k in (3, 4))


def test_each_sequence_gets_the_scheme_that_pays_for_it():
    """One copies, the other does not; both schemes at once beat either."""
    copier = lambda: Draft(lambda slot, step: 0.95 if slot == 0 else 0.05)  # noqa: E731
    good = lambda: Draft(lambda slot, step: 0.75, level=5e-5)  # noqa: E731
    world = World([copier(), good()], lambda step: 2)
    both = controller(world)
    world.run(400, both)
    world.history.clear()
    together = world.run(400, both)
    used = [[grants[b].scheme for grants in world.history if grants[b].nodes] for b in (0, 1)]
    assert used[0].count(0) > 0.8 * len(used[0])
    assert used[1].count(1) > 0.6 * len(used[1])
    alone = World([copier()], lambda step: 2)
    assert together > 1.03 * alone.run(400, controller(alone))


def test_a_scheme_that_begins_to_pay_is_found_again():
    late = Draft(lambda slot, step: 0.9 if step > 500 else 0.0, level=3e-4)
    world = World([late], lambda step: 1)
    adaptive = controller(world)
    world.run(1500, adaptive)
    on = [bool(grants[0].nodes) for grants in world.history]
    assert sum(on[50:500]) < 40
    assert all(on[-300:])


def test_probes_get_rarer_while_they_are_in_vain():
    world = World([Draft(lambda slot, step: 0.0, level=1e-3)], lambda step: 1)
    adaptive = controller(world)
    world.run(200, adaptive)
    early = sum(bool(grants[0].nodes) for grants in world.history)
    world.history.clear()
    world.run(2000, adaptive)
    late = sum(bool(grants[0].nodes) for grants in world.history)
    assert 0 < early < 12
    assert 0 < late < 6 * early


def test_a_machine_that_is_slower_than_it_was_gives_no_credit():
    """What is paid and what it is paid from are counted alike."""
    tries = []
    for pace in (1.0, 10.0):
        world = World([Draft(lambda slot, step: 0.0, level=1e-3)], lambda step: 1, noise=0.0)
        adaptive = controller(world)
        world.pace = pace
        world.run(3000, adaptive)
        tries.append(sum(bool(grants[0].nodes) for grants in world.history[1000:]))
    assert 0 < tries[1] < 6 * tries[0], "twelve times as many, were they paid in other seconds"


def test_nobody_is_left_out_for_good():
    """All are alike: all get drafts, whatever the rows."""
    world = World([good()], lambda step: 8)
    world.run(400, controller(world), rows=12)
    given_to = [sum(grants[b].nodes for grants in world.history) for b in range(8)]
    assert min(given_to) > 0.3 * max(given_to) > 0


def test_one_scheme_a_step_where_drafts_are_sampled():
    world = World([bursty(), good()], lambda step: 4)
    world_costs = controller(world).costs
    single = Controller([Limit(8, 8)] * 2, world_costs, mixed=False)
    world.run(300, single)
    assert all(len({g.scheme for g in grants if g.nodes}) <= 1 for grants in world.history)
    assert {g.scheme for grants in world.history for g in grants if g.nodes} == {0, 1}


limits = st.builds(Limit, st.integers(0, 12), st.integers(0, 12)).map(
    lambda made: Limit(made.nodes if made.depth else 0, min(made.depth, made.nodes))
)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    trees=st.booleans(),
    mixed=st.booleans(),
    rows=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_budgets_are_within_limits_and_rows(data, trees, mixed, rows, seed):
    rng = random.Random(seed)
    sizes = [Limit(12, 4 if trees else 12), Limit(6, 6)]
    adaptive = Controller(sizes, Costs([True, False]), mixed=mixed)
    for policy in (adaptive, FixedBudget()):
        for step in range(12):
            seats = [
                Seat(
                    slot, rng.randrange(1, 3000), [*data.draw(st.tuples(limits, limits))], [3, 700]
                )
                for slot in range(data.draw(st.integers(1, 5)))
            ]
            grants = policy.choose(seats, rows)
            assert len(grants) == len(seats)
            assert sum(grant.nodes for grant in grants) <= rows
            for grant, seat in zip(grants, seats, strict=True):
                most = seat.limits[grant.scheme]
                assert 0 <= grant.depth <= min(most.depth, grant.nodes)
                assert grant.nodes <= most.nodes
                assert bool(grant.depth) == bool(grant.nodes)
            if policy is adaptive:
                for m in (0, 1):
                    adaptive.learn(
                        m,
                        [
                            Outcome(seat.slot, g.nodes, g.depth, rng.randint(0, g.depth))
                            for g, seat in zip(grants, seats, strict=True)
                            if g.nodes and g.scheme == m
                        ],
                    )
                adaptive.costs.learn_target(len(seats), 100, 0, rng.uniform(0.001, 0.1))
                adaptive.passed(0.01)
                if step % 5 == 4:
                    adaptive.forget([0])


def test_a_choice_depends_only_on_steps_that_are_over():
    """Twice the same past, twice the same budgets: no clock and no chance in it."""
    histories = []
    for _ in range(2):
        world = World([bursty(), good()], lambda step: 3, seed=5)
        world.run(200, controller(world))
        histories.append(world.history)
    assert histories[0] == histories[1]


def test_ladders():
    assert ladder(5, 5).nodes == [1, 2, 3, 4, 5]
    assert ladder(21, 21).nodes == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 21]
    assert ladder(63, 5) == ([1, 3, 7, 15, 31, 63], [1, 3, 5, 5, 5, 5], False)


def test_acceptance_is_by_position_and_by_sequence():
    record = Acceptance(4, 4)
    for _ in range(200):
        record.learn([Outcome(0, 4, 4, 2), Outcome(1, 4, 4, 0)])
        record.passed()
    first, second = record.expected(0)[0], record.expected(1)[0]
    assert first[1] > 1.0
    assert first[3] - first[1] < 0.25  # nothing was ever right at depth 3
    assert second[3] < 0.9
    stranger = record.expected(2)[0]
    assert second[3] < stranger[3] < first[3]
    for _ in range(400):  # what is not fed is forgotten
        record.passed()
    assert record.expected(0)[0][0] == pytest.approx(stranger[0], abs=0.05)
    record.forget([0])
    assert record.expected(0) == record.expected(2)


def test_how_often_there_is_a_draft_at_all():
    record = Acceptance(3, 3)
    for _ in range(100):
        record.learn([Outcome(0, 0, 0, 0), Outcome(1, 3, 3, 3)])
        record.passed()
    assert record.expected(0)[1] < 0.4
    assert record.expected(1)[1] > 0.6
    assert record.expected(0)[0][2] > 1.5  # and if there were one, it would be right


def test_a_path_that_ends_early_is_a_draft_that_gave_less():
    """A level that was asked for and not drafted counts as one that was not accepted, and rows that
    were not used are not paid for."""
    record = Acceptance(4, 4)
    for _ in range(400):
        record.learn([Outcome(0, 1, 4, 1, 4)])
        record.passed()
    tokens, _ = record.expected(0)
    assert tokens[3] == pytest.approx(1.0, abs=0.15)
    assert record.filled == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=0.02)


@pytest.mark.parametrize("truth", [0.4, 1.0, 2.0])
def test_candour_is_learnt(truth: float):
    """Chances that are too modest, right, or too bold."""
    rng, record = random.Random(1), Acceptance(4, 4)
    for _ in range(6000):
        chance = rng.uniform(0.05, 0.95)
        record.learn_claims([(chance, rng.random() < chance**truth)])
    assert record.candour == pytest.approx(truth, rel=0.25)
    assert record.least(0.3) ** record.candour == pytest.approx(0.3)


def test_drafts_must_be_likelier_where_rows_are_dearer():
    least = []
    for row in (0.02, 0.2):
        world = World([good()], lambda step: 4, row=row, noise=0.0)
        policy = controller(world)
        world.run(300, policy)
        seats = [Seat(slot, 200, [Limit(8, 8)], [0]) for slot in range(4)]
        choice = Choice(policy.schemes, policy.costs, seats, 64)
        least.append(choice.best(mixed=True)[2][0])
    assert 0 < least[0].node < 0.5 * least[1].node
    assert all(each.node < each.parent for each in least)


def test_costs_are_learnt_in_spite_of_outliers():
    rng = random.Random(3)
    costs = Costs([True])
    truth = lambda rows, keys, more: 0.003 + 1e-4 * rows + 2e-6 * keys + 3e-7 * more  # noqa: E731
    for _ in range(3000):
        rows, keys = rng.choice([1, 2, 5, 9, 17, 40]), rng.choice([50, 500, 4000])
        took = truth(rows, keys, keys * (rows - 1)) * (20 if rng.random() < 0.03 else 1)
        costs.learn_target(rows, keys, keys * (rows - 1), took)
    for rows, keys in ((1, 100), (9, 100), (9, 3000), (40, 100)):
        counts = (keys, keys * (rows - 1))
        found = costs.pace * (costs.base(rows) + costs.keys(counts))
        assert found == pytest.approx(truth(rows, *counts), rel=0.2)


def test_a_slower_machine_is_slower_for_everything():
    costs = Costs([True])
    for _ in range(50):
        for rows in (1, 8):
            costs.learn_target(rows, 0, 0, 0.004 + 0.0005 * rows)
        costs.learn_propose(0, 4, 4, 0, 0.002)
    before = costs.base(8) / costs.base(1), costs.propose[0]((1, 4, 4)) / costs.base(1)
    for _ in range(200):
        costs.learn_target(1, 0, 0, 3 * 0.0045)
        costs.learn_propose(0, 4, 4, 0, 3 * 0.002)
    assert costs.pace > 1.8
    assert costs.base(8) / costs.base(1) == pytest.approx(before[0], rel=0.35)
    assert costs.propose[0]((1, 4, 4)) / costs.base(1) == pytest.approx(before[1], rel=0.35)


def test_costs_survive_a_file():
    world = World([good(), bursty()], lambda step: 1)
    costs = controller(world).costs
    again = Costs([True, False])
    again.restore(json.loads(json.dumps(costs.state())))
    for rows in (1, 3, 50, 700):
        assert again.base(rows) == pytest.approx(costs.pace * costs.base(rows))
    for damaged in ({}, {**costs.state(), "rows": [1]}, {**costs.state(), "propose": []}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Costs([True, False]).restore(damaged)


def restarted(before: Draft, after: Draft, steps: int, batch: int = 4) -> tuple[float, World]:
    """Tokens a second behind a restart, and how it went: through a file."""
    first = World([before], lambda step: batch, seed=1)
    learnt = controller(first)
    first.run(400, learnt)
    world = World([after], lambda step: batch, seed=2)
    policy = controller(world)
    policy.restore(json.loads(json.dumps(learnt.state())))
    return world.run(steps, policy), world


def test_what_was_tried_before_a_restart_need_not_be_tried_again():
    cold = World([useless()], lambda step: 4, seed=2)
    cold.run(60, controller(cold))
    _, warm = restarted(useless(), useless(), 60)
    tries = [
        sum(bool(grant.nodes) for grants in w.history for grant in grants) for w in (cold, warm)
    ]
    assert tries[1] < 0.5 * tries[0]


def test_what_paid_before_a_restart_is_used_from_the_first_step():
    rate, warm = restarted(good(), good(), 40)
    assert all(grant.nodes > 2 for grant in warm.history[0])
    cold = World([good()], lambda step: 4, seed=2)
    assert rate > cold.run(40, controller(cold))


def test_what_was_learnt_before_a_restart_weighs_little():
    record, again = Acceptance(4, 4), Acceptance(4, 4)
    for _ in range(400):
        record.learn([Outcome(0, 4, 4, 2)])
        record.passed()
    again.restore(json.loads(json.dumps(record.state())))
    assert record.asked > 100
    assert again.asked == pytest.approx(32)
    assert max(again.tries) <= 32 + 1e-9
    assert again.expected(9)[0] == pytest.approx(record.expected(9)[0], rel=0.2)


def test_many_steps_at_once_are_as_many_single_ones():
    one, four, single, group = Acceptance(4, 4), Acceptance(4, 4), Probes(), Probes()
    for record in (one, four):
        record.learn([Outcome(0, 4, 4, 2)])
    for _ in range(3):
        one.passed()
        four.passed()
    for _ in range(100):
        for _ in range(4):
            one.passed()
            single.earn(0.01)
        four.passed(4)
        group.earn(0.04, 4)
    assert four.tries == pytest.approx(one.tries)
    assert four.tries[0] < 0.9
    for _ in range(1000):
        group.earn(0.04, 4)
    assert group.credit == pytest.approx(8 * 0.01)
    assert single.credit == pytest.approx(min(4.0 * 0.01, 8 * 0.01))


@pytest.mark.parametrize(("before", "after"), [(useless, good), (good, useless)])
def test_what_was_learnt_before_a_restart_is_forgotten_where_it_is_wrong(before, after):
    rate, _ = restarted(before(), after(), 1200)
    best = max(World([after()], lambda s: 4, seed=2).run(1200, [Grant(k, k)]) for k in (0, 3, 4))
    assert rate > 0.95 * best


@pytest.mark.parametrize(
    "change",
    [
        {"tries": [1.0]}, {"hits": [9e5] * 8}, {"yields": None}, {"filled": [-1.0] * 8},
        {"asked": float("nan")}, {"found": 1e5}, {"errors": []}, {"candour": "no"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_is_no_record_is_refused(change):
    state = [Acceptance(8, 8).state() | change]
    policy = controller(World([good()], lambda step: 1))
    with pytest.raises((ValueError, KeyError, TypeError)):
        policy.restore(state)
    assert policy.state() == [Acceptance(8, 8).state()]


def test_terms_share_a_surprise_by_their_parts():
    terms = Terms([1.0, 1.0])
    for _ in range(400):
        terms.learn((1, 0), 2.0)
        terms.learn((1, 10), 32.0)
    assert terms.weights == [pytest.approx(2.0, rel=0.05), pytest.approx(3.0, rel=0.05)]


def test_a_row_that_seems_to_save_time_asks_for_no_chance_at_all():
    scheme = Acceptance(4, 4)
    scheme.candour = 1.3
    assert scheme.least(-0.2) == 0.0
    assert 0 < scheme.least(0.1) < scheme.least(0.5) < 1


def test_what_a_network_costs_beside_is_not_taken_for_a_slow_machine():
    costs = Costs([True])
    for _ in range(100):
        costs.learn_target(1, 0, 0, 0.004)
    before = costs.base(1), costs.pace
    for _ in range(200):
        costs.learn_beside(0, 1, 0, 0, 0.005)
    assert (costs.base(1), costs.pace) == before
    assert costs.beside[0] == pytest.approx(0.001, rel=0.05)
    for _ in range(200):
        costs.learn_beside(0, 1, 0, 0, 0.003)
    assert costs.beside[0] < 1e-5


def test_a_scheme_that_knows_its_chances_is_tried_at_the_price_of_its_draft():
    """Its nodes are left out where they are not worth their rows."""
    policy = controller(World([bursty()], lambda step: 1))
    seat, grant = Seat(0, 200, [Limit(8, 8)], [0]), Grant(4, 4)
    blind = policy._price(grant, seat, 1)
    policy.schemes[0].learn_claims([(0.5, True)])
    known = policy._price(grant, seat, 1)
    assert known == pytest.approx(
        policy.costs.propose[0]((1, 3 * policy.costs.reach(200), 4))
        + policy.costs.observe[0]((1, 0))
    )
    assert known < 0.5 * blind


def test_who_comes_to_a_slot_is_looked_at():
    """A choice that nobody drafts serves many steps, but only those for whom it was made."""
    world = World([Draft(lambda slot, step: 0.0)], lambda step: 1)
    policy = controller(world)
    world.run(400, policy)
    policy.probes[0].free, policy.probes[0].credit, policy.probes[0].price = 0, 0.0, 1.0
    for _ in range(20):
        policy.choose([Seat(0, 200, [Limit(8, 8)], [0])], 480)
        if policy.silent([0]):
            break
    assert policy.silent([0])
    assert not policy.silent([1])
    policy.forget([0])
    assert not policy.silent([0])


def test_a_noisy_machine_is_no_cost_of_a_scheme():
    costs, rng = Costs([True]), random.Random(0)
    for _ in range(400):
        costs.learn_beside(0, 2, 200, 200, costs.base(2) * math.exp(rng.gauss(0, 0.2)))
    assert costs.beside[0] < 0.02 * costs.base(2)
    for _ in range(2000):
        costs.learn_beside(0, 2, 200, 200, 1.3 * costs.base(2))
    assert costs.beside[0] > 0.2 * costs.base(2), "what is there all the time is one"


def test_how_rows_compare_outlasts_a_noisy_hour():
    """Known from a calibration, it moves slowly; the pace takes what slows all."""
    costs, rng = Costs([False]), random.Random(1)
    for _ in range(4):
        for rows in (1, 2, 3, 4, 8, 16):
            costs.learn_target(rows, 0, 0, 0.01 * (1 + 0.1 * (rows - 1)))
    costs.restore(costs.state())
    for _ in range(300):
        rows = rng.choice([1, 2])
        costs.learn_target(rows, 0, 0, 0.02 * (1 + 0.1 * (rows - 1)) * math.exp(rng.gauss(0, 0.2)))
    assert costs.base(2) / costs.base(1) == pytest.approx(1.1, abs=0.04)
    assert costs.pace > 1.5


def test_a_machine_that_slows_down_while_a_network_drafts_makes_it_no_dearer():
    """No plain step tells of it, but what the network itself takes; a prompt's catching up not."""
    costs = Costs([True])
    for _ in range(100):
        for rows in (1, 3):
            costs.learn_target(rows, 0, 0, 0.008 + 0.001 * rows)
        costs.learn_observe(0, 2, 0.001)
        costs.learn_observe(0, 500, 0.0508)
        costs.learn_beside(0, 3, 0, 0, 0.011)
    before = costs.base(3) / costs.base(1)
    for _ in range(20):
        costs.learn_observe(0, 500, 1.3 * 0.0508)
    assert costs.pace == pytest.approx(1, abs=0.05)
    for _ in range(300):
        costs.learn_observe(0, 2, 1.4 * 0.001)
        costs.learn_beside(0, 3, 0, 0, 1.4 * 0.011)
    assert costs.pace > 1.25
    assert costs.beside[0] < 0.1 * costs.base(1)  # 0.5 if all of it were its own
    assert costs.base(3) / costs.base(1) == pytest.approx(before, rel=0.02)


def test_the_first_token_of_a_draft_costs_no_level():
    costs = Costs([True])
    for _ in range(200):
        for levels in (1, 2, 4):
            costs.learn_propose(0, levels, levels, 0, 0.0005 + 0.002 * (levels - 1))
    call, level, _ = costs.propose[0].weights
    assert call == pytest.approx(0.0005, rel=0.2)
    assert level == pytest.approx(0.002, rel=0.1)
