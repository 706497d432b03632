"""A tiny model behind the real server, on loopback, in a thread of the test's own process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa.base_model import BaseModel, adapt_base_model
from medusa.config import HeadsConfig
from medusa.heads import MedusaHeads
from medusa.model import MedusaModel
from medusa.tree import DraftTree
from tiny_models import tiny_model

VOCAB_SIZE = 272
CONTEXT = 512
EOS = 2
KEY = "a-key-that-is-long-enough"

# Shows tools and calls, as Qwen's templates do.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call></tool_call>"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}LOUD {% endif %}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Byte-level, as real vocabularies are: 0 pad, 1 <|im_start|>, 2 <|im_end|> (ends a turn), then every byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


class LookupModel(MedusaModel):
    """Drafts repetitions, too, so that a random model's drafts are accepted."""

    def drafter(self, **options: Any) -> Any:
        return super().drafter(tree="dynamic", lookup=True, budget=8)


def served_model(chat_template: str | None = CHAT_TEMPLATE, *, std: float = 0.3) -> LookupModel:
    """Llama, 2 layers, D=32, V=272, context of 512 tokens, with three random heads."""
    base = adapt_base_model(
        tiny_model("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, std=std),
        byte_tokenizer(chat_template),
        name="somewhere/tiny",
    )
    base.__dict__["eos_token_ids"] = frozenset([EOS])
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=VOCAB_SIZE))
    heads.attach_base(base.lm_head_weight, base.embedding_weight)
    return LookupModel(base, heads, DraftTree.cartesian([3, 2, 1]))


def with_template(model: LookupModel, template: str | None) -> LookupModel:
    """The same weights with another chat template."""
    base: BaseModel = dataclasses.replace(model.base, tokenizer=byte_tokenizer(template))
    base.__dict__["eos_token_ids"] = model.base.eos_token_ids
    return dataclasses.replace(model, base=base)


@dataclasses.dataclass
class Served:
    """A server that answers. context: what its routes share."""

    model: LookupModel
    context: Any
    server: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60, **options)

    def http(self, **options: Any) -> Any:
        import httpx

        return httpx.Client(base_url=self.url, timeout=60, **options)

    def wait_idle(self, seconds: float = 30) -> Any:
        """The engine's load once nothing runs or waits."""
        end = time.monotonic() + seconds
        while (load := self.context.service.load()).num_running or load.num_waiting:
            assert time.monotonic() < end, f"still busy: {load}"
            time.sleep(0.005)
        return load


@contextmanager
def serving(model: LookupModel, keys: Any = None, *, app_options: Any = None, **options: Any) -> Iterator[Served]:
    """options: `ServeOptions`'; the port is any free one."""
    from medusa.infer.server.app import create_app
    from medusa.infer.server.auth import ApiKeys
    from medusa.infer.server.run import ServeOptions, make_context, make_server

    settings = ServeOptions(**{"model_name": "tiny", "port": 0, "max_rows": 4, "drain_timeout_s": 5} | options)
    context = make_context(model, settings)
    app = create_app(context, keys or ApiKeys(), **(app_options or {}))
    server = make_server(context, app, settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(model, context, server, port)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
