"""What a worker holds for the runner that it serves, whichever of the two runners that is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diversed.verifiers import LearnedEnsemble
from diversed.verifiers.learned import vocabulary_hash
from diversed.vllm import metrics
from diversed.vllm.blend import Agree, Rows, group_rows, relaxed_logits, to_device
from diversed.vllm.bounds import Bounds
from diversed.vllm.heads import load_heads
from diversed.vllm.phases import find_markers, strict_rows
from diversed.vllm.request import Relaxation, parse_relaxation

logger = logging.getLogger("vllm.diversed")

MODEL_FREE = ("ngram", "ngram_gpu", "suffix")  # proposers that look text up
WANTED = {"everywhere": 0, "inside": 1, "outside": -1}


@dataclass
class Served:
    """A runner's verifiers, its requests' settings, and where each request's reasoning stands."""

    bounds: Bounds
    heads: dict[str, LearnedEnsemble]
    device: torch.device
    tally: metrics.Tally
    agree: Agree
    one_hot: bool  #: the proposer has no probabilities at all
    markers: tuple[int, int] | None = None  #: ids of the tokens around reasoning
    parsed: dict[str, tuple[Any, Relaxation | None]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)  #: blocks, drafted, accepted, weights; for debugging

    def relaxation(self, req_id: str, sampling_params: Any) -> Relaxation | None:
        """A request's setting, parsed once. The server has refused bad ones; what slips through stays lossless."""
        extra = getattr(sampling_params, "extra_args", None)
        known = self.parsed.get(req_id)
        if known is not None and known[0] is extra:
            return known[1]
        try:
            relaxation = parse_relaxation(extra, self.bounds)
        except ValueError as error:
            logger.warning("diversed: request %s is served lossless: %s", req_id, error)
            relaxation = None
        self.parsed[req_id] = (extra, relaxation)
        return relaxation

    def forget(self, alive: Any, slack: int = 256) -> None:
        """At every step: drop settings of requests that are gone; log their figures where debug messages are wanted."""
        for req_id in [i for i in self.figures if i not in alive]:
            blocks, drafted, accepted, weight = self.figures.pop(req_id)
            logger.debug("diversed: request %s: acceptance %.3f, block efficiency %.2f, mean weight %.3f", req_id,
                         accepted / drafted, 1 + accepted / blocks, weight / drafted)  # fmt: skip
        if len(self.parsed) > len(alive) + slack:
            self.parsed = {k: v for k, v in self.parsed.items() if k in alive}
        self.tally.write()  # what an earlier step left on the device

    def relax(
        self, rows: Rows, relaxations: Sequence[Relaxation | None], counts: Sequence[int], inside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits of nu and weights for all drafted rows of a batch; see :func:`relaxed_logits`.

        Args:
            relaxations, counts: per request, its setting and how many of the rows are its.
            inside: [B], whether each request's reasoning is open before the block; None where no phase is asked for.
        """
        strict = None if inside is None else self._strict(rows.draft_tokens, relaxations, counts, inside)
        return relaxed_logits(rows, group_rows(relaxations, counts), self.heads, strict, self.agree)

    def _strict(
        self, tokens: Tensor, relaxations: Sequence[Relaxation | None], counts: Sequence[int], inside: Tensor
    ) -> Tensor:
        assert self.markers is not None
        at = [(b, k) for b, count in enumerate(counts) for k in range(count)]
        request, position = (to_device(x, self.device) for x in zip(*at, strict=True))
        block = torch.full((len(counts), max(counts)), -1, dtype=torch.long, device=self.device)
        block[request, position] = tokens.long()
        wanted = to_device([0 if r is None else WANTED[r.phase] for r in relaxations], self.device)
        return strict_rows(inside, block, wanted, *self.markers)[request, position]

    def count(
        self,
        req_ids: Sequence[str],
        relaxations: Sequence[Relaxation | None],
        counts: Sequence[int],
        weights: Tensor,
        accepted: Tensor,
    ) -> None:
        """Add a step to the metrics: weights [R] of all rows, accepted [B] per request."""
        if logger.isEnabledFor(logging.DEBUG):  # waits for the device
            sums = zip(req_ids, relaxations, counts, torch.split(weights, list(counts)), accepted.tolist(), strict=True)
            for req_id, relaxation, n, w, stay in sums:
                if relaxation is not None and n:
                    so_far = self.figures.setdefault(req_id, [0.0, 0.0, 0.0, 0.0])
                    for i, gain in enumerate((1, n, stay, float(w.sum()))):
                        so_far[i] += gain
        rows: list[int] = []
        buckets: list[int] = []
        row_index: list[int] = []
        requests: list[int] = []
        start = 0
        for b, (relaxation, n) in enumerate(zip(relaxations, counts, strict=True)):
            if relaxation is not None and n:
                tenth = metrics.bucket(relaxation.strictness)
                rows += [tenth] * n
                row_index += range(start, start + n)
                buckets.append(tenth)
                requests.append(b)
            start += n
        if requests:
            rows_, buckets_, row_index_, requests_ = (
                to_device(x, self.device) for x in (rows, buckets, row_index, requests)
            )
            self.tally.add(rows_, weights[row_index_], buckets_, accepted[requests_])


def make_served(vllm_config: Any, bounds: Bounds, device: torch.device) -> Served:
    """Load what a worker needs. Called once the worker knows its device and its place among the ranks.

    Raises:
        ValueError: a head that does not fit the pair, or that the server's way of drafting cannot serve.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    speculation, model = vllm_config.speculative_config, vllm_config.model_config
    one_hot = speculation.draft_sample_method != "probabilistic" or speculation.method in MODEL_FREE
    heads: dict[str, LearnedEnsemble] = {}
    tokenizer = cached_tokenizer_from_config(model)
    if bounds.heads:
        if speculation.method != "draft_model" or one_hot:
            raise ValueError(
                f"heads: learned heads need a draft model and its probabilities; this server has "
                f"method={speculation.method!r}, draft_sample_method={speculation.draft_sample_method!r}. Start with "
                '{"method": "draft_model", "draft_sample_method": "probabilistic", ...}, or without DIVERSED_HEADS'
            )
        if getattr(speculation, "parallel_drafting", False):
            raise ValueError(
                "heads: learned heads look at the draft's hidden states one position after the other, and this server "
                "drafts all positions at once: leave parallel_drafting out, or start without DIVERSED_HEADS"
            )
        draft = speculation.draft_model_config
        heads = load_heads(
            bounds.heads,
            target=model.model,
            draft=draft.model,
            hidden_sizes=(model.get_hidden_size(), draft.get_hidden_size()),
            vocabulary_hash=None if tokenizer is None else vocabulary_hash(tokenizer.get_vocab()),
            same_names=bounds.same_names,
            device=device,
        )
    group = get_tp_group()
    agree: Agree = (lambda weight: group.broadcast(weight.contiguous(), src=0)) if group.world_size > 1 else _same
    return Served(bounds, heads, device, metrics.Tally(device, _path(vllm_config, group.rank_in_group)), agree, one_hot,
                  find_markers(bounds, tokenizer))  # fmt: skip


def _same(weight: Tensor) -> Tensor:
    return weight


def _path(vllm_config: Any, rank: int) -> Path | None:
    folder = os.environ.get(metrics.FOLDER)
    if folder is None or rank != 0 or not Path(folder).is_dir():
        return None
    return Path(folder) / f"{vllm_config.parallel_config.data_parallel_rank}-{os.getpid()}.sums"


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper``, which gets what it wraps as its first argument, in the place of a bound method."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
