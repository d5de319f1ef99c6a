"""Conversations to token ids: which tokens are answers, what is dropped and why."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from foretell.cli import main
from foretell.files import alone
from foretell.models.chat_template import ChatTemplate
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.models.tokenizer import Tokenizer
from foretell.train.conversations import Dropped, encode_conversation, read_conversation
from foretell.train.files import read_lines
from tests.train import rig

# In the form of the models' own: roles in headers, texts trimmed or not, a system message where
# none is given, and an end-of-turn token with or without a line break behind it.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe of help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Qwen3 writes an empty thought into the last answer only: what it writes for the first messages is
# not the beginning of what it writes for all, though every answer starts where it is asked for.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL = [
    *("<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    "<|eot_id|>",
]


def tokenizer(template):
    """Bytes, and a few merges that reach across line breaks and spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), (":", "Ġ"), ("h", "e"), ("Ġ", "he")]
    words = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    inner = Inner(models.BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return Tokenizer(inner, "toy", ChatTemplate(template, {"bos_token": "<s>"}))


def said(*texts, system=None):
    roles = itertools.cycle(["user", "assistant"])
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": role, "content": text} for role, text in zip(roles, texts)]  # noqa: B905


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "QWEN3"])
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("count", range(1, 6))
def test_answers_and_their_ends_are_marked_and_nothing_else(name, system, count):
    mine = tokenizer(globals()[name])
    end = "<|eot_id|>" if name == "LLAMA3" else "<|im_end|>"
    messages = said("hi he", "\nhe <|im_start|>hi", "Grüße 🙂", " he", "\n\n", system=system)
    messages = messages[: count + bool(system)]
    sample = encode_conversation(messages, mine, {SPECIAL.index(end)})
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if name == "LLAMA3":
        answers = [text.strip() for text in answers]
    elif name == "QWEN3" and messages[-1]["role"] == "assistant":
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    marked = [mine.decode(sample.tokens[a:b], skip_special=False) for a, b in sample.spans]
    assert [text.lstrip("\n") for text in marked] == [t.lstrip("\n") + end for t in answers]
    asked = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for (start, _), i in zip(sample.spans, asked, strict=True):
        before = mine.apply_chat_template(messages[:i])
        assert mine.decode(sample.tokens[:start]).startswith(mine.decode(before))
    if messages[-1]["role"] == "assistant":
        assert sample.spans[-1][1] == len(sample.tokens)
    else:
        assert sample.tokens.tolist() == mine.apply_chat_template(messages)
    assert sample.num_wanted == sample.wanted.sum()


def test_a_token_across_the_border_is_the_prompts():
    mine = tokenizer(CHATML)
    sample = encode_conversation(said("a", "\nb"), mine, {2})
    ((start, end),) = sample.spans
    assert mine.decode(sample.tokens[start:end], skip_special=False) == "b<|im_end|>"
    assert mine.decode(sample.tokens[start - 1 : start]) == "\n\n"


def test_without_an_end_token_an_answer_ends_where_its_message_does():
    mine = tokenizer(PLAIN)
    sample = encode_conversation(said("a", "b", "c", "d"), mine, set())
    marked = [mine.decode(sample.tokens[a:b]) for a, b in sample.spans]
    assert marked == ["b\n", "d\n"]  # ": " is one token, and so the prompt's


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + CHATML,
        "{% if not add_generation_prompt %}x{% endif %}" + PLAIN,
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_what_is_before_is_refused(template):
    with pytest.raises(Dropped, match="not concatenative"):
        encode_conversation(said("a", "b", "c", "d"), tokenizer(template), set())


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"prompt": "a"}, "u"),
        ({"prompt": "a", "completion": "b"}, "ua"),
        ({"prompt": "a", "response": "b"}, "ua"),
        ({"prompt": said("a", system="s"), "completion": said("x", "b")[1:]}, "sua"),
        ({"turns": ["a", "b", "c"]}, "uauau"),
        ({"messages": said("a", "b", "c")}, "uau"),
        ({"messages": said("a", system="s")}, "su"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "ua",
        ),
    ],
)
def test_forms_of_conversations(row, roles):
    messages, waiting = read_conversation(row)
    assert "".join(message["role"][0] for message in messages) == roles
    assert [m["content"] for m in messages if m["role"] == "user"] == ["a", "b", "c"][
        : roles.count("u")
    ] or waiting is False
    assert waiting == ("turns" in row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not a JSON object"),
        ({"text": "a"}, "no prompt, prompt"),
        ({"prompt": " "}, "empty"),
        ({"prompt": "a", "response": "\n"}, "empty"),
        ({"messages": []}, "empty"),
        ({"turns": "a"}, "not a list"),
        ({"messages": [3]}, "not a JSON object"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "unknown speaker"),
        ({"messages": [{"role": "system", "content": "a"}]}, "nothing to answer"),
    ],
)
def test_rows_that_are_dropped(row, reason):
    with pytest.raises(Dropped, match=reason):
        read_conversation(row)


def test_answers_to_come_leave_an_empty_place_and_their_end(model, tmp_path):
    rig.prepared(model, tmp_path, [{"turns": ["ab", "cd"]}])
    (row,) = rig.read_rows(tmp_path / "samples.jsonl")
    mine = Tokenizer.load(resolve(model))
    text = mine.decode(row["tokens"], skip_special=False)
    assert text == "u ab</s>\na </s>\nu cd</s>\na "
    assert row["spans"] == [[len("u ab0\na "), len("u ab0\na ")]]


def test_what_is_dropped_is_counted_and_named(model, tmp_path):
    rows = [
        {"prompt": "abc", "source": "mine"},
        "{bad",
        "",
        {"prompt": "abc"},
        {"prompt": "a" * 40},
        {"prompt": "b", "response": "c" * 40},
        {"messages": [{"role": "user", "content": "x"}, {"content": "y"}]},
        '{"prompt": "\\ud83d"}',
    ]
    out = rig.prepared(model, tmp_path, rows, max_len=20)
    about = json.loads((tmp_path / "samples.json").read_text())
    assert {reason: row["rows"] for reason, row in about["dropped"].items()} == {
        "malformed JSON": 1,
        "seen before": 1,
        "longer than max_len": 1,
        "a message has no role": 1,
        "half of a character (a lone surrogate)": 1,
    }
    assert about["dropped"]["malformed JSON"]["first"] == ["given.jsonl:2"]
    kept = about["kept"]
    counts = {"texts": 2, "with_answers": 1, "tokens": 9 + 20, "wanted": 13, "cut": 1}
    assert {name: kept[name] for name in counts} == counts
    for word in ("7 rows read", "2 kept", "given.jsonl:2", "malformed JSON", "given.jsonl:6"):
        assert word in out.table()
    kept = rig.read_rows(tmp_path / "samples.jsonl")
    assert [row["source"] for row in kept] == ["mine", "given"]
    assert kept[1]["spans"] == [[7, 20]]


def test_a_question_is_never_cut_in_half(model, tmp_path):
    rig.prepared(model, tmp_path, [{"messages": said("a", "b", "c" * 30, "d")}], max_len=20)
    (row,) = rig.read_rows(tmp_path / "samples.jsonl")
    assert row["spans"] == [[7, 9]]
    assert len(row["tokens"]) == 9


def test_odd_rows_are_dropped_and_odd_sources_written(model, tmp_path):
    rows = [
        {"conversations": [{"from": ["human"], "value": "a"}]},
        '{"text": "abc\\udfffdef"}',
        "[" * 100_000,
        '{"prompt": "ok", "source": "\\ud800"}',
    ]
    out = rig.prepared(model, tmp_path, rows)
    assert {reason: len(places) for reason, places in out.dropped.items()} == {
        "unknown speaker": 1,
        "half of a character (a lone surrogate)": 1,
        "malformed JSON": 1,
    }
    assert rig.read_rows(tmp_path / "samples.jsonl")[0]["source"] == "?"


def test_half_of_a_character_is_a_mistake_of_the_callers(model):
    for text in ("a\ud800", "\udfff"):
        with pytest.raises(ValueError, match="half of a character"):
            Tokenizer.load(resolve(model)).encode(text)


def test_two_at_once_do_not_mix_their_files(model, tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="another process writes there"):
        rig.prepared(model, tmp_path, [{"prompt": "ok"}])
    rig.prepared(model, tmp_path, [{"prompt": "ok"}])


def test_limit_and_nothing_kept(model, tmp_path):
    assert len(rig.prepared(model, tmp_path, [{"prompt": c} for c in "abc"], limit=2).samples) == 2
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match="not one row could be kept: 1 rows read; 1 dropped, malformed"
    ):
        rig.prepared(model, tmp_path, ["{"])
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_full_disk_is_one_line_and_leaves_what_was_there(model, tmp_path, capsys):
    rig.prepared(model, tmp_path, [{"prompt": "abc"}])
    before = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / f".samples.jsonl.{os.getpid()}.part").symlink_to("/dev/full")
    given = rig.write_rows(tmp_path / "more.jsonl", [{"prompt": "x"}])
    status = main(["train", "prepare", f"--model={model}", f"--run={tmp_path}", str(given)])
    assert status == 2
    said = capsys.readouterr().err
    assert said == f"foretell: {tmp_path / 'samples.jsonl'}: No space left on device\n"
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_the_command(model, tmp_path, capsys):
    given = rig.write_rows(tmp_path / "more.jsonl", [{"prompt": "x"}, "{"])
    run = tmp_path / "a" / "run"
    assert main(["train", "prepare", f"--model={model}", f"--run={run}", str(given)]) == 0
    assert "1 dropped, malformed JSON: more.jsonl:2" in capsys.readouterr().out
    assert len(list(read_lines(run / "samples.jsonl"))) == 1
    assert main(["train", "prepare", f"--run={run}", f"{tmp_path}/none"]) == 2
    assert main(["train", "prepare", f"--run={run}", "--max-len=1", str(given)]) == 2
    assert main(["train"]) == 0
    assert "regenerate" in capsys.readouterr().out
    assert main(["train", "nonsense"]) == 2


@pytest.mark.slow
def test_the_real_template():
    path = resolve("smollm2")
    mine, (_, config) = Tokenizer.load(path), open_source(path)
    messages = said("Hi", "Hello!\n", "And?", "\nBye 🙂.")
    sample = encode_conversation(messages, mine, config.eos_token_ids)
    marked = [mine.decode(sample.tokens[a:b], skip_special=False) for a, b in sample.spans]
    assert marked == ["Hello!\n<|im_end|>", "\nBye 🙂.<|im_end|>"]
    for (start, _), i in zip(sample.spans, (1, 3), strict=True):
        assert sample.tokens[:start].tolist() == mine.apply_chat_template(messages[:i])
