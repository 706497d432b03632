"""Streamed text is the decoded text, never half a character; stop strings cut exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medusa.infer.detokenize import Detokenizer, StopMatcher

TEXTS = ["Grüße, 世界! 🦑🚀", "naïve café — “quotes”", "plain words only", "한국어 और हिन्दी", "👩‍👩‍👧‍👦 family"]


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level BPE with hardly any merges, so that most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(["plain words only", "café"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_together_the_text(byte_tokenizer, text):
    ids = byte_tokenizer(text).input_ids
    assert len(ids) > len(text) or text.isascii()
    detokenizer = Detokenizer(byte_tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == text
    assert not text.isascii() or all(pieces)


def test_special_tokens_are_not_text(byte_tokenizer):
    ids = [*byte_tokenizer("café").input_ids, byte_tokenizer.eos_token_id]
    detokenizer = Detokenizer(byte_tokenizer)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == "café"


def test_an_unfinished_character_is_held_back_until_the_end(byte_tokenizer):
    ids = byte_tokenizer("a🚀").input_ids[:-1]
    detokenizer = Detokenizer(byte_tokenizer)
    assert "".join(map(detokenizer.add, ids)) == "a"
    assert detokenizer.finish() == byte_tokenizer.decode(ids)[1:] and "\ufffd" in byte_tokenizer.decode(ids)


class SlowTokenizer:
    """Only decodes, as tokenizers written in Python do."""

    def __init__(self, fast):
        self.fast = fast

    def decode(self, ids, **options):
        return self.fast.decode(ids, **options)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizers_without_a_fast_core_stream_the_same(byte_tokenizer, text):
    detokenizer = Detokenizer(SlowTokenizer(byte_tokenizer))
    pieces = [detokenizer.add(token) for token in byte_tokenizer(text).input_ids]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) + detokenizer.finish() == text


def feed(stops, pieces):
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    return shown, matcher.matched, matcher.flush() if matcher.matched is None else ""


def test_a_stop_string_across_pieces_is_never_shown():
    shown, matched, _ = feed(["<END>"], ["one <", "EN", "D> two", "three"])
    assert shown == ["one ", "", "", ""] and matched == "<END>"


def test_what_only_begins_a_stop_string_is_shown_in_the_end():
    shown, matched, rest = feed(["<END>"], ["one <", "EN"])
    assert shown == ["one ", ""] and matched is None and rest == "<EN"
    assert feed(["<END>"], ["one <", "x"])[0] == ["one ", "<x"]


def test_the_first_of_several_stop_strings_cuts():
    assert feed(["b", "abc"], ["xxabcx"])[:2] == (["xx"], "abc")
    assert feed([], ["anything"])[0] == ["anything"]


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_cuts_where_the_first_stop_string_begins_however_the_text_is_split(text, stops, places):
    places = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    shown, matched, rest = feed(stops, pieces)
    # The stop string that is complete first ends the text; where it begins is where it is cut.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert matched is None and "".join(shown) + rest == text
    else:
        assert matched in stops
        assert text.startswith("".join(shown) + matched)
