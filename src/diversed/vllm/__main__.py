"""``python -m diversed.vllm doctor``: whether the plug-in would be active here, and a self-test."""

from __future__ import annotations

import dataclasses
import sys
import time
from importlib.metadata import entry_points

import torch

from diversed import __version__
from diversed.verifiers import LearnedEnsemble
from diversed.vllm import contract, plugin
from diversed.vllm.bounds import Bounds, read_bounds
from diversed.vllm.request import Relaxation


def doctor() -> int:
    """Print versions, what is wrapped, bounds, heads, and a self-test's outcome. Returns the exit status."""
    print(f"diversed {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    try:
        from vllm import __version__ as vllm_version
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}). Install it beside this package: pip install 'diversed[vllm]'")
        return 1
    print(f"vLLM {vllm_version}")
    loads = [e for e in entry_points(group="vllm.general_plugins") if e.name == "diversed"]
    if not loads:
        print("not registered: the package was installed without its entry points; pip install it again")
    faults = [] if loads else ["no entry point"]
    try:
        bounds = read_bounds()
    except ValueError as error:
        print(f"bounds: {error}")
        return 1
    print("bounds:")
    for field in dataclasses.fields(bounds):
        print(f"  {field.name} = {getattr(bounds, field.name)!r}")
    faults += plugin.find_faults()
    for title, needs in (("common", contract.COMMON), ("runner V1", contract.V1), ("runner V2", contract.V2)):
        found = contract.differences(needs, contract.read_installed)
        print(f"{title}: {'fits' if not found else 'differs'}")
        # One runner that does not fit leaves the other at work: find_faults() is silent, a server with it is not.
        faults += [f"with {title}: {difference}" for difference in found if difference not in faults]
        for need in needs:
            if need.wrapped:
                print(f"  wraps {need.module}.{need.name}")
    for fault in faults:
        print(f"NOT ACTIVE: {fault}")
    heads = load(bounds)
    return 1 if faults or heads is None or not self_test(heads) else 0


def load(bounds: Bounds) -> dict[str, LearnedEnsemble] | None:
    """The heads, without a pair to hold them against; None where one cannot be loaded."""
    heads: dict[str, LearnedEnsemble] = {}
    for name, source in bounds.heads.items():
        try:
            heads[name] = LearnedEnsemble.from_pretrained(source)
        except Exception as error:  # huggingface_hub and safetensors raise a dozen kinds
            print(f"head {name}: {source} cannot be loaded ({str(error).splitlines()[0]})")
            return None
        head = heads[name].head
        print(f"head {name}: hidden sizes {head.target_hidden_size} and {head.draft_hidden_size}, made for "
              f"{head.pair.get('target', '(unnamed)')} with {head.pair.get('draft', '(unnamed)')}")  # fmt: skip
    return heads


def self_test(heads: dict[str, LearnedEnsemble]) -> bool:
    """Compare what vLLM's samplers emit with nu, in each runner that works here."""
    from vllm.triton_utils import HAS_TRITON

    from diversed.vllm.selftest import check, run_v1, run_v2

    plugin.repair_kernels()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings: list[Relaxation | None] = [None, *(Relaxation("static", "", w, 0.5, "everywhere") for w in (0.8, 0.3))]
    size = None
    chosen = {}
    for name, verifier in heads.items():  # those of one pair share their sizes
        sizes = verifier.head.target_hidden_size, verifier.head.draft_hidden_size
        size = size or sizes
        if sizes == size:
            chosen[name] = verifier.to(device)
            settings.append(Relaxation("head", name, 0.0, 0.5, "everywhere"))
    good = True
    runs = [("V1", run_v1)] + ([("V2", run_v2)] if HAS_TRITON else [])
    for title, run in runs:
        began = time.perf_counter()
        findings = check(run, settings, chosen, n=20_000 if device.type == "cuda" or title == "V1" else 300,
                         device=device)  # fmt: skip
        print(f"self-test, runner {title}, {time.perf_counter() - began:.1f} s:")
        for f in findings:
            print(f"  {'ok ' if f.ok else 'BAD'} {f.setting}: acceptance {f.acceptance:.4f}, expected {f.expected:.4f};"
                  f" TV to nu {f.distance:.4f}")  # fmt: skip
            good &= f.ok
    if not HAS_TRITON:
        print("self-test, runner V2: not run, Triton does not work here (vLLM then uses V1)")
    return good


if __name__ == "__main__":
    if sys.argv[1:] != ["doctor"]:
        sys.exit("usage: python -m diversed.vllm doctor")
    sys.exit(doctor())
