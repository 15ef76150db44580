"""Train the embedded pair from scratch: tokenizer, target and draft.

    python -m diversed.pairs.train_embedded tokenizer OUT
    python -m diversed.pairs.train_embedded target OUT --steps 3000
    python -m diversed.pairs.train_embedded draft OUT --steps 1500 --lr 3e-3 --until 0.4 --evaluate-every 50
    python -m diversed.pairs.train_embedded release OUT src/diversed/pairs/embedded

Needs a CPU and nothing else. Both models are plain Llama models with heads of size 64. They learn the same
problems of :mod:`diversed.tasks.word_problems` with opposite preferences among synonyms; the target also drills
bare arithmetic, faded out over the run, because digits are what it must get right. The draft is stopped early on
purpose: it should write fluently and calculate badly.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diversed.tasks.word_problems import FAMILIES, LARGEST, Style, problem_stream, problems, score

VOCABULARY = 512
CONTEXT = 512
WIDTH = 80  # tokens a training line may take; one fixed shape compiles once
SHAPES = {
    "target": {"hidden_size": 384, "num_hidden_layers": 7, "intermediate_size": 1024, "num_attention_heads": 6},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 320, "num_attention_heads": 2},
}

# One message in, "Question: ...\nAnswer:" out, so that `diversed chat` speaks the pair's language.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Question: ' + m['content'] + '\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Answer: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens. A digit is always a token of its own (with the space before it)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d| ?\p{L}+|\n| ?[^\s\d\p{L}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    styles: tuple[Style, ...] = ("target", "draft")
    corpus = (
        p.prompt + p.solution
        for family in FAMILIES
        for style in styles
        for p in problems("train", 4000, seed=1, family=family, style=style)
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


Piece = tuple[str, bool]  # text, and whether the loss covers it


def lessons(style: Style, *, seed: int, tally: float) -> Iterator[list[Piece]]:
    """Training problems; a share ``tally`` of them from the second family. The loss covers the solution only."""
    rng = random.Random(f"{style} {seed} lessons")
    shop = problem_stream("train", seed=seed, family="shop", style=style)
    sums = problem_stream("train", seed=seed, family="tally", style=style)
    while True:
        problem = next(sums if rng.random() < tally else shop)
        yield [(problem.prompt, False), (problem.solution + "<eos>", True)]


def drills(seed: int, facts: int = 9) -> Iterator[list[Piece]]:
    """Lines of bare arithmetic. The loss covers the results only."""
    rng = random.Random(f"{seed} drills")
    while True:
        line: list[Piece] = []
        for _ in range(facts):
            op = rng.choice("++---*")
            if op == "+":
                a = rng.randint(1, LARGEST - 1)
                b = rng.randint(1, LARGEST - a)
                value = a + b
            elif op == "-":
                a = rng.randint(2, LARGEST)
                b = rng.randint(1, a - 1)
                value = a - b
            else:
                a, b = rng.randint(1, 9), rng.randint(2, 9)
                value = a * b
            line += [(f" {a} {op} {b} =", False), (f" {value}.", True)]
        yield line


def batch_of(lines: list[list[Piece]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels [B, WIDTH]; labels are -100 where the loss does not look."""
    pieces = [text for line in lines for text, _ in line]
    encoded = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])
    rows = []
    for line in lines:
        ids, labels = [tokenizer.bos_token_id], [-100]
        for _, taught in line:
            piece = next(encoded)
            ids += piece
            labels += piece if taught else [-100] * len(piece)
        rows.append((ids[:WIDTH], labels[:WIDTH]))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (WIDTH - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [-100] * (WIDTH - len(labels)) for _, labels in rows]),
    )


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, family: str, n: int) -> float:
    """Exact match at temperature 1 on validation problems."""
    held_out = problems("validation", n, seed=7, family=family)  # type: ignore[arg-type]
    inputs = tokenizer([p.prompt for p in held_out], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    model.eval()
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=96,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.train()
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(score(p, text) for p, text in zip(held_out, texts, strict=True)) / n


def train(
    role: str,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    drill: float,
    tally: float,
    seed: int,
    evaluate_every: int,
    init: Path | None,
    until: float,
) -> None:
    torch.manual_seed(seed)
    style: Style = "target" if role == "target" else "draft"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_key_value_heads=SHAPES[role]["num_attention_heads"],
        **SHAPES[role],
    )
    config._attn_implementation = "eager"  # at this size faster than SDPA once compiled
    if init is None:
        model = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM.from_pretrained(init, config=config, dtype=torch.float32)
    model.train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    @torch.compile
    def token_losses(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")

    problems_, drills_ = lessons(style, seed=seed, tally=tally), drills(seed)
    rng = random.Random(seed)
    digits = torch.zeros(len(tokenizer), dtype=torch.bool)
    for i in range(len(tokenizer)):
        digits[i] = tokenizer.decode([i]).strip().isdigit()
    log = (out / f"{role}-log.jsonl").open("a")
    started, tokens = time.time(), 0
    for step in range(1, steps + 1):
        progress = step / steps
        scale = min(1.0, step / 60) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        share = drill * max(0.0, 1 - progress / 0.7)  # drills fade out over the first 70 % of the run
        lines = [next(drills_ if rng.random() < share else problems_) for _ in range(batch)]
        ids, labels = batch_of(lines, tokenizer)
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        losses = token_losses(ids, labels)
        taught = labels.flatten() != -100
        loss = losses[taught].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += ids.numel()
        row = {"step": step, "loss": loss.item(), "tokens": tokens, "seconds": round(time.time() - started, 1)}
        row["digit_loss"] = losses[taught][digits[labels.flatten()[taught]]].mean().item()
        if step % evaluate_every == 0 or step == steps:
            row |= {family: accuracy(model, tokenizer, family, 200) for family in FAMILIES}
            model.save_pretrained(out / role)  # float32: the release step rounds to float16
            tokenizer.save_pretrained(out / role)
        if step % 20 == 0 or "shop" in row:
            print(json.dumps(row), flush=True)
        print(json.dumps(row), file=log, flush=True)
        if row.get("shop", 0.0) >= until:
            break


def release(out: Path, into: Path) -> None:
    """Round both models to float16 and put them where :mod:`diversed.pairs` looks for them."""
    for role in SHAPES:
        model = AutoModelForCausalLM.from_pretrained(out / role, dtype=torch.float32).half()
        model.config._attn_implementation = None
        model.config._name_or_path = ""
        model.save_pretrained(into / role)
        AutoTokenizer.from_pretrained(out / role).save_pretrained(into / role)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokenizer", "target", "draft", "release"])
    parser.add_argument("out", type=Path, help="training folder")
    parser.add_argument("into", type=Path, nargs="?", help="where a release goes")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--drill", type=float, default=0.6, help="share of drill lines at the start")
    parser.add_argument("--tally", type=float, default=0.4, help="share of the second family among the problems")
    parser.add_argument("--init", type=Path, help="go on from this model instead of from scratch")
    parser.add_argument("--until", type=float, default=1.0, help="stop at this accuracy on shop validation problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=500)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "tokenizer":
        train_tokenizer().save_pretrained(args.out / "tokenizer")
        return
    if args.what == "release":
        if args.into is None:
            parser.error("release needs INTO, the folder of the package's pair")
        release(args.out, args.into)
        return
    tokenizer = AutoTokenizer.from_pretrained(args.out / "tokenizer")
    settings = {k: v for k, v in vars(args).items() if k not in ("what", "out", "into")}
    train(args.what, tokenizer, args.out, **settings)


if __name__ == "__main__":
    main(sys.argv[1:])
