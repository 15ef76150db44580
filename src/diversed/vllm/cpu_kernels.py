"""A carried repair for vLLM's CPU builds, applied only where a probe shows the fault.

Their substitute for ``expand_kernel`` (one value per request -> one per draft token) writes into a copy when the
output is no int64 tensor and loses it: temperature, top-k and top-p of draft tokens are then uninitialised memory, and
sampled speculative decoding writes garbage.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vllm.diversed")


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, *unused: Any, **also: Any
) -> None:
    """Repeat each request's value over its tokens; ``ends`` are cumulative counts. Writes into ``output``."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    replaced = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
    total = int(ends[-1]) if len(ends) else 0
    output[:total] = replaced.repeat_interleave((ends - starts).long()).to(output.dtype)


def works(kernel: Any) -> bool:
    """Whether a substitute fills a float output as it should."""
    output = torch.full((5,), -7.0)
    try:
        kernel(output, torch.tensor([0.5, 0.0]), torch.tensor([2, 5], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=32)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return output.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def repair() -> bool:
    """Put :func:`expand` in the place of a faulty substitute. Call before a worker registers its kernels."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.utils import cpu_triton_utils

    if not hasattr(cpu_triton_utils, "_expand_kernel_impl") or works(cpu_triton_utils._expand_kernel_impl):
        return False

    # The dispatcher forwards by keyword only where the names agree, and by position otherwise.
    cpu_triton_utils._expand_kernel_impl = expand
    logger.info("diversed: repaired the CPU build's expand_kernel (draft tokens had uninitialised temperatures)")
    return True
