"""Train the heads of the embedded pair by counterfactual regression (docs/method.md, "Learning the weight").

    python -m diversed.pairs.train_heads shop OUT --labels 6000

At a rejection the sequence can go on with the target's token or with the draft's. Both are finished under the
current policy and the difference of their rewards is one label of d(s), what the target's judgement is worth at
that state. The head regresses d on both models' hidden states; strict iff d exceeds a price is then the best weight
for that price, and w = sigmoid((d - price) / tau) its soft form, whose dial is the price.

Labels come in two rounds: from lossless rollouts, then from rollouts of the head so far, at its own quality, where
the mistakes compound that it will meet in use.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diversed.engine import ModelPair, generate
from diversed.tasks.word_problems import FAMILIES, Family, Problem, problems, score
from diversed.verification import residual_distribution, sample
from diversed.verifiers import EnsembleHead, LearnedEnsemble, Lossless, Verifier

BATCH = 64
N = 5
MAX_NEW_TOKENS = 96


@dataclass
class Labels:
    """Head inputs [M, size] and labels [M]: reward with the target's token minus reward with the draft's."""

    inputs: Tensor
    values: Tensor


def collect(
    pair: ModelPair, head: EnsembleHead, policy: Verifier, drawn: list[Problem], per_rollout: int, seed: int
) -> Labels:
    """Roll out, pick rejections, finish both branches under the policy."""
    rng = random.Random(seed)
    inputs: list[Tensor] = []
    values: list[float] = []
    for start in range(0, len(drawn), BATCH):
        chunk = drawn[start : start + BATCH]
        rollout = generate(
            pair,
            [p.prompt for p in chunk],
            verifier=policy,
            num_speculative_tokens=N,
            max_new_tokens=MAX_NEW_TOKENS,
            seed=seed + start,
            bonus="verifier",
            trace=True,
        )
        assert rollout.trace is not None
        branches: list[tuple[int, int]] = []  # (sequence, position)
        for b, trace in enumerate(rollout.trace):
            # States are visited in proportion to how often they reject under w = 1, which is TV.
            tv = trace.total_variation.nan_to_num(0.0).tolist()
            reachable = [t for t, x in enumerate(tv) if x > 1e-3]
            for t in set(rng.choices(reachable, [tv[t] for t in reachable], k=per_rollout)) if reachable else ():
                branches.append((b, t))
        if not branches:
            continue
        prefixes = [rollout.prompt_ids[b] + rollout.token_ids[b][:t] for b, t in branches]
        p, q, h_target, h_draft = next_distributions(pair, prefixes)
        g = torch.Generator().manual_seed(seed + start)
        u = torch.rand(2, len(branches), generator=g, dtype=torch.float64)
        ours, theirs = sample(residual_distribution(p, q), u[0]), sample(residual_distribution(q, p), u[1])
        rewards = []
        for tokens in (ours.tolist(), theirs.tolist()):
            texts = finish(pair, policy, prefixes, tokens, seed + start + 1)
            prompts_ = [len(rollout.prompt_ids[b]) for b, _ in branches]
            rewards.append(
                [
                    score(chunk[b], decode_tail(pair, [*prefix[n:], x]) + text)
                    for (b, _), prefix, n, x, text in zip(branches, prefixes, prompts_, tokens, texts, strict=True)
                ]
            )
        inputs.append(head.inputs(p, q, h_target, h_draft))
        values += [a - b for a, b in zip(*rewards, strict=True)]
    return Labels(torch.cat(inputs), torch.tensor(values))


@torch.no_grad()
def next_distributions(pair: ModelPair, prefixes: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, q and both hidden states behind each prefix, by plain forward passes (right-padded, causal)."""
    width = max(map(len, prefixes))
    ids = torch.tensor([x + [0] * (width - len(x)) for x in prefixes])
    rows, last = torch.arange(len(prefixes)), torch.tensor([len(x) - 1 for x in prefixes])
    out: list[Tensor] = []
    for model in (pair.target, pair.draft):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, last]
        out += [torch.softmax(model.get_output_embeddings()(hidden).float(), -1), hidden.float()]
    return out[0], out[2], out[1], out[3]


def finish(pair: ModelPair, policy: Verifier, prefixes: list[list[int]], tokens: list[int], seed: int) -> list[str]:
    """Continue each prefix and its next token to the end, in batches."""
    texts = [""] * len(prefixes)
    going = [i for i, x in enumerate(tokens) if x != pair.tokenizer.eos_token_id]  # type: ignore[union-attr]
    for start in range(0, len(going), 2 * BATCH):
        part = going[start : start + 2 * BATCH]
        width = 1 + max(len(prefixes[i]) for i in part)
        rows = [[0] * (width - 1 - len(prefixes[i])) + prefixes[i] + [tokens[i]] for i in part]
        mask = torch.tensor([[0] * (width - 1 - len(prefixes[i])) + [1] * (len(prefixes[i]) + 1) for i in part])
        out = generate(
            pair,
            input_ids=torch.tensor(rows),
            attention_mask=mask,
            verifier=policy,
            num_speculative_tokens=N,
            max_new_tokens=MAX_NEW_TOKENS,
            seed=seed + start,
        )
        for i, text in zip(part, out.texts, strict=True):
            texts[i] = text
    return texts


def decode_tail(pair: ModelPair, ids: list[int]) -> str:
    return str(pair.tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[union-attr]


def fit(head: EnsembleHead, labels: Labels, *, price: float, tau: float, decay: float, seed: int) -> dict[str, float]:
    """Ridge regression of d in closed form, then the head's log-odds are (d - price) / tau."""
    head.fit_normalisation(labels.inputs)
    x = ((labels.inputs - head.mean) / head.scale).double()
    y = labels.values.double()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held, used = order[: len(y) // 10], order[len(y) // 10 :]

    def solve(rows: Tensor) -> Tensor:
        a = torch.cat([x[rows], torch.ones(len(rows), 1, dtype=torch.double)], 1)
        penalty = decay * len(rows) * torch.eye(a.shape[1], dtype=torch.double)
        penalty[-1, -1] = 0
        solution: Tensor = torch.linalg.solve(a.T @ a + penalty, a.T @ y[rows])
        return solution

    coefficients = solve(used)
    error = (x[held] @ coefficients[:-1] + coefficients[-1] - y[held]).square().mean().item()
    final = solve(order)
    with torch.no_grad():
        head.out.weight.copy_((final[:-1] / tau).float().unsqueeze(0))
        head.out.bias.fill_(float((final[-1] - price) / tau))
    return {
        "held_out_mse": round(error, 4),
        "label_variance": round(y.var().item(), 4),
        "mean_label": round(y.mean().item(), 4),
    }


def measured(pair: ModelPair, verifier: Verifier, family: Family, n: int = 300) -> dict[str, float]:
    """Exact match and acceptance rate on validation problems that no label came from."""
    held_out = problems("validation", n, seed=3, family=family)
    out = generate(
        pair,
        [p.prompt for p in held_out],
        verifier=verifier,
        num_speculative_tokens=N,
        max_new_tokens=MAX_NEW_TOKENS,
        seed=0,
        batch_size=2 * BATCH,
    )
    right = sum(score(p, text) for p, text in zip(held_out, out.texts, strict=True))
    return {"exact match": round(right / n, 3), "acceptance rate": round(out.stats.acceptance_rate or 0.0, 3)}


def save(head: EnsembleHead, pair: ModelPair, family: Family, training: dict[str, Any], into: Path) -> None:
    """Write the head with its settings and what it measures on 300 validation problems, T = 1, N = 5."""
    figures = {f"lossless, {k}": v for k, v in measured(pair, Lossless(), family).items()}
    for quality in (0.9, 0.5, 0.1):
        row = measured(pair, LearnedEnsemble(head).at(quality=quality), family)
        figures |= {f"quality {quality}, {k}": v for k, v in row.items()}
    done = EnsembleHead(*pair.hidden_sizes, pair=pair.describe(), task=family, training=training, figures=figures)
    done.load_state_dict(head.state_dict())
    (into / "README.md").unlink(missing_ok=True)  # the mixin keeps an old card, which would contradict the new config
    done.save_pretrained(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--labels", type=int, default=3000)
    parser.add_argument("--price", type=float, default=0.2)
    parser.add_argument("--tau", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.time()
    pair = ModelPair.embedded()
    family: Family = args.task
    head = EnsembleHead(*pair.hidden_sizes, pair=pair.describe(), task=family).eval().requires_grad_(False)
    gathered: list[Labels] = []
    policy: Verifier = Lossless()
    for turn, share in enumerate((0.5, 0.5)):
        per_rollout = 6
        count = max(BATCH, int(args.labels * share / per_rollout))
        drawn = problems("train", count, seed=100 + args.seed * 10 + turn, family=family)
        gathered.append(collect(pair, head, policy, drawn, per_rollout, seed=args.seed + 1000 * turn))
        together = Labels(torch.cat([g.inputs for g in gathered]), torch.cat([g.values for g in gathered]))
        # Half the price while collecting: a cautious policy keeps the states it meets close to those of use.
        price = args.price / 2 if turn == 0 else args.price
        figures = fit(head, together, price=price, tau=args.tau, decay=args.decay, seed=args.seed)
        policy = LearnedEnsemble(head)
        print(
            json.dumps(
                {"round": turn, "labels": len(together.values), "seconds": round(time.time() - started)} | figures
            )
        )
    training = {k: v for k, v in vars(args).items() if k not in ("out", "task")} | {"objective": "counterfactual"}
    save(head, pair, family, training | {"labels": len(together.values)}, args.out)


if __name__ == "__main__":
    main()
