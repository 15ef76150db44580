"""Model runner V2 with its Triton kernels in Triton's interpreter (see interpreter/sitecustomize.py): no GPU.

The interpreter is slow, so that distributions are tested on the rejection sampler itself, and the engine on few tokens.
Everything runs in processes of their own, since Triton reads its environment once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")
pytest.importorskip("triton", reason="needs Triton")

HERE = Path(__file__).parent

SAMPLER = """
import json, sys, torch
from diversed.verifiers import EnsembleHead, LearnedEnsemble
from diversed.vllm.request import Relaxation
from diversed.vllm.selftest import check, run_v2

torch.manual_seed(0)
head = EnsembleHead(6, 4)
torch.nn.init.normal_(head.out.weight)
heads = {"a": LearnedEnsemble(head.eval().requires_grad_(False))}
settings = [None] + [Relaxation("static", "", w, 0.5, "everywhere") for w in (0.8, 0.2, 0.0)]
settings += [Relaxation("head", "a", 0.0, d, "everywhere") for d in (0.5, 0.8)]
found = check(run_v2, settings, heads, n=int(sys.argv[1]), device=torch.device("cpu"))
print(json.dumps([[f.setting, f.acceptance, f.expected, f.distance, f.ok] for f in found]))
"""

ENGINE = """
import json, sys
from common import counters, make_llm
from conftest import os

if __name__ == "__main__":
    from vllm import SamplingParams
    llm = make_llm(max_num_seqs=8, max_num_batched_tokens=1024)
    prompts, settings = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    rows = []
    for temperature in (0.0, 1.0):
        before = counters(llm)
        asked = [SamplingParams(temperature=temperature, max_tokens=int(sys.argv[3]), seed=i if s == 1 else None,
                                extra_args={"diversed": s} if isinstance(s, dict) else None)
                 for s in settings for i, _ in enumerate(prompts)]
        out = llm.generate(prompts * len(settings), asked, use_tqdm=False)
        rows.append([list(o.outputs[0].token_ids) for o in out])
        after = counters(llm)
    print("RESULT" + json.dumps(rows))
"""


def run(code: str, *arguments: str, plugins: str | None = None) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE / "interpreter"), str(HERE)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    script = Path(tempfile.gettempdir()) / f"diversed-v2-{os.getpid()}.py"
    script.write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True
        )
    finally:
        script.unlink()
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def test_rejection_sampler_follows_nu_in_a_mixed_batch():
    found = json.loads(run(SAMPLER, "250").strip().splitlines()[-1])
    assert len(found) == 6
    for setting, acceptance, expected, distance, ok in found:
        assert ok, (setting, acceptance, expected, distance)
    rates = [acceptance for _, acceptance, *_ in found[:4]]
    assert rates == sorted(rates)


@pytest.fixture(scope="module")
def prompts():
    from diversed.tasks import load_task

    return [e.prompt for e in load_task("shop", split="test", n=3, seed=5).examples]


def test_engine_serves_each_request_its_own_setting(pair, prompts):
    """T = 0, float32: a mixed batch gives the native engine's tokens for every setting."""
    from common import N, verifier

    from diversed import generate

    settings = [None, {"verifier": "static:0.5"}, {"head": "shop", "quality": 0.5}, {"verifier": "static:0"}]
    out = run(ENGINE, json.dumps(prompts), json.dumps(settings), "20")
    (line,) = [x for x in out.splitlines() if x.startswith("RESULT")]
    greedy, sampled = json.loads(line.removeprefix("RESULT"))
    assert all(len(row) == 20 for row in greedy + sampled)
    for i, setting in enumerate(settings):
        for j, prompt in enumerate(prompts):
            mine = greedy[i * len(prompts) + j]
            ids = torch.tensor([pair.tokenizer.encode(prompt) + mine[:1]])
            native = generate(
                pair,
                input_ids=ids,
                verifier=verifier(setting),
                num_speculative_tokens=N,
                max_new_tokens=40,
                temperature=0.0,
            )
            assert mine[1:] == native.token_ids[0][:19], setting


def test_requests_that_say_nothing_are_untouched(prompts):
    """Greedy and seeded sampling: the same tokens with the plug-in and without."""
    both = []
    for plugins in (None, "none"):
        out = run(ENGINE, json.dumps(prompts[:2]), json.dumps([1]), "10", plugins=plugins)
        both.append(next(x for x in out.splitlines() if x.startswith("RESULT")))
    assert both[0] == both[1]
