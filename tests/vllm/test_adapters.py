"""What the adapters of both runners do by themselves, on stand-ins for vLLM's runners: no vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diversed.vllm import metrics, v1, v2
from diversed.vllm.bounds import Bounds
from diversed.vllm.served import Served


def served(one_hot: bool = True) -> Served:
    device = torch.device("cpu")
    return Served(Bounds(), {}, device, metrics.Tally(device, None), lambda weight: weight, one_hot)


def test_drafts_that_vllm_put_there_itself_stay_lossless():
    """Near the end of somebody's context, V1 proposes nothing for the whole batch and schedules token 0 as drafts."""
    params = SimpleNamespace(extra_args={"diversed": {"verifier": "static:0.2"}})
    runner = SimpleNamespace(
        requests={name: SimpleNamespace(sampling_params=params) for name in "ab"},
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        execute_model_state=None,
    )
    adapter = v1.Adapter(runner, served(), None)
    drafts = SimpleNamespace(num_draft_tokens=[2, 2])
    seen: list[v1.Step | None] = []

    def step(fits: bool, ids: list[str]) -> None:
        runner.input_batch.req_ids = ids
        drafts.num_draft_tokens = [2] * len(ids)

        def sample_tokens() -> None:
            adapter.sample(lambda *_: seen.append(v1.STEP.get()), None, drafts)
            if fits:
                adapter.propose(lambda: None)

        adapter.sample_tokens(sample_tokens)

    step(fits=True, ids=["a", "b"])
    assert seen.pop() is None  # nobody has proposed these
    step(fits=False, ids=["a", "b"])
    assert all(r is not None for r in seen.pop().relaxations)
    step(fits=True, ids=["a"])
    assert seen.pop() is None  # zeros, put there by the step before
    step(fits=True, ids=["a", "b"])
    assert [r is not None for r in seen.pop().relaxations] == [True, False]  # b's are zeros still
    step(fits=True, ids=["a", "b"])
    assert all(r is not None for r in seen.pop().relaxations)
    del runner.requests["b"]
    step(fits=True, ids=["a"])
    assert adapter.proposed_for == {"a"}


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def test_writing_a_drafts_hidden_states_reads_nothing_from_the_device():
    adapter = v2.Adapter(SimpleNamespace(), served(), [], torch.zeros(4, 3, 2), None)

    def original(hidden_states, idx_mapping, draft_step):
        return hidden_states

    hidden = torch.arange(4.0).view(2, 2) + 1
    with Reads() as reads:
        adapter.sample_draft(original, hidden, torch.tensor([2, -1]), torch.tensor(1))
    assert reads.count == 0
    assert torch.equal(adapter.draft_hidden[2, 1], hidden[0])
    assert torch.equal(adapter.draft_hidden[3, 1], hidden[1])  # padded rows go to the last slot
    assert int((adapter.draft_hidden != 0).sum()) == 4
    adapter.sample_draft(original, hidden, torch.tensor([0, 1]), 2)
    assert torch.equal(adapter.draft_hidden[:2, 2], hidden)
