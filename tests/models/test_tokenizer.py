"""Vocabularies that go together or do not (M1); tokenizers are transformers', and are kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from foretell.models.tokenizer import Tokenizer, check_same_vocabulary

WORDS = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}


class Vocabulary:
    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


def tokenizer(**changes: int) -> Tokenizer:
    return Tokenizer(Vocabulary({**WORDS, **changes}), "toy")


def test_equal_and_padded_vocabularies_pass():
    check_same_vocabulary(tokenizer(), tokenizer())
    padding = {f"[PAD{i}]": i for i in range(5, 133)}
    check_same_vocabulary(tokenizer(), tokenizer(**padding))
    check_same_vocabulary(tokenizer(**padding), tokenizer())


@pytest.mark.parametrize(
    ("other", "index"),
    [(tokenizer(b=4, c=3), 3), (tokenizer(d=5), 5), (Tokenizer(Vocabulary({"x": 0}), "x"), 0)],
)
def test_other_maps_are_refused_by_their_first_difference(other, index):
    for pair in ((tokenizer(), other), (other, tokenizer())):
        with pytest.raises(ValueError, match=f"id {index} is"):
            check_same_vocabulary(*pair)


def test_a_directory_without_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


# ---- against transformers

CHAT = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "  Grüße, 漢字 🙂\n"},
    {"role": "assistant", "content": "no", "tool_calls": [{"name": "f", "arguments": {"a": [1]}}]},
    {"role": "user", "content": "</s> is text?"},
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks": """{%- if tools %}tools{% endif -%}
    {% set ns = namespace(first=true) %}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
        {% if not ns.first %}|{% endif %}{% set ns.first = false %}
  {{ m.content }}
    {% endfor %}
""",
    "json": "{% for m in messages %}{{ m | tojson }}{{ (m.tool_calls or 'ü<') | tojson(indent=2) }}"
    "{% endfor %}{{ dict(a=1) }}{{ documents is none }}{{ nothing is defined }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{% endgeneration %}{{ x }}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{% endfor %}{{ strftime_now('%Y') | length }}",
}


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer with a begin-of-text token, padding and truncation left on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(path, **changes) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes))


def kept(path):
    return path / ".foretell" / "model.tokenizer.json"


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_transformers_renders_them(name, directory):
    from transformers import AutoTokenizer

    write_config(directory, chat_template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(directory))
    ours = Tokenizer.load(directory)
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.template.render(CHAT) == text
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(CHAT) == ids
    assert len(ids) > 9


def test_texts_are_encoded_as_transformers_encodes_them(directory):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(directory))
    for turn in range(2):  # converted, then kept
        ours = Tokenizer.load(directory)
        assert kept(directory).exists(), turn
        assert not ours.has_chat_template
        assert ours.inner.get_vocab() == theirs.get_vocab()
        for text in ("", "a", " a  bcdefghijkl </s> m", "Grüße, 漢字 🙂"):
            for special in (True, False):
                ids = theirs(text, add_special_tokens=special)["input_ids"]
                assert ours.encode(text, special) == ids
                for skip in (True, False):
                    assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_template_that_refuses_is_one_line(directory):
    write_config(directory, chat_template="{{ raise_exception('not\nthis') }}")
    with pytest.raises(ValueError, match="template refuses these messages: not"):
        Tokenizer.load(directory).apply_chat_template(CHAT)
    write_config(directory, chat_template="{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="template refuses"):
        Tokenizer.load(directory).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (["hi"], "must be a dict such as"),
        ([{"content": "x"}], "has no role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "content must be a text"),
        ([{"role": "user", "content": "x", "more": {1, 2}}], "set"),
    ],
)
def test_malformed_messages(messages, says, directory):
    write_config(directory, chat_template=TEMPLATES["plain"])
    with pytest.raises(ValueError, match=says):
        Tokenizer.load(directory).apply_chat_template(messages)


# ---- the kept file


def test_the_second_start_needs_no_transformers(directory):
    Tokenizer.load(directory)
    code = (
        "import sys; from pathlib import Path; from foretell.models.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(directory)!r}));"
        "sys.exit(str([m for m in ('transformers', 'gguf', 'torch') if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("cut", [0, 1, 30, 300, -1])
def test_a_damaged_kept_file_is_made_anew(cut, directory):
    expected = Tokenizer.load(directory).encode("abc")
    whole = kept(directory).read_bytes()
    flipped = bytearray(whole)
    flipped[cut] ^= 1
    for damaged in (whole[:cut], bytes(flipped), b"{}\n{}", b"[]"):
        kept(directory).write_bytes(damaged)
        assert Tokenizer.load(directory).encode("abc") == expected
        assert kept(directory).read_bytes() == whole


def test_what_has_changed_is_converted_anew(directory):
    Tokenizer.load(directory)
    write_config(directory, chat_template="new")
    assert Tokenizer.load(directory).template.source == "new"
    (directory / "chat_template.jinja").write_text("newer")
    assert Tokenizer.load(directory).template.source == "newer"


def test_a_place_that_cannot_be_written_to(directory, monkeypatch):
    (directory / ".foretell").write_text("in the way")
    assert Tokenizer.load(directory).decode(Tokenizer.load(directory).encode("a")) == "a"
    (directory / ".foretell").unlink()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    Tokenizer.load(directory)
    assert list((directory / ".foretell").iterdir()) == []
