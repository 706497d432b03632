"""The program `medusa`: the one place that knows both training and inference, loaded command by command.

Exit status: 0 done, 1 failed, 2 wrong usage or input (one line: got, expected, how to fix), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .cli_chat import chat
from .cli_inspect import app as inspect_app
from .cli_interop import export_command, import_command
from .cli_options import (
    Acceptance,
    BadRecord,
    BaseOverride,
    Data,
    Delta,
    Device,
    Dtype,
    DtypeOption,
    Epsilon,
    FrequencyPenalty,
    Heads,
    JsonOut,
    Limit,
    MaxLength,
    MaxNewTokens,
    MinP,
    OnBadRecord,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    make_acceptance,
    make_sampling,
    open_console,
    write_json,
)
from .cli_serve import serve

if TYPE_CHECKING:
    from rich.console import Console

    from .model import MedusaModel

INTERRUPTED = 130
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's, or that of typer's own copy of click

app = typer.Typer(
    help="Train extra prediction heads on a frozen language model, then decode several tokens per forward pass.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect_app, name="inspect")
app.command()(chat)
app.command()(serve)
app.command("export")(export_command)
app.command("import")(import_command)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    warnings.showwarning = _show_warning
    try:
        status = app(args=list(arguments) or ["--help"], standalone_mode=False, prog_name="medusa")
    except USAGE_ERROR as error:
        return _fail(f"{error.format_message()} See `medusa --help`.", 2)
    except ValueError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone; nothing more to say
        return 1
    except (OSError, RuntimeError) as error:
        return _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _fail(reason: object, status: int) -> int:
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def distill(
    out: Annotated[Path, typer.Option(help="JSONL to write; what it holds already is kept.", show_default=False)],
    base: Annotated[str | None, typer.Option(help="Base model: a directory or a Hub name.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Ask this server instead: its URL, as http://host/v1.")] = None,
    model_name: Annotated[
        str | None, typer.Option("--model", help="As the endpoint calls it; default: the only one there.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once to the endpoint.")] = 16,
    max_retries: Annotated[int, typer.Option(min=0, help="Of a request to the endpoint, with back-off.")] = 5,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file to answer (JSONL).")] = None,
    self_prompt: Annotated[int | None, typer.Option(min=1, help="Let the base write so many prompts itself.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    max_rows: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts that the base writes.")] = 0,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make training data with the base model itself: it answers prompts, or writes those too. Resumable.

    The base is loaded here (--base), or asked where it is served (--endpoint; a key is read from OPENAI_API_KEY).
    """
    console = open_console()
    from .infer.distill import DistillOptions, distill
    from .infer.distill_endpoint import Endpoint, distill_endpoint

    if endpoint is not None:
        if prompts is None or base is not None or self_prompt is not None:
            raise ValueError("--endpoint answers --prompts FILE; leave out --base and --self-prompt")
        server = Endpoint(endpoint, model_name, concurrency, max_retries)
        result = distill_endpoint(server, out, prompts, max_new_tokens, console)
    elif base is not None:
        from .base_model import load_base_model

        options = DistillOptions(max_new_tokens=max_new_tokens, max_rows=max_rows, seed=seed)
        model = load_base_model(base, dtype=dtype.value, device=device, trust_remote_code=trust_remote_code)
        result = distill(model, out, prompts=prompts, self_prompt=self_prompt, options=options, console=console)
    else:
        raise ValueError("got no base model, expected --base (a directory or a Hub name) or --endpoint URL")
    print(
        f"{out}: {result.num_records:,} conversations, {result.num_answer_tokens:,} answer tokens"
        f" ({result.num_resumed:,} conversations were there before)"
    )
    if result.failures:
        raise RuntimeError(
            f"{len(result.failures)} prompts have no answer, see {out}.failed; run again to ask only them"
        )


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file, such as configs/train/quickstart.yaml.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Settings, such as optim.lr=1e-3.")
    ] = None,
) -> None:
    """Train heads. Run the same command again to continue after an interruption.

    With several processes: `torchrun --nproc-per-node 2 -m medusa train --config FILE`, or the same after
    `accelerate launch`.
    """
    console = open_console()
    from .train.run import load_config, train
    from .train.signals import TrainingInterrupted

    try:
        result = train(load_config(config, overrides or ()), console)
    except TrainingInterrupted as interruption:
        raise typer.Exit(_fail(interruption, INTERRUPTED)) from None
    if os.environ.get("RANK", "0") == "0":  # a launcher's other processes say nothing
        summary = f"{result.heads_dir} ({result.stop_reason}, {result.tokens_per_second:,.0f} tokens/s)"
        console.print(f"heads: {summary}", highlight=False)


@app.command("eval")
def evaluate(
    heads: Heads,
    data: Data,
    base: BaseOverride = None,
    json: JsonOut = None,
    limit: Limit = None,
    max_length: MaxLength = 1024,
    on_bad_record: BadRecord = OnBadRecord.error,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Accuracy of each head by rank on held-out conversations, and the tau that draft trees would reach."""
    console = open_console()
    from .infer.evaluate import evaluate_with_progress, print_evaluation

    model = _load(heads, base, dtype, device, trust_remote_code, pack=False)
    evaluation = evaluate_with_progress(model, _texts(data, model, max_length, on_bad_record, limit, console), console)
    tree = model.tree if model.calibration else None
    print_evaluation(evaluation, tree, console)
    write_json(json, evaluation.to_dict(tree))


@app.command()
def calibrate(
    heads: Heads,
    data: Data,
    base: BaseOverride = None,
    limit: Limit = None,
    max_length: MaxLength = 1024,
    on_bad_record: BadRecord = OnBadRecord.error,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure acceptance on held-out conversations and c(N) on this machine; choose the tree and save it."""
    console = open_console()
    from .checkpoint import load_heads
    from .infer.calibrate import calibrate
    from .infer.draw_tree import draw_tree_text

    target = heads / load_heads(heads)[1].tree
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no tree yet
        model = _load(heads, base, dtype, device, trust_remote_code, pack=True)
    calibration = calibrate(model, _texts(data, model, max_length, on_bad_record, limit, console), console)
    calibration.save(target)
    draw_tree_text(calibration, console)
    print(f"tree: {target}")


@app.command()
def generate(
    heads: Heads,
    prompt: Annotated[str, typer.Option(help="What to answer; - reads standard input.", show_default=False)],
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    speculate: Annotated[bool, typer.Option(help="Draft with the heads, or decode a token at a time.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Answer with stock transformers too.")] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    acceptance: Acceptance = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    base: BaseOverride = None,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer one prompt as the base model itself would, faster: greedily, or sampling with --temperature.

    The model's own generation_config.json is not looked at: what is not given here is off.
    """
    console = open_console()
    from .infer.generation import check_prompt, encode_prompt
    from .infer.show_answer import show_answer

    sampling = make_sampling(
        temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    typical = make_acceptance(sampling, acceptance, epsilon, delta)
    if compare and not sampling.is_plain_greedy:
        raise ValueError(
            "generate: got --compare with sampling or penalties, expected plain greedy; `medusa bench --temperature` "
            "compares sampled speeds"
        )
    if compare and stop:
        raise ValueError("generate: got --compare with --stop, expected one of them; stock generate cuts elsewhere")
    model = _load(heads, base, dtype, device, trust_remote_code, pack=True)
    ids = encode_prompt(model.base.tokenizer, sys.stdin.read() if prompt == "-" else prompt, raw=raw)
    if not compare:
        show_answer(
            model,
            ids,
            console,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            speculate=speculate,
            sampling=sampling,
            typical=typical,
        )
        return
    from .infer.compare import compare as show_comparison
    from .infer.methods import StockModel

    check_prompt(model.base, ids, max_new_tokens)
    stock = StockModel.load(model.base, model.adapter, trust_remote_code=trust_remote_code)
    show_comparison(model, stock, ids, max_new_tokens, console)


@app.command()
def bench(
    heads: Heads,
    prompts: Annotated[Path, typer.Option(help="Prompt file (JSONL); first turns are answered.", show_default=False)],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: hf, hf-lookup, ar, medusa, medusa-static, medusa-dynamic, lookup; hf always runs."
        ),
    ] = "ar,medusa",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Of the tokens drawn; every prompt gets one of its own from it.")] = 0,
    limit: Limit = None,
    json: JsonOut = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the speeds here (PNG).")] = None,
    base: BaseOverride = None,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare speed and tokens with stock transformers, one prompt at a time, methods taking turns.

    Fails (status 1) where a method's tokens differ from stock's by more than a numerical tie. With --temperature, stock
    samples too, tokens of its own: then ar and medusa, which have the same seeds, are compared with each other.
    """
    console = open_console()
    from .infer.bench import bench
    from .infer.bench_report import plot_bench, print_bench
    from .infer.methods import StockModel
    from .infer.prompts import read_prompts

    sampling = make_sampling(temperature, top_p=top_p, seed=seed)
    records = read_prompts(prompts, limit=limit)
    model = _load(heads, base, dtype, device, trust_remote_code, pack=True)
    stock = StockModel.load(model.base, model.adapter, trust_remote_code=trust_remote_code)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    result = bench(
        model, stock, records, methods=names, max_new_tokens=max_new_tokens, console=console, sampling=sampling
    )
    print_bench(result, console)
    write_json(json, result.to_dict())
    if plot:
        plot_bench(result, plot)
        print(f"picture: {plot}")
    if result.num_different:
        raise RuntimeError(
            f"bench: {result.num_different} answers differ from {result.reference}'s beyond a numerical tie"
        )


def _load(
    heads: Path, base: str | None, dtype: Dtype, device: str, trust_remote_code: bool, *, pack: bool
) -> MedusaModel:
    from .model import MedusaModel

    return MedusaModel.from_pretrained(
        heads, base=base, dtype=dtype.value, device=device, pack=pack, trust_remote_code=trust_remote_code
    )


def _texts(
    data: list[str],
    model: MedusaModel,
    max_length: int,
    on_bad_record: OnBadRecord,
    limit: int | None,
    console: Console,
) -> list[Any]:
    from .train.dataset import build_dataset

    max_length = min(max_length, model.base.max_positions)
    dataset = build_dataset(data, model.base.tokenizer, max_length, on_bad_record.value, limit, console)
    console.print(str(dataset.statistics), highlight=False, markup=False)
    return list(dataset.examples)
