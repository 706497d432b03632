"""Streamed text is the decoded text, never half a character; stop strings cut exactly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """As Llama 2's: a word carries the space before it, the first space is dropped, unknown characters are bytes."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "é"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)


def fallback_ids(tokenizer, *parts):
    """Words of the vocabulary as they are, anything else byte by byte."""
    vocab = tokenizer.get_vocab()
    names = [[part] if part in vocab else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [vocab[name] for tokens in names for name in tokens]


def test_words_that_carry_their_space_and_characters_of_several_byte_tokens(fallback_tokenizer):
    ids = fallback_ids(fallback_tokenizer, "▁the", "▁cat", "s", "▁", "🦑", "🚀", "▁", "▁the", "é", "世")
    detokenizer = Detokenizer(fallback_tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == fallback_tokenizer.decode(ids) == "the cats 🦑🚀  theé世"
    assert pieces[:3] == ["the", " cat", "s"] and pieces[4:12] == ["", "", "", "🦑", "", "", "", "🚀"]


def test_bytes_that_never_become_a_character_do_not_stop_an_answer(fallback_tokenizer):
    """This decoder then takes back the whole characters before them, which have long been shown."""
    ids = fallback_ids(fallback_tokenizer, "▁the", "🦑", "🚀")[:-2] + fallback_ids(fallback_tokenizer, "▁cat")
    detokenizer = Detokenizer(fallback_tokenizer)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == detokenizer.text and text.startswith("the🦑\ufffd") and text.endswith("\ufffd cat")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 279), max_size=20))
def test_any_tokens_read_as_the_tokenizer_decodes_them(byte_tokenizer, ids):
    detokenizer = Detokenizer(byte_tokenizer)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == byte_tokenizer.decode(ids, skip_special_tokens=True)


class CountingTokenizer:
    def __init__(self, tokenizer):
        self.tokenizer, self.longest = tokenizer, 0

    def decode(self, ids, **options):
        self.longest = max(self.longest, len(ids))
        return self.tokenizer.decode(ids, **options)


def test_a_long_answer_is_never_decoded_again_from_its_beginning(byte_tokenizer):
    counting = CountingTokenizer(byte_tokenizer)
    detokenizer = Detokenizer(counting)
    for token in byte_tokenizer("plain words only 🚀 " * 30).input_ids:
        detokenizer.add(token)
    detokenizer.finish()
    assert 2 <= counting.longest <= 5


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_models_tokenizer_streams_whole_characters(demo_model_dir, text):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer(text).input_ids]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) == text


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
    # The first piece that completes a stop string ends the text, which is cut where the first such string begins.
    so_far = next((text[:end] for end in places if any(stop in text[:end] for stop in stops)), None)
    if so_far is None:
        assert matched is None and "".join(shown) + rest == text
    else:
        assert matched in stops
        assert "".join(shown) == so_far[: min(so_far.find(stop) for stop in stops if stop in so_far)]
        assert so_far.startswith("".join(shown) + matched)
