"""Text grows without broken characters and stops where tokens coming singly would have stopped."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.engine.detokenize import Detokenizer


class Bytes:
    """A tokenizer with a token for each byte."""

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def feed(text: str, prompt: str = "", **options) -> tuple[Detokenizer, list[str], int]:
    detokenizer = Detokenizer(Bytes(), list(prompt.encode()), **options)
    shown: list[str] = []
    data = text.encode()
    for count, byte in enumerate(data, 1):
        stopped = detokenizer.push(byte)
        shown.append(detokenizer.text[: detokenizer.certain])
        if stopped:
            return detokenizer, shown, count
    detokenizer.finish()
    shown.append(detokenizer.text[: detokenizer.certain])
    return detokenizer, shown, len(data)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=8))
def test_text_is_whole_and_no_piece_holds_a_broken_character(text, prompt):
    detokenizer, shown, _ = feed(text, prompt)
    assert detokenizer.text == text
    assert all(text.startswith(piece) for piece in shown)


def test_a_character_cut_by_the_end_is_flushed():
    detokenizer = Detokenizer(Bytes(), [])
    for byte in "é".encode()[:1]:
        detokenizer.push(byte)
    assert detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abé🙂", max_size=30),
    st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=3),
)
def test_stops_at_the_match_that_ends_first(text, stops):
    detokenizer, shown, used = feed(text, stop=stops)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if ends:
        end, start = min(ends)
        assert detokenizer.text == text[:start]
        assert used == len(text[:end].encode())
    else:
        assert detokenizer.text == text
    assert all(detokenizer.text.startswith(piece) for piece in shown)  # nothing to take back


def test_a_stop_string_half_in_the_prompt_does_not_count():
    detokenizer, _, _ = feed("Db", prompt="EN", stop=["END"])
    assert detokenizer.text == "Db"


def test_min_tokens_shields_from_stop_strings():
    detokenizer, _, used = feed("abab", stop=["ab"], skip_stop_until=2)
    assert detokenizer.text == "ab"
    assert used == 4


def test_streams_are_the_same_for_any_chunking():
    text = "nä🙂 END no" * 3
    rng = random.Random(1)
    for _ in range(50):
        detokenizer = Detokenizer(Bytes(), [], ["END"])
        out, position, data = "", 0, text.encode()
        while position < len(data) and not detokenizer.stopped:
            for byte in data[position : position + rng.randrange(1, 7)]:
                if detokenizer.push(byte):
                    break
            position += 7 if detokenizer.stopped else 0
            position = min(position, len(data)) if detokenizer.stopped else detokenizer.num_tokens
            out += detokenizer.text[len(out) : detokenizer.certain]
        assert out == "nä🙂 "
