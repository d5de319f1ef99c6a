"""Vocabularies that go together and that do not (M1), and the default model's tokenizer."""

from __future__ import annotations

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
