"""vLLM without heads, with its built-in Medusa and with our drafter class: tokens, and acceptance next to ours.

    python scripts/compare_vllm.py --heads HEADS [--export EXPORT] --python VLLM_PYTHON --out results/vllm.json

Greedy, one request at a time and, for the tokens only, eight at once. Exit status 1 where tokens differ from vLLM's own
without heads or the share of accepted drafts at a position is more than 1% off ours. `scripts/test_vllm.sh` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

from medusa.heads_drafter import StaticTreeDrafter
from medusa.infer.decode import DecodeState, decode_step, prefill
from medusa.infer.generation import encode_prompt
from medusa.infer.machine import describe_machine
from medusa.infer.prompts import read_prompts
from medusa.model import MedusaModel
from medusa.tree import DraftTree

TOLERANCE = 0.01
START_SECONDS = 600
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument(
        "--export",
        type=Path,
        help="the same heads as `medusa export --to vllm` writes; without, only our drafter class",
    )
    parser.add_argument("--python", required=True, help="of the environment with vLLM and this package")
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = MedusaModel.from_pretrained(options.heads)
    records = read_prompts(options.prompts, limit=options.num_prompts)
    prompts = [encode_prompt(model.base.tokenizer, record.turns[0]) for record in records]
    ours, tokens = our_chain(model, prompts, options.max_new_tokens)
    num_heads = model.heads.config.num_heads
    custom = {"method": "custom_class", "model": "medusa.interop.vllm.MedusaProposer",
              "num_speculative_tokens": num_heads}  # fmt: skip
    heads = {"medusa_heads": str(options.heads.resolve())}
    ways = {"custom_class": ["--speculative-config", json.dumps(custom), "--additional-config", json.dumps(heads)]}
    if options.export:
        built_in = {"method": "medusa", "model": str(options.export.resolve()), "num_speculative_tokens": num_heads}
        ways["medusa"] = ["--speculative-config", json.dumps(built_in)]
    report: dict[str, Any] = {
        "machine": describe_machine() | {"vllm": vllm_version(options.python)},
        "heads": model.heads.config.to_dict(), "num_prompts": len(prompts), "max_new_tokens": options.max_new_tokens,
        "ours": ours, "vllm": {},
    }  # fmt: skip
    base = model.base.name
    plain = ask(options, base, prompts, [])
    report["ours"]["num_answers_as_vllm"] = sum(a == b for a, b in zip(tokens, plain["tokens"], strict=True))
    for name, arguments in ways.items():
        report["vllm"][name] = compare(ask(options, base, prompts, arguments), plain, ours)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return int(not all(result["passed"] for result in report["vllm"].values()))


def vllm_version(python: str) -> str:
    code = (
        "from importlib.metadata import version, packages_distributions as owners; print(version(owners()['vllm'][0]))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@torch.inference_mode()
def our_chain(model: MedusaModel, prompts: list[list[int]], limit: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Shares of steps that kept a draft at each position, counted as vLLM does, whole steps; and the answers."""
    drafter = StaticTreeDrafter(model.heads, DraftTree.chain(model.heads.config.num_heads))
    num_steps, accepted, answers = 0, [0] * model.heads.config.num_heads, []
    for prompt in prompts:
        state = DecodeState.empty(model.base, drafter, max_rows=1, capacity=len(prompt) + limit + 16)
        prefill(model.base, state, prompt)
        answer = [int(state.root[0])]
        while len(answer) < limit and answer[-1] not in model.base.eos_token_ids:
            step = decode_step(model.base, state)
            num_steps += 1
            kept = int(step.counts[0])
            for position in range(kept - 1):
                accepted[position] += 1
            for token in step.tokens[0, :kept].tolist():
                if answer[-1] not in model.base.eos_token_ids:
                    answer.append(token)
        answers.append(answer[:limit])
    return {"num_drafts": num_steps, "acceptance_by_position": [count / num_steps for count in accepted]}, answers


def compare(result: dict[str, Any], plain: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    identical = sum(a == b for a, b in zip(result["tokens"], plain["tokens"], strict=True))
    together = sum(a == b for a, b in zip(result["together"], plain["tokens"], strict=True))
    shares = [count / result["num_drafts"] for count in result["accepted"]]
    batched = [count / result["num_drafts_batched"] for count in result["accepted_batched"]]
    differences = [abs(a - b) for a, b in zip(shares, ours["acceptance_by_position"], strict=True)]
    return {
        "num_identical": identical, "num_identical_batched": together, "num_drafts": result["num_drafts"],
        "acceptance_by_position": shares, "acceptance_by_position_batched": batched,
        "largest_difference": max(differences),
        "passed": identical == len(plain["tokens"]) and max(differences) <= TOLERANCE,
    }  # fmt: skip


def ask(options: argparse.Namespace, base: str, prompts: list[list[int]], arguments: Sequence[str]) -> dict[str, Any]:
    """Tokens of each prompt, alone and all together, and the drafting counters of the former."""
    with server(options.python, base, arguments, options.out.with_suffix(".log")) as url:
        tokens = [complete(url, prompt, options.max_new_tokens) for prompt in prompts]
        num_drafts, accepted = counters(url)
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda prompt: complete(url, prompt, options.max_new_tokens), prompts))
        drafts_in_all, accepted_in_all = counters(url)
    batched = [a - b for a, b in zip(accepted_in_all, accepted, strict=True)]
    return {
        "tokens": tokens, "num_drafts": num_drafts, "accepted": accepted,
        "together": together, "num_drafts_batched": drafts_in_all - num_drafts, "accepted_batched": batched,
    }  # fmt: skip


@contextmanager
def server(python: str, base: str, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """A vLLM server on a free port, up when its URL is given, ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", base, "--port", str(port),
               "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
               "--max-num-seqs", "8", "--served-model-name", "base", *arguments]  # fmt: skip
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}: {log.read_text()[-3000:]}")
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(2)
    raise RuntimeError(f"vLLM was not up after {START_SECONDS} s: {log.read_text()[-3000:]}")


def complete(url: str, prompt: list[int], max_new_tokens: int) -> list[int]:
    wanted = {"model": "base", "prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0,
              "return_token_ids": True}  # fmt: skip
    request = Request(f"{url}/v1/completions", json.dumps(wanted).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as reply:
        return [int(token) for token in json.load(reply)["choices"][0]["token_ids"]]


def counters(url: str) -> tuple[int, list[int]]:
    """Drafts, and accepted tokens by position; zero and none where nothing is drafted."""
    with urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    found = re.findall(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"[^}]*\} (\S+)', text, re.MULTILINE
    )
    by_position = dict(sorted((int(position), int(float(count))) for position, count in found))
    return int(float(drafts[1])) if drafts else 0, list(by_position.values())


if __name__ == "__main__":
    sys.exit(main())
