"""vLLM with the plug-in: speed, acceptance and score along the dial; what the plug-in costs.

    python benchmarks/serving_vllm.py dial OUT --n 256       # the embedded pair: docs/serving-vllm.md, "Figures"
    python benchmarks/serving_vllm.py dial OUT --target T --draft D --head RUN/head --task cnndm --data-dir DATA
    python benchmarks/serving_vllm.py overhead OUT           # the plug-in against vLLM without it

Run it in the environment that has vLLM (`make test-vllm` makes one in .venv-vllm). All engines are alive side by side
and take turns on chunks of prompts in a rotating order, so that a drift of the machine hits all alike. Speeds are
ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diversed import __version__
from diversed.evaluation.statistics import mean_interval, normal_interval, ratio_interval
from diversed.pairs import DRAFT, HEADS, TARGET
from diversed.tasks import Task, load_task
from diversed.tasks.contract import judge

N, CHUNK, SEED = 5, 32, 0
Settings = dict[str, Any]
ROWS: list[tuple[str, float | None, Settings | None]] = [
    ("lossless", None, None),
    ("static:0.8", None, {"verifier": "static:0.8"}),
    ("static:0.5", None, {"verifier": "static:0.5"}),
    ("static:0.2", None, {"verifier": "static:0.2"}),
    ("learned", 0.9, {"head": "trained", "quality": 0.9}),
    ("learned", 0.5, {"head": "trained", "quality": 0.5}),
    ("learned", 0.1, {"head": "trained", "quality": 0.1}),
]


@dataclass(frozen=True)
class Pair:
    target: str = str(TARGET)
    draft: str = str(DRAFT)
    dtype: str = "float32"
    longest: int = 256


def make_engine(pair: Pair, speculates: bool, plugin: bool) -> Any:
    from vllm import LLM

    os.environ["VLLM_PLUGINS"] = "diversed" if plugin else "none"
    speculation = {"method": "draft_model", "model": pair.draft, "num_speculative_tokens": N,
                   "draft_sample_method": "probabilistic"}  # fmt: skip
    return LLM(pair.target, dtype=pair.dtype, enforce_eager=True, max_num_seqs=CHUNK, max_model_len=pair.longest,
               seed=SEED, disable_log_stats=False,
               speculative_config=speculation if speculates else None)  # fmt: skip


def answer(
    llm: Any, prompts: Sequence[str], setting: Settings | None, temperature: float, most: int = 96
) -> dict[str, Any]:
    """One chunk: texts, tokens, seconds, and what vLLM's own counters gained."""
    from vllm import SamplingParams

    extra = None if setting is None else {"diversed": setting}
    before, spent, began = counters(llm), worker_seconds(llm), time.perf_counter()
    out = llm.generate(
        prompts, SamplingParams(temperature=temperature, max_tokens=most, extra_args=extra), use_tqdm=False
    )
    seconds, after = time.perf_counter() - began, counters(llm)
    gained = {k: after[k] - before.get(k, 0) for k in after}
    return {
        "texts": [o.outputs[0].text for o in out],
        "tokens": sum(len(o.outputs[0].token_ids) for o in out),
        "seconds": seconds,
        "worker_seconds": worker_seconds(llm) - spent,
        **gained,
    }


def worker_seconds(llm: Any) -> float:
    """CPU time of the worker so far: unlike the wall clock it does not notice other programs on the machine."""
    return float(llm.collective_rpc(process_time)[0])


def process_time(worker: Any) -> float:
    return time.process_time()


def counters(llm: Any) -> dict[str, float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    found = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", 0) for m in llm.get_metrics()}
    return {name: found[name] for name in names if name in found}


def dial(out: Path, pair: Pair, task: Task, temperature: float) -> None:
    plain, relaxed = make_engine(pair, False, False), make_engine(pair, True, True)
    n = len(task.examples)
    arms = [("target-only", None, plain, None), *((name, q, relaxed, s) for name, q, s in ROWS)]
    chunks = take_turns(task, arms, temperature)
    reference = total(chunks[0], "seconds") / total(chunks[0], "tokens")
    rows = []
    for (name, quality, _, setting), found in zip(arms, chunks, strict=True):
        scores = [s for c in found for s in c["scores"]]
        score, score_ci = mean_interval(scores)
        acceptance = acceptance_ci = efficiency = None
        if name != "target-only":
            acceptance, acceptance_ci = ratio_interval(
                [c["num_accepted_tokens"] for c in found], [c["num_draft_tokens"] for c in found]
            )
            efficiency = 1 + total(found, "num_accepted_tokens") / total(found, "num_drafts")
        per_token = total(found, "seconds") / total(found, "tokens")
        static = (setting or {}).get("verifier", "")
        rows.append({
            "verifier": name, "weight": float(static[7:]) if static.startswith("static:") else None, "quality": quality,
            "num_speculative_tokens": 0 if name == "target-only" else N, "temperature": temperature, "task": task.name,
            "n": n, "score": score, "score_ci": score_ci, "acceptance_rate": acceptance,
            "acceptance_ci": acceptance_ci, "block_efficiency": efficiency, "tokens_per_target_call": None,
            "tokens_per_second": 1 / per_token, "normalised_time": per_token / reference,
            "speedup": reference / per_token, "seed": 77, "provenance": provenance(pair),
        })  # fmt: skip
    write(out / f"dial-{temperature:g}.json", rows)
    print("| verifier | quality | accuracy | acceptance | block efficiency | tokens/s | speed-up |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        quality = "–" if r["quality"] is None else f"{r['quality']:g}"
        accept = "–" if r["acceptance_rate"] is None else plus(r["acceptance_rate"], r["acceptance_ci"])
        block = "–" if r["block_efficiency"] is None else f"{r['block_efficiency']:.2f}"
        print(f"| {r['verifier']} | {quality} | {plus(r['score'], r['score_ci'])} | {accept} | {block} "
              f"| {r['tokens_per_second']:.0f} | {r['speedup']:.2f}× |")  # fmt: skip


def take_turns(task: Task, arms: Sequence[tuple[Any, ...]], temperature: float) -> list[list[dict[str, Any]]]:
    """Every arm on every chunk of prompts; a list of chunks per arm."""
    written = arms[0][2].get_tokenizer().apply_chat_template
    prompts = [
        e.prompt if isinstance(e.prompt, str) else written(e.prompt, tokenize=False, add_generation_prompt=True)
        for e in task.examples
    ]
    most = task.max_new_tokens
    found: list[list[dict[str, Any]]] = [[] for _ in arms]
    for arm in arms:  # the first call of anything is slow and says nothing
        answer(arm[2], prompts[:4], arm[3], temperature, most)
    for turn, start in enumerate(range(0, len(prompts), CHUNK)):
        for i in range(len(arms)):
            at = (i + turn) % len(arms)
            chunk = answer(arms[at][2], prompts[start : start + CHUNK], arms[at][3], temperature, most)
            chunk["scores"] = judge(task.score, task.examples[start : start + CHUNK], chunk.pop("texts"), "score")
            found[at].append(chunk)
    return found


def overhead(out: Path, pair: Pair, n: int, rounds: int) -> None:
    """Greedy, so that every arm writes the same tokens at the same acceptance; the same prompts each round."""
    without, plugged = make_engine(pair, True, False), make_engine(pair, True, True)
    arms = [
        ("vLLM without the plug-in", without, None),
        ("plug-in, requests that say nothing", plugged, None),
        ("plug-in, quality 1", plugged, {"quality": 1}),
        ("plug-in at work, static:0.999999", plugged, {"verifier": "static:0.999999"}),
    ]
    prompts = [str(e.prompt) for e in load_task("shop", split="test", n=n, seed=77).examples]
    times: list[list[float]] = [[] for _ in arms]
    walls: list[list[float]] = [[] for _ in arms]
    rates: list[float | None] = [None] * len(arms)
    written: list[list[str]] = [[] for _ in arms]
    for turn in range(-1, rounds):  # the first round warms up
        for i in range(len(arms)):
            at = (i + turn) % len(arms)
            found = answer(arms[at][1], prompts, arms[at][2], 0.0)
            if turn >= 0:
                times[at].append(found["worker_seconds"] / found["tokens"])
                walls[at].append(found["seconds"] / found["tokens"])
                written[at] = found["texts"]
                if found.get("num_draft_tokens"):  # vLLM keeps the counters of the last engine made in a process
                    rates[at] = found["num_accepted_tokens"] / found["num_draft_tokens"]
    rows = []
    print("| arm | same texts | acceptance | tokens/s | worker CPU time per token, over the first arm |")
    print("| --- | --- | --- | --- | --- |")
    for (name, *_), mine, wall, rate, texts in zip(arms, times, walls, rates, written, strict=True):
        ratios = [a / b - 1 for a, b in zip(mine, times[0], strict=True)]
        mean, ci = normal_interval(ratios)
        wall_mean, wall_ci = normal_interval([a / b - 1 for a, b in zip(wall, walls[0], strict=True)])
        rows.append({
            "arm": name, "acceptance_rate": rate, "same_texts": texts == written[0],
            "tokens_per_second": 1 / statistics.median(wall), "overhead": mean, "overhead_ci": ci,
            "overhead_median": statistics.median(ratios), "wall_overhead": wall_mean, "wall_overhead_ci": wall_ci,
            "rounds": rounds, "n": n, "provenance": provenance(pair),
        })  # fmt: skip
        print(f"| {name} | {rows[-1]['same_texts']} | {'–' if rate is None else f'{rate:.3f}'} "
              f"| {1 / statistics.median(wall):.0f} | {mean:+.1%} ± {(ci[1] - ci[0]) / 2:.1%} "
              f"(median {statistics.median(ratios):+.1%}) |")  # fmt: skip
    write(out / "overhead.json", rows)


def total(chunks: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(c[key] for c in chunks))


def plus(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} ± {(interval[1] - interval[0]) / 2:.3f}"


def provenance(pair: Pair) -> dict[str, Any]:
    import torch

    from vllm import __version__ as vllm_version

    return {"diversed": __version__, "vllm": vllm_version, "torch": torch.__version__, "dtype": pair.dtype,
            "python": platform.python_version(), "device": "cpu", "max_num_seqs": CHUNK}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["dial", "overhead"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--target", help="folder of a target of yours, in bf16; the embedded pair where left out")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--head", default=str(HEADS / "shop"), help="folder of a head for the pair")
    parser.add_argument("--task", default="shop")
    parser.add_argument("--data-dir", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # asks the workers for their CPU time
    os.environ |= {"DIVERSED_HEADS": f"trained={chosen.head}", "DIVERSED_SAME_NAMES": "0"}
    own = chosen.target and chosen.draft
    served = Pair(chosen.target, chosen.draft, "bfloat16", 768) if own else Pair()
    if chosen.what == "dial":
        asked = load_task(chosen.task, split="test", n=chosen.n, seed=77, data_dir=chosen.data_dir, chat=bool(own))
        dial(chosen.out, served, asked, chosen.temperature)
    else:
        overhead(chosen.out, served, chosen.n, chosen.rounds)
