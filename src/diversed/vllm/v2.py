"""The adapter for vLLM's model runner V2.

Wrapped on the instance: the runner's ``add_requests`` and ``sample`` and the speculator's ``sample_draft``; in its
module: ``rejection_sample``. While a batch holds no relaxed request, the wrappers only call what they wrap.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diversed.vllm.blend import Rows, to_device
from diversed.vllm.phases import PhaseTracker
from diversed.vllm.request import Relaxation
from diversed.vllm.served import Served, wrap_method

STEP: contextvars.ContextVar[Step | None] = contextvars.ContextVar("diversed_v2_step", default=None)


@dataclass
class Step:
    """One verification step: what ``rejection_sample`` cannot see. Large batches reach it in chunks of requests."""

    served: Served
    req_ids: list[str]
    relaxations: list[Relaxation | None]  #: per request of the batch
    ends: list[int]  #: cumulative rows [B+1]; a request's last row is its bonus row
    target_hidden: Tensor | None  #: [all rows, H]
    draft_hidden: Tensor | None  #: the persistent buffer [slots, N, H]
    inside: Tensor | None  #: [B]
    start: int = 0  #: the first request of the next chunk


@dataclass
class Adapter:
    """The wrapped methods of one runner."""

    runner: Any
    served: Served
    relaxations: list[Relaxation | None]  #: by request slot
    draft_hidden: Tensor | None  #: [slots + 1, N, H_draft], written while drafting; None without heads
    tracker: PhaseTracker | None

    def add_requests(self, original: Callable[..., Any], scheduler_output: Any) -> Any:
        out = original(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.runner.req_states.req_id_to_index[new.req_id]
            self.served.parsed.pop(new.req_id, None)
            self.relaxations[slot] = relaxation = self.served.relaxation(new.req_id, new.sampling_params)
            if relaxation is not None and relaxation.phase != "everywhere" and self.tracker is not None:
                self.tracker.begin(slot, new.prefill_token_ids)
        return out

    def sample(
        self, original: Callable[..., Any], hidden_states: Tensor, input_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        slots = input_batch.idx_mapping_np.tolist()
        self.served.forget(self.runner.req_states.req_id_to_index)
        relaxations = [self.relaxations[slot] for slot in slots]
        if not any(relaxations):
            return original(hidden_states, input_batch, *args, **kwargs)
        follows = self.tracker is not None and any(r is not None and r.phase != "everywhere" for r in relaxations)
        step = None
        if input_batch.num_draft_tokens:
            heads = any(r is not None and r.kind == "head" for r in relaxations)
            step = Step(
                self.served,
                list(input_batch.req_ids)[: len(slots)],
                relaxations,
                input_batch.cu_num_logits_np.tolist(),
                hidden_states[input_batch.logits_indices] if heads else None,
                self.draft_hidden,
                self.tracker.at(slots) if follows and self.tracker is not None else None,
            )
        token = STEP.set(step)
        try:
            out = original(hidden_states, input_batch, *args, **kwargs)
        finally:
            STEP.reset(token)
        if follows and self.tracker is not None:
            sampled, num_sampled = out[0].sampled_token_ids, out[1]
            column = torch.arange(sampled.shape[1], device=sampled.device)
            self.tracker.advance(slots, torch.where(column < num_sampled.unsqueeze(1), sampled.long(), -1))
        return out

    def sample_draft(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.draft_hidden is not None
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        step = given["draft_step"]
        if isinstance(step, Tensor):
            step = step.reshape(1)  # an index without dimensions would be read by the host, which waits for the device
        # Padded rows have index -1: the last slot, which is nobody's.
        self.draft_hidden[given["idx_mapping"], step] = given["hidden_states"].to(self.draft_hidden.dtype)
        return original(*args, **kwargs)


def attach(runner: Any, served: Served) -> Adapter:
    """Wrap one runner and its speculator."""
    config = runner.vllm_config
    slots, n = runner.max_num_reqs, config.speculative_config.num_speculative_tokens
    buffer = tracker = None
    if served.heads:
        size = config.speculative_config.draft_model_config.get_hidden_size()
        # Allocated here: drafting may run inside a CUDA graph.
        buffer = torch.zeros(slots + 1, n, size, dtype=config.model_config.dtype, device=served.device)
    if served.markers is not None:
        tracker = PhaseTracker(slots, served.markers, served.device)
    adapter = Adapter(runner, served, [None] * slots, buffer, tracker)
    runner.diversed = adapter  # for whoever inspects a worker
    wrapped: list[tuple[Any, str, Callable[..., Any]]]
    wrapped = [(runner, "add_requests", adapter.add_requests), (runner, "sample", adapter.sample)]
    if buffer is not None:
        wrapped.append((runner.speculator, "sample_draft", adapter.sample_draft))
    for owner, name, wrapper in wrapped:
        wrap_method(owner, name, wrapper)
    return adapter


def wrap_rejection_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """``rejection_sample`` with nu in the place of the target, where a step says so."""
    signature = inspect.signature(original)

    def rejection_sample(*args: Any, **kwargs: Any) -> Any:
        step = STEP.get()
        if step is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        first, last = step.start, step.start + given["idx_mapping"].shape[0]
        step.start = last
        relaxations = step.relaxations[first:last]
        if not any(relaxations):
            return original(*args, **kwargs)
        counts = [step.ends[b + 1] - step.ends[b] - 1 for b in range(first, last)]
        drafted = _drafted_rows(step, first, last, counts, given)
        if drafted is None:
            return original(*args, **kwargs)
        index, rows = drafted
        inside = None if step.inside is None else step.inside[first:last]
        relaxed, weights = step.served.relax(rows, relaxations, counts, inside)
        # In float32, which the kernels compute in: exact for the rows that stay.
        given["target_logits"] = given["target_logits"].float().index_copy(0, index, relaxed)
        out = original(*bound.args, **bound.kwargs)
        step.served.count(step.req_ids[first:last], relaxations, counts, weights, out[1] - 1)
        return out

    return rejection_sample


def _drafted_rows(
    step: Step, first: int, last: int, counts: list[int], given: dict[str, Any]
) -> tuple[Tensor, Rows] | None:
    """Which rows of a chunk are drafted positions, and what is known of them; None where nothing was drafted."""
    begin = step.ends[first]
    at = [step.ends[b] - begin + k for b, count in zip(range(first, last), counts, strict=True) for k in range(count)]
    if not at:
        return None
    index = to_device(at, step.served.device)
    slots = given["expanded_idx_mapping"][index].long()
    position = given["expanded_local_pos"][index].long()
    draft_probs = None
    if given["draft_logits"] is not None:
        temperature = given["temperature"][slots]
        scale = torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
        draft_probs = (given["draft_logits"][slots, position].float() / scale).softmax(-1)
    target_hidden = None if step.target_hidden is None else step.target_hidden[index + begin]
    draft_hidden = None
    if target_hidden is not None and step.draft_hidden is not None:
        draft_hidden = step.draft_hidden[slots, position]
    tokens = given["draft_sampled"][index + 1].long()
    return index, Rows(given["target_logits"][index].float(), draft_probs, tokens, target_hidden, draft_hidden)
