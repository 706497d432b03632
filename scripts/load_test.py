"""Load on a running `medusa serve`, from this machine only and bounded: a soak, speeds, fairness, and an end.

    medusa serve --heads runs/quickstart/heads --port 8000 --max-rows 16 --max-waiting 64 &
    python scripts/load_test.py soak       --url http://127.0.0.1:8000 --heads runs/quickstart/heads
    python scripts/load_test.py single     --url http://127.0.0.1:8000 --heads runs/quickstart/heads
    python scripts/load_test.py throughput --url http://127.0.0.1:8000
    python scripts/load_test.py fairness   --url http://127.0.0.1:8000
    python scripts/load_test.py term       --url http://127.0.0.1:8000 --pid $!

soak: requests of mixed lengths, some of whose clients leave and some malformed; every completed greedy answer must be
the one that `medusa.infer.generate` gives (ties of the base's own logits are counted apart), no status may be 5xx, and
the server must be idle afterwards. single: one client's tokens a second, prompt by prompt, against what `medusa bench`
measures in this process. throughput: clients that send their next request when they have their answer. The others
print what they measured, too. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT_S = 600
MALFORMED: list[Any] = [
    {"prompt": ""},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**7},
    {"prompt": "x", "suffix": "y"},
    {"prompt": [[-1]]},
    [],
    "text",
]
TOPICS = ("the sea", "a small dog", "how bread is made", "the number seven", "winter", "a letter to a friend")


@dataclass
class Soak:
    answers: dict[int, list[int]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    num_left: int = 0


def main() -> int:
    options = parse()
    check_loopback(options.url)
    return int(asyncio.run(TASKS[options.task](options)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; loopback only")
    parser.add_argument("--heads", help="soak, single: heads directory, to compute the answers here")
    parser.add_argument("--base", help="soak, single: base model, where it is not as the heads name it")
    parser.add_argument("--requests", type=int, default=2000, help="soak: how many, at most 20,000")
    parser.add_argument("--concurrency", type=int, default=16, help="soak and term: clients at once, at most 64")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--prompts", type=Path, default="data/prompts.jsonl", help="single: file of prompts")
    parser.add_argument("--limit", type=int, default=24, help="single: how many of them")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="fairness: length of the long prompt")
    parser.add_argument("--levels", default="1,4,8,16", help="throughput: clients at once")
    parser.add_argument("--per-client", type=int, default=4, help="throughput: requests by the number of clients")
    parser.add_argument("--rounds", type=int, default=4, help="throughput: speculation on and off take turns so often")
    parser.add_argument("--pid", type=int, help="term: the server's process; soak: to read its memory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.requests, options.concurrency = min(options.requests, 20_000), min(options.concurrency, 64)
    return options


def check_loopback(url: str) -> None:
    host = urlsplit(url).hostname or ""
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        sys.exit(f"error: got {host}, expected a loopback address; this script makes load, which nobody else may get")


def client(options: argparse.Namespace) -> httpx.AsyncClient:
    key = os.environ.get("MEDUSA_API_KEYS", "").split(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=80, max_keepalive_connections=80)
    return httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT_S, headers=headers, limits=limits)


def prompt_of(number: int, rng: random.Random) -> str:
    return f"{number}. Tell me about {rng.choice(TOPICS)}. " * rng.choice((1, 1, 2, 4))


async def soak(options: argparse.Namespace) -> int:
    rng, result = random.Random(options.seed), Soak()
    bodies = [
        {"prompt": prompt_of(n, rng), "max_tokens": rng.randint(1, options.max_tokens), "temperature": 0}
        for n in range(options.requests)
    ]
    fates = [rng.choices(("stay", "leave", "malformed"), (0.75, 0.2, 0.05))[0] for _ in bodies]
    delays = [rng.expovariate(1 / 0.15) for _ in bodies]
    gate, start = asyncio.Semaphore(options.concurrency), time.perf_counter()
    async with client(options) as http:
        before = await gauges(http, options.pid)

        async def one(n: int) -> None:
            async with gate:
                await send(http, n, bodies[n], fates[n], delays[n], result)

        await asyncio.gather(*(one(n) for n in range(len(bodies))))
        seconds = time.perf_counter() - start
        after = await wait_idle(http, options.pid)
    print(
        f"{len(bodies)} requests in {seconds:.0f} s: statuses {dict(result.statuses)}, {result.num_left} clients left"
    )
    print(f"before {before}\nafter  {after}")
    different, ties = compare(options, bodies, result.answers) if options.heads else (0, 0)
    print(f"answers: {len(result.answers)} complete, {different} differ from the offline ones, {ties} ties")
    failed = different or any(status >= 500 for status in result.statuses) or after["running"] or after["kv"]
    return 1 if failed else 0


async def send(http: httpx.AsyncClient, n: int, body: Any, fate: str, delay: float, result: Soak) -> None:
    if fate == "malformed":
        response = await http.post("/v1/completions", json=MALFORMED[n % len(MALFORMED)])
        result.statuses[response.status_code] += 1
        return
    try:
        work = stream(http, body) if n % 2 else whole(http, body)
        status, token_ids = await asyncio.wait_for(work, delay if fate == "leave" else None)
    except asyncio.TimeoutError:
        result.num_left += 1
        return
    result.statuses[status] += 1
    if token_ids is not None:
        result.answers[n] = token_ids


async def whole(http: httpx.AsyncClient, body: Any) -> tuple[int, list[int] | None]:
    body = body | {"return_token_ids": True}
    while (response := await http.post("/v1/completions", json=body)).status_code == 429:
        await asyncio.sleep(float(response.headers["Retry-After"]) / 10)
    return response.status_code, response.json()["choices"][0]["token_ids"] if response.status_code == 200 else None


async def stream(http: httpx.AsyncClient, body: Any) -> tuple[int, list[int] | None]:
    token_ids: list[int] = []
    body = body | {"return_token_ids": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return response.status_code, None
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return int(event["error"]["code"]), None
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids", [])
    return 200, token_ids


def compare(options: argparse.Namespace, bodies: list[Any], answers: dict[int, list[int]]) -> tuple[int, int]:
    """(answers that differ, of which no tie is the cause; ties)."""
    from medusa.infer import generate
    from medusa.infer.methods import StockModel
    from medusa.infer.ties import TIE_GAP, first_difference
    from medusa.model import MedusaModel

    model = MedusaModel.from_pretrained(options.heads, base=options.base)
    stock, different, ties = None, 0, 0
    for n, token_ids in sorted(answers.items()):
        [offline] = generate(model, [bodies[n]["prompt"]], raw=True, max_new_tokens=bodies[n]["max_tokens"])
        if offline.token_ids == token_ids:
            continue
        stock = stock or StockModel.load(model.base, model.adapter)
        prompt = model.base.tokenizer(bodies[n]["prompt"]).input_ids
        place = first_difference(token_ids, offline.token_ids)
        is_tie = stock.top_two_gap(prompt + offline.token_ids[:place]) < TIE_GAP
        different, ties = different + (not is_tie), ties + is_tie
        if not is_tie:
            print(f"request {n}: got {token_ids}, expected {offline.token_ids}")
    return different, ties


async def gauges(http: httpx.AsyncClient, pid: int | None) -> dict[str, float]:
    text = (await http.get("/metrics")).text

    def value(name: str) -> float:
        match = re.search(rf"^medusa:{name}\{{[^}}]*\}} (\S+)$", text, flags=re.MULTILINE)
        return float(match[1]) if match else 0.0

    result = {
        "running": value("num_requests_running"),
        "waiting": value("num_requests_waiting"),
        "kv": value("kv_cache_usage_perc"),
        "prefix_cache_mb": value("prefix_cache_bytes") / 2**20,
    }
    status = Path(f"/proc/{pid}/status")
    if pid and status.exists():
        resident = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
        result["resident_mb"] = int(resident[1]) / 1024 if resident else 0.0
    return result


async def wait_idle(http: httpx.AsyncClient, pid: int | None) -> dict[str, float]:
    for _ in range(100):
        found = await gauges(http, pid)
        if not found["running"] and not found["waiting"]:
            break
        await asyncio.sleep(0.1)
    return found


async def single(options: argparse.Namespace) -> int:
    """One client against the same engine without a server. They take turns, as who is first does; a prompt each time,
    so that the server knows none but the chat template's beginning."""
    if not options.heads:
        sys.exit("error: got no --heads, expected the directory that the server has")
    from medusa.infer.bench import encode_prompts
    from medusa.infer.methods import engine_method
    from medusa.infer.prompts import read_prompts
    from medusa.model import MedusaModel

    model = MedusaModel.from_pretrained(options.heads, base=options.base, pack=True)
    encoded = encode_prompts(model.base, read_prompts(options.prompts, limit=options.limit), options.max_tokens)
    here = engine_method(model.base, model.drafter)
    speeds, num_same = {"bench": Speed(), "server": Speed()}, 0
    async with client(options) as http:

        async def there(ids: list[int], max_tokens: int) -> tuple[list[int], float]:
            start = time.perf_counter()
            status, token_ids = await whole(http, {"prompt": ids, "max_tokens": max_tokens, "temperature": 0})
            assert status == 200 and token_ids, f"the server answered {status}"
            return token_ids, time.perf_counter() - start

        here(encoded[0], 8)
        await there(encoded[0][::-1], 8)
        for number, ids in enumerate(encoded):
            answers = {}
            for name in ("bench", "server") if number % 2 else ("server", "bench"):
                if name == "server":
                    answers[name], seconds = await there(ids, options.max_tokens)
                else:
                    sample = here(ids, options.max_tokens)
                    answers[name], seconds = sample.token_ids, sample.seconds
                speeds[name].add(len(answers[name]), seconds)
            num_same += answers["server"] == answers["bench"]
    bench, server = speeds["bench"], speeds["server"]
    ratio = statistics.median(theirs / ours for theirs, ours in zip(server.each, bench.each, strict=True))
    print(
        f"server {server.mean:.1f} tokens/s, bench {bench.mean:.1f}, ratio {server.mean / bench.mean:.2f}, "
        f"median over prompts {ratio:.2f}; {num_same} of {len(encoded)} answers the same"
    )
    return 0 if server.mean / bench.mean >= 0.93 else 1


@dataclass
class Speed:
    """Tokens a second: of each prompt, and of all."""

    each: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.num_tokens / self.seconds

    def add(self, num_tokens: int, seconds: float) -> None:
        self.each.append(num_tokens / seconds)
        self.num_tokens, self.seconds = self.num_tokens + num_tokens, self.seconds + seconds


async def throughput(options: argparse.Namespace) -> int:
    """Tokens/s of all clients together. On and off take turns, so that a drift of the machine falls on both."""
    failed = False
    async with client(options) as http:
        await chats(http, options, 1, True, 0)  # warm
        for level in map(int, options.levels.split(",")):
            speeds: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(options.rounds):
                for speculate in (True, False) if turn % 2 else (False, True):
                    speeds[speculate].append(await chats(http, options, level, speculate, turn))
            on, off = (statistics.median(speeds[speculate]) for speculate in (True, False))
            print(f"concurrency {level:>2}: on {on:7.1f} tokens/s, off {off:7.1f}, ratio {on / off:.2f}", flush=True)
            failed |= on / off < (1.4 if level == 1 else 0.98)
    return 1 if failed else 0


async def chats(http: httpx.AsyncClient, options: argparse.Namespace, level: int, speculate: bool, turn: int) -> float:
    """`level` chats at once; whoever is done takes the next. Other prompts in each turn, the same for on and off."""
    rng, gate = random.Random(f"{options.seed} {level} {turn}"), asyncio.Semaphore(level)

    async def one(n: int, topic: str) -> int:
        messages = [{"role": "user", "content": f"Tell me about {topic}, in your own words ({n})."}]
        body = {"messages": messages, "max_tokens": options.max_tokens, "temperature": 0}
        async with gate:
            response = await http.post("/v1/chat/completions", json=body | {"medusa": {"speculate": speculate}})
        return int(response.json()["usage"]["completion_tokens"])

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(n, rng.choice(TOPICS)) for n in range(level * options.per_client)))
    return sum(counts) / (time.perf_counter() - start)


async def fairness(options: argparse.Namespace) -> int:
    """Time to first token of a short request: alone, and while a long prompt is being computed."""
    async with client(options) as http:
        ids = (await http.post("/tokenize", json={"prompt": "Hello there."})).json()["tokens"]
        await first_token(http, {"prompt": ids, "max_tokens": 1})
        alone = await first_token(http, {"prompt": [*ids, *ids], "max_tokens": 1})
        rng = random.Random()  # new in each run: the server remembers prompts
        long = {"prompt": [rng.choice(ids) for _ in range(options.prompt_tokens)], "max_tokens": 1}
        start = time.perf_counter()
        slow = asyncio.create_task(first_token(http, long))
        await asyncio.sleep(0.1)
        short = await first_token(http, {"prompt": [*ids[::-1], *ids], "max_tokens": 1})
        await slow
        seconds = time.perf_counter() - start
    chunks = max(1, options.prompt_tokens // 256)
    print(f"first token of a short request: {1000 * alone:.0f} ms alone, {1000 * short:.0f} ms beside a long prompt")
    chunk_ms = 1000 * seconds / chunks
    print(f"the long one: {options.prompt_tokens} tokens in {seconds:.2f} s, about {chunk_ms:.0f} ms a chunk")
    return 0 if short < 2 * seconds / chunks + alone else 1


async def first_token(http: httpx.AsyncClient, body: dict[str, Any]) -> float:
    start = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True, "temperature": 0}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - start
    raise RuntimeError("the stream ended without a token")


async def term(options: argparse.Namespace) -> int:
    """SIGTERM under load: every accepted request must be finished or told, and the process must be gone."""
    if not options.pid:
        sys.exit("error: got no --pid, expected the server's process")
    outcomes: Counter[str] = Counter()
    async with client(options) as http:

        async def one(n: int) -> None:
            body = {"prompt": f"Story {n}:", "max_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True}
            try:
                outcomes[str((await http.post("/v1/completions", json=body)).status_code)] += 1
            except httpx.TransportError:
                outcomes["no answer"] += 1

        jobs = [asyncio.create_task(one(n)) for n in range(options.concurrency)]
        await asyncio.sleep(1)
        start = time.perf_counter()
        os.kill(options.pid, signal.SIGTERM)
        await asyncio.gather(*jobs)
    while time.perf_counter() - start < 120 and is_running(options.pid):
        await asyncio.sleep(0.1)
    gone = not is_running(options.pid)
    seconds = time.perf_counter() - start
    print(f"answers {dict(outcomes)}; the process {'ended' if gone else 'runs on'} after {seconds:.1f} s")
    return 0 if gone and set(outcomes) <= {"200", "503"} else 1


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


TASKS = {"soak": soak, "single": single, "throughput": throughput, "fairness": fairness, "term": term}

if __name__ == "__main__":
    sys.exit(main())
