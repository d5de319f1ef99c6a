"""The benchmark's own arithmetic, on an engine whose times and drafts are made up."""

from __future__ import annotations

import io
import json
import resource
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from foretell.bench.command import bench
from foretell.bench.report import (
    broken_promises,
    histogram,
    markdown,
    percentile,
    show_tables,
    summarize,
    tables,
)
from foretell.bench.run import Arm, BenchConfig, first_difference, measure, write_json
from foretell.bench.workloads import (
    Conversation,
    by_category,
    default_workload,
    parse,
    pick,
    read_workload,
)
from foretell.config import EngineConfig
from foretell.sequence import FinishReason, Stats

# ---- workloads


def test_default_workload_covers_seven_tasks() -> None:
    groups = by_category(default_workload())
    assert set(groups) == {
        "chat",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
        "code_edit",
    }
    assert all(len(group) >= 6 for group in groups.values())
    assert all(len(c.turns) == 2 for c in groups["chat"])
    for name in ("summarization", "rag"):
        assert all(150 <= len(c.turns[0].split()) <= 400 for c in groups[name])


def test_reads_the_formats_of_spec_bench_edits_and_vicuna() -> None:
    text = (
        '{"question_id": 81, "category": "writing", "turns": ["a", "b"], "task": "mt_bench"}\n'
        "\n"
        '{"id": "E/0", "bench": "EditEval", "license": "MIT", "turns": ["c"], "reference": "x"}\r\n'
        '{"question_id": 1, "category": "generic", "turns": ["d\u2028e"]}\n'
        '{"prompt": "f"}\n'
        '{"conversations": [{"from": "human", "value": "g"}, {"from": "gpt", "value": "h"}]}\n'
        '{"body": {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": '
        '[{"type": "text", "text": "i"}, {"type": "text", "text": "j"}]}]}}'
    )
    assert parse(text, "x") == [
        Conversation("81", "mt_bench", ("a", "b")),
        Conversation("E/0", "EditEval", ("c",)),
        Conversation("1", "generic", ("d\u2028e",)),
        Conversation("5", "all", ("f",)),
        Conversation("6", "all", ("g",)),
        Conversation("7", "all", ("ij",)),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"prompt": "\\ud800"}', "half of a character"),
        ("{}", "neither 'turns' nor 'prompt'"),
        ('{"turns": []}', "at least one message"),
        ('{"turns": {"a": 1}}', "at least one message"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "of the user's"),
        (
            '{"messages": [{"role": "user", "content": [{"text": "a"}, {"image_url": "x"}]}]}',
            "must be text",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"text": "a"}, {"text": null}]}]}',
            "must be text",
        ),
        ('{"turns": ["a", " "]}', "not empty"),
        ('{"turns": ["a", 3]}', "not empty"),
        ('{"turns": ["a"], "id": "1"}', "second time"),
        ("[" * 100_000, ""),
    ],
)
def test_a_bad_line_is_named(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"set\.jsonl:3: ") as caught:
        parse('{"turns": ["a"], "id": 1}\n\n' + line + "\n", "set.jsonl")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        read_workload(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:2: not UTF-8"):
        read_workload(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_workload(tmp_path / "empty.jsonl")


def test_limit_is_evenly_spaced_in_each_category() -> None:
    rows = [Conversation(f"{c}{i}", c, ("x",)) for i in range(10) for c in "ab"]
    rows.append(Conversation("c0", "c", ("x",)))
    assert [c.id for c in pick(rows, 3)] == ["a0", "a3", "a6", "b0", "b3", "b6", "c0"]
    assert pick(rows, None) == rows
    with pytest.raises(ValueError, match="limit=0"):
        pick(rows, 0)


# ---- measuring


@dataclass
class Reply:
    token_ids: list[int]
    stats: Stats
    text: str = "answer"
    finish_reason: FinishReason = FinishReason.LENGTH
    error: str | None = None


@dataclass
class FakeLLM:
    """Answers with the prompt's own tokens; a drafter gives it two tokens in each pass."""

    wrong: bool = False
    interrupt_after: int | None = None
    failed: bool = False
    calls: list[tuple[bool, list[list[int]], list[int]]] = field(default_factory=list)

    def chat_prompt(self, messages) -> list[int]:
        return [len(m["content"]) for m in messages]

    def generate(self, prompts, params=None, *, speculate=True):
        if not isinstance(params, list):  # warm-up
            params = [params] * len(prompts)
        else:
            self.calls.append((speculate, prompts, [p.seed for p in params]))
        if self.interrupt_after is not None and len(self.calls) > self.interrupt_after:
            raise KeyboardInterrupt
        return [self.reply(ids, p, speculate) for ids, p in zip(prompts, params, strict=True)]

    def reply(self, ids, params, speculate) -> Reply:
        tokens = [(sum(ids) + i) % 97 for i in range(params.max_tokens)]
        stats = Stats(num_prompt_tokens=len(ids), arrival=0.0, first_token=1.0)
        per_pass = 2 if speculate else 1
        if speculate:
            # Three drafted in each pass; the first is accepted in 4 of 5, the second in 1 of 2.
            stats.drafted_by_position, stats.accepted_by_position = [10, 10, 10], [8, 4, 0]
            if self.wrong:
                tokens[2] += 1
        stats.token_times = [1.0 + (i // per_pass) for i in range(len(tokens))]
        stats.num_passes = -(-len(tokens) // per_pass)
        reply = Reply(tokens, stats, "another answer" if speculate else "answer")
        if self.failed:
            reply.finish_reason, reply.error = FinishReason.ERROR, "NaN in the logits"
        return reply


CONVERSATIONS = [
    Conversation("a1", "a", ("one", "three")),
    Conversation("a2", "a", ("sixsix",)),
    Conversation("b1", "b", ("seven77",)),
]


def arms(**llm) -> list[Arm]:
    model = FakeLLM(**llm)
    return [Arm("plain", model, speculate=False), Arm("fast", model)]


def test_arms_alternate_and_see_the_same_prompts_and_seeds() -> None:
    both = arms()
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9, seed=5), room=100)
    calls = both[0].llm.calls
    assert [speculate for speculate, _, _ in calls] == [
        False, True, True, False, False, True, True, False,
    ]  # fmt: skip
    for one, other in zip(calls[::2], calls[1::2], strict=True):
        assert one[1:] == other[1:]
    # The second turn holds the first one's question and plain decoding's answer.
    assert [prompts for _, prompts, _ in calls[::2]] == [[[3]], [[3, 6, 5]], [[6]], [[7]]]
    assert [seeds for _, _, seeds in calls[::2]] == [[5], [5], [6], [7]]
    assert [(a.id, a.turn, a.arm) for a in result.answers[:4]] == [
        ("a1", 1, "plain"), ("a1", 1, "fast"), ("a1", 2, "plain"), ("a1", 2, "fast"),
    ]  # fmt: skip


def test_a_batch_holds_conversations_of_one_category() -> None:
    both = arms()
    measure(both, CONVERSATIONS, BenchConfig(max_tokens=9, batch=8), room=100)
    assert [p for _, p, _ in both[0].llm.calls[::2]] == [[[3], [6]], [[3, 6, 5]], [[7]]]


def test_what_does_not_fit_is_left_out_with_what_follows_it() -> None:
    progress: list[int] = []
    both = arms()
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), 11, progress.append)
    assert result.skipped == ["a1 turn 2"]
    assert len(result.answers) == 6
    assert sum(progress) == 4
    three = [Conversation("a1", "a", ("one", "three", "four"))]
    assert measure(both, three, BenchConfig(max_tokens=9), 11).skipped == ["a1 turn 2"]


def test_numbers_of_a_scheme() -> None:
    both = arms()
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    lines = summarize(result, both)
    assert [line.category for line in lines] == ["a", "b", "all"]
    total = lines[-1]
    # Nine tokens: plain 8 gaps of 1 s; two a pass: 4 gaps of 1 s and 4 of 0 s.
    assert total.plain_speed == pytest.approx(1.0)
    assert total.speed == pytest.approx(2.0)
    assert total.speedup == pytest.approx(2.0)
    assert total.speedup_quartiles == pytest.approx((2.0, 2.0))
    assert total.tau == pytest.approx(9 / 5)
    assert total.acceptance == pytest.approx([0.8, 0.5, 0.0])
    assert (total.accepted, total.drafted) == ([32, 16, 0], [40, 40, 40])
    assert total.plain_itl == pytest.approx((1.0, 1.0))
    assert total.itl == pytest.approx((0.5, 1.0))
    assert total.itl_mean == pytest.approx(0.5)
    assert total.ttft == total.plain_ttft == 1.0
    assert (total.num_conversations, total.num_answers, total.num_identical) == (3, 4, 4)
    assert broken_promises(result, both) == []


def test_speedup_is_the_median_of_each_conversations_own_ratio() -> None:
    both = arms()
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    slower = {"a1": 4.0, "a2": 0.5, "b1": 1.0}
    result.answers = [
        replace(a, gaps=[gap * slower[a.id] for gap in a.gaps]) if a.arm == "fast" else a
        for a in result.answers
    ]
    total = summarize(result, both)[-1]
    assert total.speedup == pytest.approx(2.0)  # of 0.5, 4 and 2
    assert total.speedup_quartiles == pytest.approx((1.25, 3.0))


def test_acceptance_counts_only_drafts_that_were_long_enough() -> None:
    both = arms()
    result = measure(both, CONVERSATIONS[2:], BenchConfig(max_tokens=9), room=100)
    result.answers = [
        replace(a, drafted_by_position=[10, 2], accepted_by_position=[10, 2])
        if a.arm == "fast"
        else a
        for a in result.answers
    ]
    assert summarize(result, both)[0].acceptance == [1.0, 1.0]


def test_another_text_is_counted_and_reported_where_the_same_is_promised() -> None:
    both = arms(wrong=True)
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    assert summarize(result, both)[-1].num_identical == 0
    assert broken_promises(result, both)[0] == "a1 turn 1, fast: token 2 differs"
    lossy = [both[0], replace(both[1], same_text=False)]
    assert broken_promises(result, lossy) == []


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_interruption_keeps_whole_turns() -> None:
    both = arms(interrupt_after=5)
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    assert not result.complete
    assert [(a.id, a.turn, a.arm) for a in result.answers] == [
        ("a1", 1, "plain"), ("a1", 1, "fast"), ("a1", 2, "plain"), ("a1", 2, "fast"),
    ]  # fmt: skip
    assert summarize(result, both)[0].num_answers == 2


def test_a_failed_answer_ends_the_measurement() -> None:
    with pytest.raises(ValueError, match="a1, plain: NaN"):
        measure(arms(failed=True), CONVERSATIONS, BenchConfig(max_tokens=9), room=100)


@pytest.mark.parametrize(
    ("option", "says"),
    [({"batch": 0}, "batch=0"), ({"max_tokens": 1}, "max_tokens=1"), ({"temperature": -1}, "temp")],
)
def test_options_out_of_range_are_refused(option, says) -> None:
    with pytest.raises(ValueError, match=says):
        BenchConfig(**option)


# ---- reporting


def test_json_is_whole_or_absent(tmp_path, monkeypatch) -> None:
    both = arms()
    result = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    path = tmp_path / "out.json"
    write_json(path, result, {"bench": {"seed": 1}})
    before = path.read_text()
    data = json.loads(before)
    assert data["bench"] == {"seed": 1}
    assert data["complete"] is True
    assert data["answers"][1]["gaps"] == [0, 1, 0, 1, 0, 1, 0, 1]

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, result, {})
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/out\.json"):
        write_json(tmp_path / "file" / "out.json", result, {})


@contextmanager
def full_disk(size: int):
    """Files of this process cannot grow beyond ``size`` bytes: writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_what_was_there(tmp_path) -> None:
    result = measure(arms(), CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    path = tmp_path / "out.json"
    for before in (None, "old"):
        if before:
            path.write_text(before)
        with full_disk(100), pytest.raises(OSError, match=r"out\.json"):
            write_json(path, result, {})
        assert [p.read_text() for p in tmp_path.iterdir()] == [before] * bool(before)


def test_a_device_is_written_to_and_never_replaced(tmp_path) -> None:
    result = measure(arms(), CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "full", result, {})
    (tmp_path / "null").symlink_to("/dev/null")
    write_json(tmp_path / "null", result, {})
    assert {p.name: p.is_symlink() for p in tmp_path.iterdir()} == {"full": True, "null": True}


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path) -> None:
    for path, says in [(tmp_path, "a folder"), (tmp_path / "no" / "out.json", "no folder")]:
        with pytest.raises(ValueError, match=says):
            bench(json=path, engine=EngineConfig(model="./nowhere"))


def test_tables_and_histogram() -> None:
    both = arms()
    lines = summarize(measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100), both)
    speed, latency = markdown(lines).strip().split("\n\n")
    assert speed.count("\n") == latency.count("\n") == 4
    widths = {row.count("|") for row in speed.split("\n")}
    assert widths == {10}
    assert "| a | fast | 1.0 | 2.0 | 2.00x | 2.00-2.00 |" in speed
    assert "80 50 0" in latency
    wide = replace(
        lines[-1],
        category="math_reasoning",
        acceptance=[1.0] * 8,
        itl=(0.0123, 0.1234),
        ttft=12.345,
        plain_ttft=23.456,
    )
    console = Console(width=80, file=io.StringIO())
    for table in tables([*lines, wide]):
        console.print(table)
    printed = [row.rstrip() for row in console.file.getvalue().split("\n")]
    rows = [row for row in printed if "math_reasoning" in row]
    assert [row.split()[-1] for row in rows] == ["4/4", "23456"]
    assert "100 100 100 100 100    12.3/123.4  1000.0/1000.0  12345" in rows[1]
    for width in (40, 80):  # a file, or whatever is narrower than the table
        console = Console(width=width, file=io.StringIO())
        show_tables([*lines, wide], console)
        printed = console.file.getvalue()
        assert "…" not in printed
        assert "accepted by depth, %" in printed
        assert "100 100 100 100 100" in printed
        assert console.width == width
    drawn = histogram(lines, width=10).split("\n")
    assert drawn[0] == "fast: 40 drafts, τ 1.80"
    assert drawn[1] == "  depth  1 ████████    80%  (80% of arrivals)"
    assert drawn[2] == "  depth  2 ████        40%  (50% of arrivals)"
    assert len(drawn) == 4


def test_a_scheme_without_drafts_has_a_line() -> None:
    both = arms()
    both[1] = replace(both[1], speculate=False)
    lines = summarize(measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100), both)
    assert lines[0].acceptance == []
    assert lines[0].speedup == pytest.approx(1.0)
    assert "0 drafts" in histogram(lines)
    assert "| - |" in markdown(lines)


def test_percentiles() -> None:
    assert percentile([], 99) == 0
    assert percentile([3.0], 50) == 3
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4
