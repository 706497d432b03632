"""Loss masks, checked by decoding what is under loss, on templates of many families and tokenizers of several kinds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from medusa.train.chat_mask import ConversationEncoder, encode_conversation
from medusa.train.chat_turns import MARKER, MaskError

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
]

CHATML = (  # SmolLM2's: a default system turn, nothing trimmed
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (  # no generation prompt, content stripped, a space before and behind the answer, bos and eos by turn
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{% if loop.first and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (  # thinking of turns before the last question is dropped; that of the others is rewritten
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role != 'assistant' %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% else %}{% set content = message.content %}{% set thinking = '' %}{% if '</think>' in content %}"
    "{% set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{ '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}"
    "{% endif %}{{ content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (  # the block holds the end token and the newline behind it
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION_CONTENT = GENERATION.replace(
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
NO_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt")]  # the header comes with the answer only
NO_END = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endfor %}"
EOS_AT_THE_END = NO_END + "{% if messages[-1]['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
HARMONY = (  # the last answer ends in another token than earlier ones
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
COUNTING = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + (m['content'] | length | string) }}{% endfor %}"
TWICE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' / ' + m['content'] + eos_token }}{% endfor %}"

TEXTS = ["Say hi", "hello there, how are you?", "system user assistant model INST think", "The answer is 42.\n\n"]


def conversation(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


@cache
def make_tokenizer(template: str | None, kind: str = "bytes", eos: str = "<|im_end|>") -> Any:
    """`kind`: "bytes" (GPT-2's), "trimmed" (offsets without spaces, as in Llama 3) or "spaces" (as in Llama 2)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "spaces", unk_token="<s>" if kind == "spaces" else None))
    alphabet = []
    if kind == "spaces":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if kind == "trimmed":
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        name_or_path="org/a-chat-model",
    )


def under_loss(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """Decoded runs of tokens under loss; checks that ids are the template's text, masked in part."""
    ids, mask = encode_conversation(tokenizer, messages)
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool and ids.shape == mask.shape
    assert tokenizer.decode(ids) == tokenizer.decode(
        tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    )
    assert 0 < mask.sum() < len(mask)
    runs: list[list[int]] = []
    for position in torch.nonzero(mask).flatten().tolist():
        if not (position and mask[position - 1]):
            runs.append([])
        runs[-1].append(int(ids[position]))
    return [tokenizer.decode(run) for run in runs]


REPEATED = conversation("Say hi", "Say hi", "hi", "assistant\nSay hi")

CASES = {
    "chatml": (CHATML, "bytes", "<|im_end|>", ["Say hi<|im_end|>", "assistant\nSay hi<|im_end|>"]),
    "llama 2, spaces": (LLAMA2, "spaces", "</s>", [" Say hi", "</s>", " assistant\nSay hi", "</s>"]),
    "llama 2, bytes": (LLAMA2, "bytes", "</s>", [" Say hi", "</s>", " assistant\nSay hi", "</s>"]),
    "llama 3": (LLAMA3, "trimmed", "<|eot_id|>", ["Say hi<|eot_id|>", "assistant\nSay hi<|eot_id|>"]),
    "gemma": (GEMMA, "bytes", "</s>", ["Say hi<end_of_turn>", "assistant\nSay hi<end_of_turn>"]),
    "qwen 3": (QWEN3, "bytes", "<|im_end|>", ["Say hi<|im_end|>", "assistant\nSay hi<|im_end|>"]),
    "generation": (GENERATION, "bytes", "<|im_end|>", ["Say hi<|im_end|>", "assistant\nSay hi<|im_end|>"]),
    "generation content": (GENERATION_CONTENT, "bytes", "</s>", ["Say hi<|im_end|>", "assistant\nSay hi<|im_end|>"]),
    "no generation prompt": (NO_PROMPT, "bytes", "</s>", ["Say hi<|im_end|>", "assistant\nSay hi<|im_end|>"]),
    "no end token": (NO_END, "bytes", "</s>", ["Say hi", "assistant\nSay hi"]),
}


@pytest.mark.parametrize("case", CASES)
def test_several_turns_with_repeated_text(case):
    template, kind, eos, expected = CASES[case]
    assert under_loss(make_tokenizer(template, kind, eos), REPEATED) == expected


def test_system_turn_and_trailing_question_are_not_under_loss():
    messages = [*conversation("Say hi", "hi", system="hi"), {"role": "user", "content": "hi"}]
    for template in (CHATML, QWEN3, GENERATION):
        assert under_loss(make_tokenizer(template), messages) == ["hi<|im_end|>"]


def test_llama_2_system_turn_is_folded_into_the_question():
    messages = conversation("Say hi", "hi", "Next", "42.", system="hi")
    assert under_loss(make_tokenizer(LLAMA2, "spaces", "</s>"), messages) == [" hi", "</s>", " 42.", "</s>"]


@pytest.mark.parametrize(("template", "kind"), [(LLAMA3, "trimmed"), (GEMMA, "bytes")])
def test_templates_that_strip_an_answer(template, kind):
    runs = under_loss(make_tokenizer(template, kind), conversation("Say hi", "\n  hi \n", "hi", " 42. "))
    assert [run.split("<")[0] for run in runs] == ["hi", "42."]


def test_thinking_dropped_from_earlier_turns_and_rewritten_in_the_last():
    messages = conversation("Say hi", "<think>user?</think>\nhi", "Next", "<think>\nhi?</think>42.")
    runs = under_loss(make_tokenizer(QWEN3), messages)
    assert runs == ["hi<|im_end|>", "<think>\nhi?\n</think>\n\n42.<|im_end|>"]


def test_thinking_that_only_the_template_writes_is_not_the_answer():
    messages = conversation("Say hi", "hi", "Next", "42.")
    assert "<think>\n\n</think>\n\n42." in make_tokenizer(QWEN3).apply_chat_template(messages, tokenize=False)
    assert under_loss(make_tokenizer(QWEN3), messages) == ["hi<|im_end|>", "42.<|im_end|>"]


@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
@pytest.mark.parametrize("answer", ["\n\nhi", " hi ", "hi\n", "\n", "é😀", "<|im_end|>", "hi <|im_end|> there"])
def test_answers_whose_edges_are_spaces_special_tokens_or_split_characters(answer, kind):
    tokenizer = make_tokenizer(CHATML, kind)
    assert under_loss(tokenizer, conversation("Say hi", answer)) == [answer + "<|im_end|>"]


def test_an_edge_inside_a_token_is_cut_as_inference_would():
    tokenizer = make_tokenizer(CHATML)
    merged = tokenizer.backend_tokenizer.token_to_id("ĊĊ")
    assert merged is not None, "the trained vocabulary should hold two newlines as one token"
    messages = conversation("Say hi", "\n\nhi")
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert merged in tokenizer(rendered, add_special_tokens=False)["input_ids"]
    ids, mask = encode_conversation(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert ids[: int(mask.int().argmax())].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_an_edge_inside_a_token_is_refused_where_pieces_would_gain_spaces():
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}", "spaces", "</s>"
    )
    with pytest.raises(MaskError, match="share a token of org/a-chat-model with the template"):
        encode_conversation(tokenizer, conversation("Say hi", "hi", "hi", "s are assistants hi"))


UNMASKABLE = {
    "counts characters": (COUNTING, "behind an answer depends on the answer"),
    "writes answers twice": (TWICE, "writes an answer 2 times"),
    "other end for the last": (HARMONY, "how it ends an answer depends on what follows"),
    "eos only at the very end": (EOS_AT_THE_END, "how it ends an answer depends on what follows"),
    "block missing": (
        GENERATION.replace("{% if message['role'] == 'assistant' %}", "{% if loop.last %}"),
        "generation",
    ),
}


@pytest.mark.parametrize("case", UNMASKABLE)
def test_templates_that_cannot_be_masked_are_refused_by_name(case):
    template, why = UNMASKABLE[case]
    with pytest.raises(MaskError, match=why) as error:
        encode_conversation(make_tokenizer(template, "bytes", "</s>"), REPEATED)
    message = str(error.value)
    assert "org/a-chat-model" in message and "{% generation %}" in message and "prompt_ids" in message
    assert "\n" not in message


def test_thinking_cannot_be_told_from_the_header_without_a_generation_prompt():
    no_prompt = QWEN3[: QWEN3.index("{% if add_generation_prompt")]
    assert under_loss(make_tokenizer(no_prompt), conversation("Say hi", "hi")) == ["hi<|im_end|>"]
    with pytest.raises(MaskError, match="before an answer depends on the answer"):
        encode_conversation(make_tokenizer(no_prompt), conversation("Say hi", "<think>hi?</think>hi"))


def test_a_last_turn_that_ends_otherwise_but_without_a_token_is_masked():
    template = NO_END.replace("{% endfor %}", "{{ '--' if loop.last else '\n' }}{% endfor %}")
    assert under_loss(make_tokenizer(template, "bytes", "</s>"), REPEATED) == ["Say hi", "assistant\nSay hi"]


def test_other_end_for_the_last_is_exact_in_single_turns():
    assert under_loss(make_tokenizer(HARMONY, "bytes", "<|return|>"), conversation("Say hi", "hi")) == ["hi<|return|>"]


def test_conversations_that_the_template_refuses_say_why():
    with pytest.raises(MaskError, match="a-chat-model refuses .System role not supported"):
        encode_conversation(make_tokenizer(GEMMA), conversation("Say hi", "hi", system="hi"))


def test_no_template_no_offsets_and_the_marker_itself():
    with pytest.raises(MaskError, match="org/a-chat-model: got no chat template.* prompt_ids"):
        ConversationEncoder(make_tokenizer(None))
    with pytest.raises(MaskError, match="without character offsets"):
        ConversationEncoder(object())
    with pytest.raises(MaskError, match="expected ordinary text"):
        encode_conversation(make_tokenizer(CHATML), conversation("Say hi", MARKER))


def test_a_batch_holds_its_errors_in_place_and_leaves_the_tokenizer_alone():
    tokenizer = make_tokenizer(GEMMA, "trimmed")
    before = tokenizer.backend_tokenizer.to_str()
    good, bad = conversation("Say hi", "hi"), conversation("Say hi", "hi", system="hi")
    results = ConversationEncoder(tokenizer).encode_batch([good, bad, REPEATED])
    assert [isinstance(result, MaskError) for result in results] == [False, True, False]
    for result, messages in ((results[0], good), (results[2], REPEATED)):
        ids, mask = encode_conversation(tokenizer, messages)
        assert torch.equal(result.input_ids, ids) and torch.equal(result.loss_mask, mask)
    assert tokenizer.backend_tokenizer.to_str() == before
