"""The entry point that vLLM calls in each of its processes, and what it wraps.

Fails closed: everything is checked before anything is wrapped, and where something does not fit, nothing is. The
server then runs lossless and says so in one loud line, or refuses to start under ``DIVERSED_STRICT=1``.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from diversed.vllm import contract, metrics, requests
from diversed.vllm.bounds import Bounds, read_bounds

logger = logging.getLogger("vllm.diversed")  # below "vllm", whose handler prints it

MARK = "_diversed_wraps"  # on our functions: what they wrap
REQUESTS = metrics.Requests()


def register() -> None:
    """Make the plug-in active in this process. vLLM calls it; calling it again changes nothing.

    Raises:
        SystemExit: the bounds cannot be read; or, under ``DIVERSED_STRICT=1``, this vLLM does not fit. A lesser
            exception might only be logged.
    """
    try:
        bounds = read_bounds()
    except ValueError as error:
        logger.error("diversed: refusing to start: %s", error)
        raise SystemExit(f"diversed: {error}") from error
    faults = find_faults()
    if faults:
        report(faults, bounds)
        return
    install(bounds)


def find_faults() -> list[str]:
    """Why this vLLM cannot be served, a sentence each; empty where it can."""
    try:
        from vllm import __version__ as version
    except ImportError as error:
        return [f"vLLM cannot be imported ({error}): pip install 'diversed[vllm]'"]
    faults = contract.version_difference(version)
    faults += contract.differences(contract.COMMON, contract.read_installed)
    runners = [contract.differences(needs, contract.read_installed) for needs in (contract.V1, contract.V2)]
    faults += [] if not all(runners) else [fault for found in runners for fault in found]
    return faults or foreign_wrappers()


def runner_faults(v2: bool) -> list[str]:
    return contract.differences(contract.V2 if v2 else contract.V1, contract.read_installed)


def foreign_wrappers() -> list[str]:
    """Functions that another plug-in has wrapped before us: two relaxations on top of one another would be neither."""
    found = []
    for need in (*contract.COMMON, *contract.V1, *contract.V2):
        module = sys.modules.get(need.module)
        if module is None or not need.wrapped:
            continue  # not imported in this process, so nobody wrapped it
        function: Any = module
        for part in need.name.split("."):
            function = getattr(function, part)
        if hasattr(function, MARK):
            continue
        file = inspect.getsourcefile(function.__code__) if hasattr(function, "__code__") else None
        home = str(module.__file__).rpartition("/vllm/")[0]
        if file is not None and not file.startswith((f"{home}/vllm/", f"{home}/torch/")):
            found.append(f"{need.module}.{need.name} is wrapped by {file} already: run one of the two plug-ins alone")
    return found


def report(faults: list[str], bounds: Bounds) -> None:
    """One loud line, or the end under strict bounds."""
    text = "; ".join(faults)
    if bounds.strict:
        logger.error("diversed: refusing to start (DIVERSED_STRICT=1): %s", text)
        raise SystemExit(f"diversed: {text}")
    logger.error("diversed: NOT ACTIVE, every request is served lossless: %s", text)


def install(bounds: Bounds) -> None:
    """Wrap what every process has: the check of arriving requests, and the start of workers."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(SamplingParams.verify, MARK):
        return
    repair_kernels()
    metrics.make_folder()
    replace(SamplingParams, "verify", lambda original: requests.wrap_verify(original, bounds, REQUESTS))
    replace(WorkerWrapperBase, "init_device", lambda original: wrap_init_device(original, bounds))
    expose_metrics()
    logger.info("diversed: active (default quality %g, minimum %g, heads: %s)", bounds.default_quality,
                bounds.minimum_quality, ", ".join(bounds.heads) or "none")  # fmt: skip


def repair_kernels() -> None:
    from diversed.vllm.cpu_kernels import repair

    repair()


def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a wrapper in the place of ``owner.name``, marked as ours."""
    original = getattr(owner, name)
    wrapper = wrap(original)
    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper)


def expose_metrics() -> None:
    from prometheus_client import REGISTRY

    REGISTRY.register(metrics.Collector(REQUESTS))


def wrap_init_device(original: Callable[..., None], bounds: Bounds) -> Callable[..., None]:
    """``WorkerWrapperBase.init_device`` that also attaches to the model runner it makes."""

    def init_device(self: Any) -> None:
        original(self)
        runner, config = getattr(self.worker, "model_runner", None), self.vllm_config
        if runner is not None and config.speculative_config is not None:
            attach(runner, config, bounds)

    return init_device


def attach(runner: Any, vllm_config: Any, bounds: Bounds) -> None:
    """Wrap the model runner of this worker, V1 or V2.

    Raises:
        ValueError: a head that does not fit the pair, or bounds that this server cannot keep.
    """
    from diversed.vllm import v1, v2
    from diversed.vllm.served import make_served

    second = bool(vllm_config.use_v2_model_runner)
    faults = runner_faults(second) + foreign_wrappers() + unsupported(vllm_config)
    if faults:
        report(faults, bounds)
        return
    if getattr(runner, "speculator" if second else "drafter", None) is None:
        return  # an earlier stage of a pipeline, which samples nothing
    served = make_served(vllm_config, bounds, runner.device)
    if second:
        import vllm.v1.worker.gpu.spec_decode.rejection_sampler as sampler2

        v2.attach(runner, served)
        wrap = v2.wrap_rejection_sample
        sampler: Any = sampler2
    else:
        import vllm.v1.sample.rejection_sampler as sampler1

        v1.attach(runner, served)
        wrap, sampler = v1.wrap_rejection_sample, sampler1
    if not hasattr(sampler.rejection_sample, MARK):
        replace(sampler, "rejection_sample", wrap)
    logger.info("diversed: attached to model runner %s (%s)", "V2" if second else "V1",
                "one-hot drafts" if served.one_hot else "draft probabilities")  # fmt: skip


def unsupported(vllm_config: Any) -> list[str]:
    """Settings of vLLM under which relaxing would be wrong."""
    found = requests.unsupported(vllm_config.speculative_config)
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        found.append("batch-sharded sampling moves rows between ranks: turn it off")
    if getattr(vllm_config, "watermark_config", None) is not None:
        found.append("watermarking draws from the target's distribution: turn it off")
    return found
