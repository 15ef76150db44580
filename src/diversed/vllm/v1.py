"""The adapter for vLLM's model runner V1.

Three methods of one runner and one of its proposer are wrapped on the instance, and ``rejection_sample`` in its module.
While a batch holds no relaxed request, the wrappers only call what they wrap.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diversed.vllm.blend import Rows, to_device
from diversed.vllm.phases import PhaseTracker
from diversed.vllm.request import Relaxation
from diversed.vllm.served import Served, wrap_method

STEP: contextvars.ContextVar[Step | None] = contextvars.ContextVar("diversed_v1_step", default=None)


@dataclass
class Step:
    """One verification step: what ``rejection_sample`` cannot see."""

    served: Served
    req_ids: list[str]
    relaxations: list[Relaxation | None]  #: per request, in the batch's order
    target_hidden: Tensor | None  #: [R, H] at the drafted positions
    draft_hidden: Tensor | None  #: [R, H]
    inside: Tensor | None  #: [B]


@dataclass
class Adapter:
    """The wrapped methods of one runner."""

    runner: Any
    served: Served
    draft_hidden: Tensor | None  #: [max requests, N, H_draft], written while drafting; None without heads
    tracker: PhaseTracker | None = None
    slots: dict[str, int] = field(default_factory=dict)  #: of requests whose phase matters
    free: list[int] = field(default_factory=list)
    proposed: bool = False  #: in the step under way
    drafted: int = 0  #: positions written in the present block
    drafted_for: list[str] = field(default_factory=list)  #: request ids of the rows of draft_hidden
    #: Requests whose latest drafts a proposer made. Where one of a batch has come near the context's end, vLLM proposes
    #: nothing for any of them and puts token 0 in the drafts' place.
    proposed_for: set[str] = field(default_factory=set)
    force_probs: bool = False  #: some request of the batch is relaxed
    hidden: Tensor | None = None  #: the target's hidden states of the step under way

    def relaxations(self) -> list[Relaxation | None]:
        requests = self.runner.requests
        self.served.forget(requests)
        return [self.served.relaxation(i, requests[i].sampling_params) for i in self.runner.input_batch.req_ids]

    def sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self.runner.execute_model_state
        self.hidden = None if state is None else state.sample_hidden_states
        self.proposed = False
        try:
            return original(*args, **kwargs)
        finally:
            self.hidden = None
            batch = set(self.runner.input_batch.req_ids)
            kept = self.proposed_for & self.runner.requests.keys()
            self.proposed_for = kept | batch if self.proposed else kept - batch

    def sample(self, original: Callable[..., Any], logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        relaxations = self.relaxations()
        if not any(relaxations):
            return original(logits, spec_decode_metadata)
        slots = self.follow(relaxations)
        if spec_decode_metadata is None:
            out = original(logits, spec_decode_metadata)
        else:
            ids = self.runner.input_batch.req_ids
            drafted = [r if i in self.proposed_for else None for i, r in zip(ids, relaxations, strict=True)]
            token = STEP.set(self.step(drafted, spec_decode_metadata, slots) if any(drafted) else None)
            try:
                out = original(logits, spec_decode_metadata)
            finally:
                STEP.reset(token)
        if slots:
            self.advance(slots, out.sampled_token_ids)
        return out

    def step(self, relaxations: list[Relaxation | None], metadata: Any, slots: dict[int, int]) -> Step | None:
        """What the sampler needs to know, or None where a head's inputs are missing: the step is then lossless."""
        target_hidden = draft_hidden = None
        if any(r is not None and r.kind == "head" for r in relaxations):
            if self.hidden is None or self.draft_hidden is None:
                return None
            row = {req_id: i for i, req_id in enumerate(self.drafted_for)}
            at = [
                (row.get(req_id, -1), k)
                for req_id, count in zip(self.runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True)
                for k in range(count)
            ]
            if any(i < 0 for i, _ in at):
                return None
            index = to_device(at, self.served.device)
            draft_hidden = self.draft_hidden[index[:, 0], index[:, 1]] if at else None
            target_hidden = self.hidden[metadata.target_logits_indices]
        inside = None
        if slots and self.tracker is not None:
            inside = self.tracker.at([slots.get(b, self.tracker.inside.shape[0] - 1) for b in range(len(relaxations))])
        return Step(
            self.served, list(self.runner.input_batch.req_ids), relaxations, target_hidden, draft_hidden, inside
        )

    def propose(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.force_probs = any(self.relaxations())
        self.proposed = True
        self.drafted = 0
        self.drafted_for = []
        try:
            out = original(*args, **kwargs)
        finally:
            self.force_probs = False
        if self.drafted:
            self.drafted_for = list(self.runner.input_batch.req_ids)
        return out

    def sample_draft(self, original: Callable[..., Any], hidden_states: Tensor, sampling_metadata: Any) -> Any:
        drafter = self.runner.drafter
        buffer = self.draft_hidden
        if buffer is not None and self.drafted < buffer.shape[1] and len(hidden_states) <= len(buffer):
            buffer[: len(hidden_states), self.drafted].copy_(hidden_states)
            self.drafted += 1
        if self.force_probs and sampling_metadata.all_greedy and not self.served.one_hot:
            # vLLM keeps no draft probabilities for all-greedy batches; the blend needs those of temperature 1.
            logits = drafter.model.compute_logits(hidden_states)
            return logits.argmax(-1), logits.softmax(-1, dtype=torch.float32)
        return original(hidden_states, sampling_metadata)

    def follow(self, relaxations: list[Relaxation | None]) -> dict[int, int]:
        """Place in the batch -> slot, of the requests whose phase matters; new ones enter the tracker."""
        if self.tracker is None or all(r is None or r.phase == "everywhere" for r in relaxations):
            return {}
        requests, ids = self.runner.requests, self.runner.input_batch.req_ids
        self.release([i for i in self.slots if i not in requests])
        if len(self.free) < len(ids):
            self.release(set(self.slots) - set(ids))  # preempted ones: read again from their tokens on return
        slots = {}
        for b, (req_id, relaxation) in enumerate(zip(ids, relaxations, strict=True)):
            if relaxation is None or relaxation.phase == "everywhere":
                continue
            if req_id not in self.slots:
                self.slots[req_id] = self.free.pop()
                request = requests[req_id]
                known = [*(request.prompt_token_ids or ()), *(t for t in request.output_token_ids if t >= 0)]
                self.tracker.begin(self.slots[req_id], known)
            slots[b] = self.slots[req_id]
        return slots

    def release(self, req_ids: Iterable[str]) -> None:
        self.free += [self.slots.pop(i) for i in req_ids]

    def advance(self, slots: dict[int, int], tokens: Tensor) -> None:
        assert self.tracker is not None
        places = to_device(list(slots), self.served.device)
        new = tokens[places].long()
        # A prompt that is read in chunks samples tokens that nobody keeps.
        discarded = self.runner.discard_request_mask.gpu[places]
        self.tracker.advance(list(slots.values()), torch.where(discarded.bool().unsqueeze(1), -1, new))


def attach(runner: Any, served: Served) -> Adapter:
    """Wrap one runner and its proposer."""
    config = runner.vllm_config
    most, n = config.scheduler_config.max_num_seqs, config.speculative_config.num_speculative_tokens
    buffer = None
    if served.heads:
        size = config.speculative_config.draft_model_config.get_hidden_size()
        buffer = torch.zeros(most, n, size, dtype=config.model_config.dtype, device=served.device)
    adapter = Adapter(runner, served, buffer)
    runner.diversed = adapter  # for whoever inspects a worker
    if served.markers is not None:
        # The last slot is nobody's: it stands for requests whose phase does not matter. Requests that wait while
        # preempted keep their slots, hence the room.
        adapter.tracker = PhaseTracker(4 * most + 1, served.markers, served.device)
        adapter.free = list(range(4 * most))
    for owner, name, wrapper in (
        (runner, "sample_tokens", adapter.sample_tokens),
        (runner, "_sample", adapter.sample),
        (runner, "propose_draft_token_ids", adapter.propose),
        (runner.drafter, "_sample_draft_tokens", adapter.sample_draft),
    ):
        if hasattr(owner, name):  # proposers without a model, such as n-gram, have no draft to sample
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
        if given["draft_probs"] is None and not step.served.one_hot:
            return original(*args, **kwargs)  # vLLM has lost the draft's probabilities: this step stays lossless
        counts = given["num_draft_tokens"]
        rows = Rows(given["target_logits"], given["draft_probs"], given["draft_token_ids"], step.target_hidden,
                    step.draft_hidden)  # fmt: skip
        given["target_logits"], weights = step.served.relax(rows, step.relaxations, counts, step.inside)
        out = original(*bound.args, **bound.kwargs)
        step.served.count(step.req_ids, step.relaxations, counts, weights, (out >= 0).sum(1) - 1)
        return out

    return rejection_sample
