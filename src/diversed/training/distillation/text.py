"""The text a draft learns from: the target's own completions of prompts, or given ones, and their batches."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diversed.engine import ModelPair, generate
from diversed.engine.prompts import apply_template, pad, tokenise
from diversed.engine.stopping import Stopping
from diversed.training.run_folder import read_rows, write_rows, writing

Prompt = str | Sequence[Mapping[str, str]]  #: text to continue, or a chat
POOL = 32  # batches' worth of sequences that are sorted by length together


@dataclass(frozen=True)
class Lesson:
    """One prompt with one completion, as token ids."""

    prompt: list[int]
    completion: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def encode(pair: ModelPair, prompts: Sequence[Prompt], max_tokens: int, name: str) -> list[list[int] | None]:
    """Token ids of each prompt; None for one of more than ``max_tokens``, which is left out.

    Cutting a chat would break its template, so long prompts are dropped whole.
    """
    if not prompts:
        raise ValueError(f"{name} holds no prompt: give at least one")
    ids = [tokenise(pair, [p])[0] if isinstance(p, str) else apply_template(pair, p) for p in prompts]
    kept = [row if len(row) <= max_tokens else None for row in ids]
    if not any(kept):
        raise ValueError(
            f"{name}: each of the {len(ids)} prompts is longer than max_prompt_tokens={max_tokens} "
            f"(the shortest has {min(map(len, ids))}): raise it, or shorten the prompts"
        )
    return kept


def given_sequences(
    pair: ModelPair,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int] | None],
    given: Sequence[str | None],
    max_new_tokens: int,
) -> list[Lesson]:
    """Prompts with the completions that came with them, where there is one."""
    return [
        Lesson(ids, given_completion(pair, prompt, ids, text)[:max_new_tokens])
        for prompt, ids, text in zip(prompts, encoded, given, strict=True)
        if ids is not None and text
    ]


def given_completion(pair: ModelPair, prompt: Prompt, ids: list[int], text: str) -> list[int]:
    """Token ids of a given completion and the token that ends it: the chat template's own for a chat."""
    tokenizer: Any = pair.tokenizer
    ends = Stopping.of(pair).eos
    if not isinstance(prompt, str):
        chat = [*prompt, {"role": "assistant", "content": text}]
        whole = list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])
        answer = whole[len(ids) :]
        end = next((i for i, token in enumerate(answer) if token in ends), None)
        if whole[: len(ids)] == ids and end is not None:
            return answer[: end + 1]
    end_token = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
    completion = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return completion if end_token is None else [*completion, end_token]


class OutOfTimeError(Exception):
    """Leaves a batch that the budget has no more time for."""


def sampled_sequences(
    pair: ModelPair,
    prompts: Sequence[list[int] | None],
    path: Path,
    *,
    samples_per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    stop_strings: Sequence[str] = (),
    until: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Lesson]:
    """Completions by the target, kept in ``path`` as JSON lines; what is there already is not sampled again.

    The order is shuffled by ``seed``, so that a run cut short has seen a fair share of every kind of prompt. Each
    completion has a seed of its own: what it is does not depend on when or beside which others it was drawn.

    Args:
        until: on the clock of ``time.perf_counter``. No batch starts that would probably end later, and one that is
            under way then is cut short where it stands: the start of a sample is still a sample of the target's.
    """
    jobs = [(i, k) for k in range(samples_per_prompt) for i, ids in enumerate(prompts) if ids is not None]
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = read_rows(path)
    write_rows(path, rows)  # without a last line that a killed run left half-written
    done = {row["job"] for row in rows}
    waiting = [j for j in order if j not in done]
    taken = 0.0
    assert pair.tokenizer is not None
    for start in range(0, len(waiting), batch_size):
        began = time.perf_counter()
        if until is not None and (began >= until or began + taken > until):
            break
        batch = waiting[start : start + batch_size]
        chosen = [prompts[jobs[j][0]] or [] for j in batch]
        input_ids, attention_mask = pad(chosen)
        tokens: list[list[int]] = [[] for _ in batch]

        def collect(index: int, new: list[int], tokens: list[list[int]] = tokens) -> None:
            tokens[index] += new
            if until is not None and time.perf_counter() > until:
                raise OutOfTimeError

        with contextlib.suppress(OutOfTimeError):
            generate(
                pair,
                input_ids=input_ids,
                attention_mask=attention_mask,
                num_speculative_tokens=0,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_strings=list(stop_strings) or None,
                seed=[seed + 1 + j for j in batch],
                callback=collect,
            )
        fresh = [
            {"job": j, "prompt": jobs[j][0], "tokens": ids, "text": pair.tokenizer.decode(ids)}
            for j, ids in zip(batch, tokens, strict=True)
            if ids
        ]
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in fresh)
        rows += fresh
        taken = time.perf_counter() - began
        progress(len(rows), len(jobs))
    rows.sort(key=lambda row: row["job"])
    return [Lesson(prompts[row["prompt"]] or [], row["tokens"]) for row in rows if row["tokens"]]


@functools.lru_cache(maxsize=2)
def epoch_batches(lengths: tuple[int, ...], batch_size: int, seed: int) -> list[list[int]]:
    """Indices of one pass over the sequences in random order, in batches of similar length."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(order[start : start + POOL * batch_size], key=lengths.__getitem__)
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def batch_at(step: int, lengths: tuple[int, ...], batch_size: int, seed: int) -> list[int]:
    """The batch of a step: a function of step and seed alone, so that a resumed run goes on with the same ones."""
    per_epoch = 0
    for start in range(0, len(lengths), POOL * batch_size):
        per_epoch += -(-min(POOL * batch_size, len(lengths) - start) // batch_size)
    epoch, place = divmod(step, per_epoch)
    return epoch_batches(lengths, batch_size, seed * 1_000_003 + epoch)[place]


@dataclass(frozen=True)
class Batch:
    ids: Tensor  #: [B, T], right-padded
    positions: Tensor  #: [P], which of the B*T flattened positions predict a token that counts
    weights: Tensor  #: [P], 1 for a token of the completion, ``prompt_weight`` for one of the prompt
    rows: Tensor  #: [P], the sequence of each position
    total_weight: float
    tokens: int  #: without padding


def collate(sequences: Sequence[Lesson], prompt_weight: float, device: torch.device) -> Batch:
    """A batch on ``device``. What counts is worked out before the transfer, so that nothing waits for the device."""
    longest = -(-max(map(len, sequences)) // 8) * 8
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    weights = torch.zeros(len(sequences), longest)
    for b, s in enumerate(sequences):
        ids[b, : len(s)] = torch.tensor(s.prompt + s.completion)
        weights[b, : len(s.prompt) - 1] = prompt_weight  # position t predicts token t + 1
        weights[b, len(s.prompt) - 1 : len(s) - 1] = 1.0
    positions = weights.flatten().nonzero().squeeze(1)
    kept = weights.flatten()[positions]
    total = float(kept.sum())
    ids, positions, kept, rows = (to_device(x, device) for x in (ids, positions, kept, positions // longest))
    return Batch(ids, positions, kept, rows, total_weight=total, tokens=sum(map(len, sequences)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def in_batches(sequences: Sequence[Lesson], batch_size: int) -> Iterator[list[tuple[int, Lesson]]]:
    """All sequences with their indices, by length."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(order), batch_size):
        yield [(i, sequences[i]) for i in order[start : start + batch_size]]
