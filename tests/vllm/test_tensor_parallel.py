"""Two tensor-parallel ranks on a CPU: every rank samples for itself, and all must sample the same."""

from __future__ import annotations

import os
import zlib

import pytest

pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")

SETTINGS = [None, {"head": "shop", "quality": 0.5}, {"verifier": "static:0.5"}, {"head": "tally", "quality": 0.9},
            {"verifier": "entropy:0.7"}]  # fmt: skip


def watch(worker, shift, shares):
    """In a worker: shift rank 1's head, keep or drop the sharing of weights, and record what each step samples."""
    runner = worker.model_runner
    served = runner.diversed.served
    if not hasattr(runner, "original_sample"):
        runner.original_sample, served.original_agree = runner._sample, served.agree
    served.agree = served.original_agree if shares else lambda weight: weight
    if worker.rank == 1:
        for verifier in served.heads.values():
            verifier.head.out.bias += shift
    runner.seen = []

    def sample(*args):
        out = runner.original_sample(*args)
        runner.seen.append(zlib.crc32(out.sampled_token_ids.contiguous().numpy().tobytes()))
        return out

    runner._sample = sample


def seen(worker):
    return worker.model_runner.seen


@pytest.fixture(scope="module")
def llm():
    from common import make_llm

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the test sends functions to the workers
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    return make_llm(tensor_parallel_size=2, max_num_seqs=64, speculation={"draft_tensor_parallel_size": 2})


def serve(llm, n):
    from diversed.tasks import load_task
    from vllm import SamplingParams

    prompts = [e.prompt for e in load_task("shop", split="test", n=n, seed=9).examples]
    asked = [
        SamplingParams(
            temperature=(0.0, 1.0)[i % 2],
            max_tokens=24,
            extra_args=None if (s := SETTINGS[i % len(SETTINGS)]) is None else {"diversed": s},
        )
        for i in range(n)
    ]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, asked, use_tqdm=False)]


def test_ranks_sample_the_same_over_200_mixed_requests(llm):
    llm.collective_rpc(watch, args=(0.0, True))
    out = serve(llm, 200)
    assert all(len(row) for row in out)
    first, second = llm.collective_rpc(seen)
    assert len(first) > 10
    assert first == second


def test_heads_that_differ_between_ranks_cannot_part_them(llm):
    """Rank 1's head is shifted by far more than a last bit: the weight that counts is rank 0's."""
    llm.collective_rpc(watch, args=(3.0, True))
    serve(llm, 40)
    first, second = llm.collective_rpc(seen)
    assert first == second


def test_without_sharing_such_heads_do_part_them(llm):
    """The control: the two tests above can fail."""
    llm.collective_rpc(watch, args=(3.0, False))
    serve(llm, 40)
    first, second = llm.collective_rpc(seen)
    assert first != second
