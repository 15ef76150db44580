"""How close the engine's cycle comes to its forward passes, and how far ahead of transformers it is.

    python benchmarks/engine.py --json engine.json                      # the embedded pair, batch 1; under 4 minutes
    python benchmarks/engine.py --full --target T --draft D --json F    # also a pair of yours, batches, random weights
    python benchmarks/engine.py --gpu --json gpu.json                   # one CUDA device, at most 8 minutes

Everything is measured side by side: in each repeat every contender decodes the same prompt in turn, and figures are
medians over repeats of ratios within one repeat. Efficiency is (N t_draft + t_target(N+1)) / cycle, with the forward
passes timed alone on a warm cache in the same repeat. Peers run as transformers ships them, on models of their own:
same pair, N, ensemble weight, dtype and threads. ``over_transformers_assisted``, first in the file, is the headline.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedModel

from diversed import Lossless, ModelPair, StaticEnsemble, Verifier, generate
from diversed.engine.packing import pack_linears
from diversed.tasks import load_task
from diversed.verifiers import SetAcceptance

N = 5
EMBEDDED = Path(__file__).parents[1] / "src/diversed/pairs/embedded"
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, head size, tied
    "llama-1b": (16, 2048, 8192, 32, 8, 64, True),
    "llama-1b-4-layers": (4, 2048, 8192, 32, 8, 64, True),
    "llama-8b": (32, 4096, 14336, 32, 8, 128, False),
}

Contender = Callable[[], tuple[int, float, Any]]  # new tokens, seconds, statistics or None


def random_llama(shape: str, device: str) -> PreTrainedModel:
    """Random bf16 weights in a true shape: time does not depend on what a model knows."""
    layers, hidden, inner, heads, shared, size, tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, head_dim=size, tie_word_embeddings=tied,
        max_position_embeddings=8192, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_passes(pair: ModelPair, ids: Tensor) -> Contender:
    """Median seconds of bare passes behind ``ids`` [B, P], three kinds taking turns: the third of its results."""
    decoders = {}
    for kind, model, width in (
        ("target_1", pair.target, 1),
        ("target_n", pair.target, N + 1),
        ("draft_1", pair.draft, 1),
    ):
        decoder = pair.decoder(model, len(ids), ids.shape[1] + 64, {width})
        decoder.prefill(ids.tolist())
        rows = torch.arange(width, device=decoder.device).expand(len(ids), -1)
        decoders[kind] = decoder, ids[:, :width].to(decoder.device), rows

    @torch.inference_mode()
    def run() -> tuple[int, float, Any]:
        times: dict[str, list[float]] = {kind: [] for kind in decoders}
        for _ in range(6):
            for kind, (decoder, tokens, rows) in decoders.items():
                sync(decoder.device)
                began = time.perf_counter()
                decoder.feed(tokens, rows)
                sync(decoder.device)
                times[kind].append(time.perf_counter() - began)
        return 0, sum(map(sum, times.values())), {kind: statistics.median(t[1:]) for kind, t in times.items()}

    return run


def ours(pair: ModelPair, ids: Tensor, tokens: int, verifier: Verifier, n: int | str) -> Contender:
    def run() -> tuple[int, float, Any]:
        began = time.perf_counter()
        out = generate(
            pair, input_ids=ids, verifier=verifier, num_speculative_tokens=n, max_new_tokens=tokens, ignore_eos=True,
            seed=int(torch.randint(1 << 30, ())),
        )  # fmt: skip
        return out.stats.tokens, time.perf_counter() - began, out.stats

    return run


def theirs(
    target: PreTrainedModel, draft: PreTrainedModel | None, ids: Tensor, tokens: int, weight: float
) -> Contender:
    """``generate`` of transformers, assisted where there is a draft."""
    settings: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "pad_token_id": 0,
    }
    if draft is not None:
        settings["assistant_ensemble_weight"] = weight
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=N, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0,
            do_sample=True, pad_token_id=0,
        )  # fmt: skip

    def run() -> tuple[int, float, Any]:
        began = time.perf_counter()
        config = GenerationConfig(**settings)
        with torch.inference_mode():
            out = target.generate(
                ids.to(target.device), attention_mask=torch.ones_like(ids).to(target.device), generation_config=config,
                **({"assistant_model": draft} if draft is not None else {}),
            )  # fmt: skip
        sync(target.device)
        return out.numel() - ids.numel(), time.perf_counter() - began, None

    return run


def take_turns(
    contenders: Callable[[Tensor], dict[str, Contender]], prompts: list[Tensor], repeats: int
) -> dict[str, list[tuple[int, float, Any]]]:
    """Each decodes a prompt, then the next prompt, and so on; a first round warms up and is forgotten."""
    found: dict[str, list[tuple[int, float, Any]]] = {}
    for i in range(-1, repeats):
        for name, run in contenders(prompts[i % len(prompts)]).items():
            result = run()
            if i >= 0:
                found.setdefault(name, []).append(result)
    return found


def compare(
    name: str, pair: ModelPair, peers: tuple[PreTrainedModel, PreTrainedModel] | None, prompts: list[Tensor],
    weight: float, tokens: int, repeats: int, verifier: Verifier | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row: a pair at the batch size of ``prompts[0]``; repeats cycle through the prompts."""
    relaxed = verifier or StaticEnsemble(weight)
    kinds: dict[str, tuple[Verifier, Any]] = {
        "target_only": (Lossless(), 0), "relaxed": (relaxed, N), "auto": (relaxed, "auto"), "lossless": (Lossless(), N),
        "lossless_auto": (Lossless(), "auto"),
    }  # fmt: skip

    bare = bare_passes(pair, prompts[0])

    def contenders(ids: Tensor) -> dict[str, Contender]:
        found = {kind: ours(pair, ids, tokens, v, n) for kind, (v, n) in kinds.items()} | {"bare": bare}
        if peers is not None and len(ids) == 1:
            found["transformers_assisted"] = theirs(*peers, ids, tokens, weight)
            found["transformers_generate"] = theirs(peers[0], None, ids, tokens, weight)
        return found

    results = take_turns(contenders, prompts, repeats)
    passes = [times for _, _, times in results.pop("bare")]
    speed = {kind: [n / seconds for n, seconds, _ in found] for kind, found in results.items()}

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(speed[a], speed[b], strict=True))

    cycles: dict[str, list[float]] = {"efficiency": [], "verification_and_rest": [], "over_bound": []}
    for at, (_, _, stats) in enumerate(results["relaxed"]):
        rows = len(prompts[0])
        blocks = stats.target_calls / rows
        spent = stats.time.total - stats.time.prefill
        ideal = N * passes[at]["draft_1"] + passes[at]["target_n"]
        cycles["efficiency"].append(ideal / (spent / blocks))
        cycles["verification_and_rest"].append((stats.time.verification + stats.time.rest) / spent)
        alone = results["target_only"][at][2].time
        gain = (alone.total - alone.prefill) / spent * stats.tokens / results["target_only"][at][0]
        cycles["over_bound"].append(gain / (stats.tokens / stats.target_calls * passes[at]["target_1"] / ideal))
    stats = [s for _, _, s in results["relaxed"]]
    blocks = sum(s.target_calls for s in stats) / len(prompts[0])
    row = {
        "pair": name, "batch": len(prompts[0]), "prompt_tokens": prompts[0].shape[1], "new_tokens": tokens,
        "num_speculative_tokens": N, "weight": weight if verifier is None else None,
        "dtype": str(pair.target.dtype).removeprefix("torch."), "compiled": pair.compiled,
        "repeats": repeats, "acceptance_rate": sum(sum(s.accepted) for s in stats) / sum(sum(s.drafted) for s in stats),
        "tokens_per_target_call": sum(s.tokens for s in stats) / sum(s.target_calls for s in stats),
        "forward_ms": {k: 1e3 * statistics.median(t[k] for t in passes) for k in passes[0]},
        "cycle_ms": {
            part: 1e3 * sum(getattr(s.time, part) for s in stats) / blocks
            for part in ("draft", "target", "verification", "rest")
        },
        **{k: statistics.median(v) for k, v in cycles.items()},
        "tokens_per_second": {kind: statistics.median(v) for kind, v in speed.items()},
        "over_target_only": ratio("relaxed", "target_only"),
        "auto_over_fixed": ratio("auto", "relaxed"),
        "lossless_auto_over_target_only": ratio("lossless_auto", "target_only"),
    }  # fmt: skip
    if "transformers_assisted" in speed:
        row["over_transformers_assisted"] = ratio("relaxed", "transformers_assisted")
        row["target_only_over_transformers_generate"] = ratio("target_only", "transformers_generate")
    print(json.dumps(row, indent=1), flush=True)
    return row


def draft_lengths(
    pair: ModelPair, prompts: list[Tensor], verifier: Verifier, tokens: int, repeats: int
) -> dict[str, Any]:
    """Fixed numbers of draft tokens against "auto": what auto loses on the best of them."""
    lengths = (0, 1, 2, 3, 5, 7, "auto")
    results = take_turns(lambda ids: {str(n): ours(pair, ids, tokens, verifier, n) for n in lengths}, prompts, repeats)
    speeds = {n: [count / seconds for count, seconds, _ in found] for n, found in results.items()}
    medians = {n: statistics.median(v) for n, v in speeds.items()}
    best = max((n for n in medians if n != "auto"), key=lambda n: medians[n])
    ratio = statistics.median(a / b for a, b in zip(speeds["auto"], speeds[best], strict=True))
    return {"tokens_per_second": medians, "best_fixed": best, "auto_over_best_fixed": ratio}


def memory(target: str, draft: str, n: int, queue: Any) -> None:
    """In a process of its own: how much memory it holds after a generation on the CPU, and at its peak, in bytes."""
    if n:
        pair = ModelPair.from_pretrained(target, draft, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        pack_linears(model)
        pair = ModelPair(model, model, AutoTokenizer.from_pretrained(target))
    ids = torch.randint(100, 4000, (1, 350))
    generate(pair, input_ids=ids, num_speculative_tokens=n, max_new_tokens=64, seed=0, ignore_eos=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # loading included
    queue.put({"held": psutil.Process().memory_info().rss, "peak": peak})


def embedded(repeats: int, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    pair = ModelPair.embedded(dtype=dtype, compiled=compiled)
    peers = tuple(AutoModelForCausalLM.from_pretrained(EMBEDDED / r, dtype=dtype).eval() for r in ("target", "draft"))
    assert pair.tokenizer is not None
    examples = load_task("shop", split="test", n=8).examples
    prompts = [torch.tensor([pair.tokenizer(e.prompt).input_ids]) for e in examples]
    return compare("embedded", pair, peers, prompts, weight=0.2, tokens=64, repeats=repeats)  # type: ignore[arg-type]


def real(target: str, draft: str, repeats: int, compiled: bool) -> list[dict[str, Any]]:
    pair = ModelPair.from_pretrained(target, draft, dtype=torch.bfloat16, compiled=compiled)
    peers = tuple(AutoModelForCausalLM.from_pretrained(m, dtype=torch.bfloat16).eval() for m in (target, draft))
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in (1,) if compiled else (1, 8):
        prompts = [torch.randint(100, pair.vocab_size - 100, (batch, 350), generator=generator) for _ in range(4)]
        rows.append(compare(Path(target).name, pair, peers, prompts, 0.2, 64, repeats))  # type: ignore[arg-type]
    if compiled:
        return rows
    one = [p[:1] for p in prompts]
    for verifier in (Lossless(), StaticEnsemble(0.5), StaticEnsemble(0.2)):
        rows.append(
            {"pair": Path(target).name, "verifier": repr(verifier), **draft_lengths(pair, one, verifier, 64, repeats)}
        )
        print(json.dumps(rows[-1], indent=1), flush=True)
    context, needed = multiprocessing.get_context("spawn"), {}
    for n in (0, N):
        queue = context.Queue()
        process = context.Process(target=memory, args=(target, draft, n, queue))
        process.start()
        needed[n] = queue.get()
        process.join()
    weights = sum(f.stat().st_size for f in Path(draft).glob("*.safetensors"))
    rows.append({"pair": Path(target).name, "bytes": needed, "draft_file_bytes": weights})
    print(json.dumps(rows[-1], indent=1), flush=True)
    return rows


def random_weights(target: str, draft: str, device: str, repeats: int, tokens: int) -> list[dict[str, Any]]:
    """True shapes and a verifier that accepts 0.7 whatever the models; transformers at the weight that does so."""
    pair = ModelPair(random_llama(target, device), random_llama(draft, device), target_name=target, draft_name=draft)
    peers = (copy.deepcopy(pair.target), copy.deepcopy(pair.draft))
    pack_linears(pair.target, pair.draft)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in (1, 8):
        prompts = [torch.randint(100, 120_000, (batch, 256), generator=generator) for _ in range(2)]
        probe = generate(pair, input_ids=prompts[0], max_new_tokens=8, seed=0, trace=True, bonus="verifier")
        assert probe.trace is not None
        distance = float(torch.cat([t.total_variation for t in probe.trace]).nanmean())
        weight = min(1.0, 0.3 / distance)
        rows.append(compare(f"{target} / {draft}", pair, peers, prompts, weight, tokens, repeats, SetAcceptance(0.7)))
    return rows


def check_against_cpu(device: str) -> None:
    """Greedy tokens of the embedded pair in float32 on a device equal those on the CPU."""
    found = []
    for where in ("cpu", device):
        pair = ModelPair.embedded()
        pair.target.to(where)
        pair.draft.to(where)
        prompts = [e.prompt for e in load_task("shop", split="test", n=8).examples]
        found.append(generate(pair, prompts, temperature=0, max_new_tokens=48, verifier=StaticEnsemble(0.5)).token_ids)
    same = sum(a == b for a, b in zip(*found, strict=True))
    print(f"greedy on {device} equals the CPU on {same} of {len(found[0])} prompts", flush=True)
    if same < len(found[0]) - 1:  # one may differ by a tie in the last bit
        raise SystemExit("the device path differs from the CPU path: figures would be worthless")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="batches, random weights and, if given, a pair of yours")
    parser.add_argument("--gpu", action="store_true", help="true shapes of 8B / 1B on CUDA")
    parser.add_argument("--target", help="folder of a target model, for --full")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice where left out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.gpu:
        check_against_cpu("cuda")
        rows = random_weights("llama-8b", "llama-1b", "cuda", args.repeats, 64)
    else:
        rows = [embedded(args.repeats, torch.bfloat16, compiled=True), embedded(args.repeats, torch.bfloat16, False)]
        if args.full:
            rows += [embedded(args.repeats, torch.float32, compiled) for compiled in (True, False)]
            if args.target and args.draft:
                rows += [r for c in (False, True) for r in real(args.target, args.draft, args.repeats, c)]
            rows += random_weights("llama-1b", "llama-1b-4-layers", "cpu", max(3, args.repeats // 2), 32)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    if args.json:
        headline = {"over_transformers_assisted": rows[0].get("over_transformers_assisted")}
        args.json.write_text(
            json.dumps(headline | versions | {"machine": platform.processor(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
