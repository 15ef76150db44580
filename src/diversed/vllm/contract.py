"""What the plug-in needs of vLLM, as names and signatures, checked against vLLM's sources before anything is wrapped.

Sources are parsed, not imported: the same check serves a running server, ``doctor``, and a test that reads a wheel.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OLDEST = (0, 32)  # model runner V2 drafts with a draft model since then


class Need(NamedTuple):
    """A function whose first parameters, or a class whose fields, the plug-in relies on."""

    module: str
    name: str  #: function, Class.method or Class
    parameters: tuple[str, ...]  #: the first ones, in order; of a class: fields, in any order; empty: an imported name
    wrapped: bool = False  #: whether the plug-in puts its own function in its place


RUNNER, SAMPLER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.rejection_sampler"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
RUNNER2, SAMPLER2 = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
SPECULATOR2 = "vllm.v1.worker.gpu.spec_decode.speculator"

COMMON = (
    Need("vllm.sampling_params", "SamplingParams.verify", ("self", "model_config", "speculative_config"), True),
    Need("vllm.sampling_params", "SamplingParams", ("extra_args", "temperature")),
    Need("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", ("self",), True),
)  # fmt: skip
V1 = (
    Need(RUNNER, "GPUModelRunner.sample_tokens", ("self", "grammar_output"), True),
    Need(RUNNER, "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata"), True),
    Need(RUNNER, "GPUModelRunner.propose_draft_token_ids", ("self", "scheduler_output", "sampled_token_ids"), True),
    Need(RUNNER, "GPUModelRunner._get_spec_decode_draft_probs", ("self", "spec_decode_metadata")),
    Need(RUNNER, "ExecuteModelState", ("sample_hidden_states", "spec_decode_metadata")),
    Need("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata", ("num_draft_tokens", "target_logits_indices")),
    Need(PROPOSER, "SpecDecodeBaseProposer._sample_draft_tokens", ("self", "hidden_states", "sampling_metadata"), True),
    Need(SAMPLER, "rejection_sample", (
        "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
        "bonus_token_ids", "sampling_metadata"), True),
)  # fmt: skip
V2 = (
    Need(RUNNER2, "GPUModelRunner.sample", ("self", "hidden_states", "input_batch", "grammar_output"), True),
    Need(RUNNER2, "GPUModelRunner.add_requests", ("self", "scheduler_output"), True),
    Need("vllm.v1.worker.gpu.input_batch", "InputBatch", ("req_ids", "idx_mapping_np", "cu_num_logits_np",
        "logits_indices", "num_draft_tokens")),
    Need(SPECULATOR2, "DraftModelSpeculator.sample_draft", (
        "self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature", "seeds", "draft_step"), True),
    Need(SAMPLER2, "rejection_sample", (), True),  # imported there, and called by that name
    Need(SAMPLER2, "RejectionSampler._verify", ("self", "logits", "draft_logits", "draft_sampled")),
    Need(f"{SAMPLER2}_utils", "rejection_sample", (
        "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping",
        "expanded_idx_mapping", "expanded_local_pos", "temperature")),
)  # fmt: skip


def differences(needs: tuple[Need, ...], read: Callable[[str], str | None]) -> list[str]:
    """What of ``needs`` a vLLM lacks, a sentence each; empty where everything fits.

    ``read`` gives the source text of a module, or None where there is no such module.
    """
    trees: dict[str, ast.Module | None] = {}
    found = []
    for need in needs:
        if need.module not in trees:
            text = read(need.module)
            trees[need.module] = None if text is None else ast.parse(text)
        tree = trees[need.module]
        here = f"{need.module}.{need.name}"
        node = None if tree is None else _find(tree, need.name)
        if tree is not None and not need.parameters:
            if need.name not in _imported(tree):
                found.append(f"{here} is no longer imported there")
        elif node is None:
            found.append(f"{here} is missing")
        elif isinstance(node, ast.ClassDef):
            lacking = [p for p in need.parameters if p not in set(_fields(node))]
            if lacking:
                found.append(f"{here} has no {', '.join(lacking)}")
        else:
            actual = tuple(a.arg for a in [*node.args.posonlyargs, *node.args.args])
            if actual[: len(need.parameters)] != need.parameters:
                found.append(f"{here} takes ({', '.join(actual)}) and not ({', '.join(need.parameters)}, ...)")
    return found


def read_installed(module: str) -> str | None:
    """The source of an installed module. Its packages are located, and only the top one is imported."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text()
    return None


def version_difference(version: str) -> list[str]:
    """A sentence where a version of vLLM is too old."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers >= OLDEST:
        return []
    wanted = ".".join(map(str, OLDEST))
    return [f"vLLM {version} is older than {wanted}: install vllm>={wanted}"]


def _find(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """A definition by its dotted name; also behind ``if`` and ``try`` at the top."""
    body: list[ast.stmt] = tree.body
    node: ast.ClassDef | ast.FunctionDef | None = None
    for part in name.split("."):
        node = next((n for n in _definitions(body) if n.name == part), None)
        if node is None:
            return None
        body = node.body
    return node


def _imported(tree: ast.Module) -> set[str]:
    return {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body + node.orelse)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Annotated fields of a class, and attributes that its methods set on self."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
