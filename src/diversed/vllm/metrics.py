"""Counters for Prometheus. Requests are counted where they arrive; acceptance where it happens, in the worker.

The worker's sums stay on its device and reach a small shared file without a synchronisation, on a GPU about every fifth
of a second while it works: what a burst's last moment added follows with the next request. The process that answers
``/metrics`` reads the file. vLLM's own counters are not touched.
"""

from __future__ import annotations

import atexit
import collections
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUCKETS = 10  # tenths of quality
FIELDS = ("draft_tokens", "accepted_tokens", "weight", "blocks")
FOLDER = "DIVERSED_METRICS_DIR"


def bucket(quality: float) -> int:
    return min(int(quality * BUCKETS), BUCKETS - 1)


def label(index: int) -> str:
    """A tenth's lower edge, as the label ``quality``."""
    return f"{index / BUCKETS:.1f}"


def make_folder() -> None:
    """One folder for a server's processes; those started later inherit its name."""
    if FOLDER not in os.environ:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="diversed-metrics-")
        owner = os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # and not a fork of it
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)


class Tally:
    """Sums over relaxed requests, by tenth of quality; one worker (rank 0 of its replica) writes them."""

    def __init__(self, device: torch.device, path: Path | None) -> None:
        self.sums = torch.zeros(BUCKETS, len(FIELDS), dtype=torch.float64, device=device)
        self.seen = torch.zeros(BUCKETS, len(FIELDS), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.arrived: Any = None  # CUDA event of the copy under way
        shape = (BUCKETS, len(FIELDS))
        self.file = None if path is None else np.memmap(path, dtype=np.float64, mode="w+", shape=shape)
        self.written = 0.0

    def add(self, rows: Tensor, weights: Tensor, blocks: Tensor, accepted: Tensor) -> None:
        """Count one verification step.

        Args:
            rows: tenth of each drafted position [R]; ``weights`` [R] their ensemble weights.
            blocks: tenth of each request [B]; ``accepted`` [B] their accepted tokens.
        """
        sums = self.sums
        sums[:, 0].index_add_(0, rows, torch.ones_like(weights, dtype=torch.float64))
        sums[:, 2].index_add_(0, rows, weights.double())
        sums[:, 1].index_add_(0, blocks, accepted.double())
        sums[:, 3].index_add_(0, blocks, torch.ones_like(accepted, dtype=torch.float64))
        self.write()

    def write(self, every: float = 0.2) -> None:
        """Write the sums, on an accelerator not more often than ``every`` seconds and, with CUDA, without waiting."""
        now, kind = time.monotonic(), self.sums.device.type
        if self.file is None or (kind != "cpu" and now - self.written < every):
            return
        self.written = now
        if kind != "cuda":
            self.file[:] = self.sums.cpu().numpy()
            return
        if self.arrived is not None and self.arrived.query():
            self.file[:] = self.seen.numpy()
            self.arrived = None
        if self.arrived is None:
            self.seen.copy_(self.sums, non_blocking=True)
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.arrived.record()


class Requests:
    """Requests by verifier, and refusals; safe to use from several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.served: collections.Counter[str] = collections.Counter()
        self.refused = 0

    def count(self, verifier: str | None) -> None:
        """One request; None for a refused one."""
        with self.lock:
            if verifier is None:
                self.refused += 1
            else:
                self.served[verifier] += 1


def read_sums(folder: str | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What all workers have written, [BUCKETS, FIELDS]."""
    total = np.zeros((BUCKETS, len(FIELDS)))
    for path in sorted(Path(folder).glob("*.sums")) if folder else ():
        found = np.fromfile(path, dtype=np.float64)
        if found.size == total.size:
            total += found.reshape(total.shape)
    return total


def families(requests: Requests) -> Iterable[Any]:
    """Prometheus metric families with the present values."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    served = CounterMetricFamily("diversed_requests", "Requests by verifier.", labels=["verifier"])
    with requests.lock:
        for name, count in requests.served.items():
            served.add_metric([name], count)
        refused = CounterMetricFamily("diversed_refused_requests", "Requests whose setting was refused.")
        refused.add_metric([], requests.refused)
    yield served
    yield refused
    sums = read_sums(os.environ.get(FOLDER))
    texts: Sequence[tuple[int, str, str]] = (
        (0, "draft_tokens", "Draft tokens of relaxed requests, by tenth of quality."),
        (1, "accepted_tokens", "Accepted draft tokens of relaxed requests, by tenth of quality."),
        (3, "blocks", "Drafted blocks of relaxed requests, by tenth of quality."),
    )
    for field, name, text in texts:
        family = CounterMetricFamily(f"diversed_{name}", text, labels=["quality"])
        for i in range(BUCKETS):
            if sums[i, 0]:
                family.add_metric([label(i)], sums[i, field])
        yield family
    mean = GaugeMetricFamily("diversed_mean_weight", "Mean ensemble weight on the target, by tenth of quality.",
                             labels=["quality"])  # fmt: skip
    for i in range(BUCKETS):
        if sums[i, 0]:
            mean.add_metric([label(i)], sums[i, 2] / sums[i, 0])
    yield mean


class Collector:
    """What prometheus_client asks for the families at every scrape."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterable[Any]:
        return families(self.requests)
