"""The OpenAI-compatible server with the plug-in, over loopback."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from diversed.pairs import DRAFT, TARGET
from diversed.vllm.metrics import FOLDER

pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")

PROMPT = "Question: Ada has 12 nuts and buys 3 bags of 7 nuts. How many nuts are there now?\nAnswer:"
SETTINGS: list[dict[str, Any]] = [
    {},
    {"diversed_quality": 0.5},
    {"diversed": json.dumps({"head": "tally", "quality": 0.8})},
    {"diversed_verifier": "static:0.5"},
    {"diversed_quality": 1.0},
]


class Server:
    def __init__(self, log: Any, **environment: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        speculation = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 5,
                       "draft_sample_method": "probabilistic"}  # fmt: skip
        arguments = ["--model", str(TARGET), "--served-model-name", "embedded", "--dtype", "float32",
                     "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "64", "--host", "127.0.0.1",
                     "--port", str(self.port), "--speculative-config", json.dumps(speculation)]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env={k: v for k, v in os.environ.items() if k != FOLDER} | environment,  # a server has figures of its own
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self, seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                time.sleep(1)
        raise TimeoutError("the server did not start")

    def post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({"model": "embedded", "prompt": PROMPT, "max_tokens": 64} | body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)

    def metrics(self) -> dict[str, float]:
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30).read().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with (tmp_path_factory.mktemp("server") / "log.txt").open("w+") as log:
        running = Server(log, DIVERSED_MINIMUM_QUALITY="0.3", VLLM_CPU_OMP_THREADS_BIND="nobind")
        try:
            running.wait()
            yield running
        finally:
            running.process.terminate()
            running.process.wait(60)
            log.seek(0)
            print(log.read()[-4000:])


def spec(metrics: dict[str, float], name: str) -> float:
    return next((v for k, v in metrics.items() if k.startswith(f"vllm:spec_decode_num_{name}_total")), 0.0)


@pytest.mark.parametrize("xargs", SETTINGS, ids=str)
def test_settings_arrive_over_http(server, xargs):
    with server.post({"temperature": 0, "vllm_xargs": xargs}) as answer:
        text = json.load(answer)["choices"][0]["text"]
    assert "####" in text


@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"diversed_quality": 0.2}, "minimum quality is 0.3"),
        ({"diversed_verifier": "static:0.1"}, "minimum quality is 0.3"),
        ({"diversed": '{"head": "poems"}'}, "there are: shop, tally"),
        ({"diversed": "0.5"}, "must be an object"),
    ],
)
def test_refusals_are_a_400_that_says_why(server, xargs, says):
    before = server.metrics().get("diversed_refused_requests_total", 0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post({"vllm_xargs": xargs})
    assert refused.value.code == 400
    assert says in refused.value.read().decode()
    assert server.metrics()["diversed_refused_requests_total"] == before + 1


def test_streaming(server):
    pieces = []
    with server.post({"temperature": 0, "stream": True, "vllm_xargs": {"diversed_quality": 0.5}}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert len(pieces) > 1
    with server.post({"temperature": 0, "vllm_xargs": {"diversed_quality": 0.5}}) as answer:
        assert "".join(pieces) == json.load(answer)["choices"][0]["text"]


def test_metrics_tell_who_was_served_how(server):
    server.post({"vllm_xargs": {"diversed_quality": 0.5}}).read()
    time.sleep(0.5)
    found = server.metrics()
    assert found['diversed_requests_total{verifier="head:shop"}'] >= 1
    drafted = found['diversed_draft_tokens_total{quality="0.5"}']
    accepted = found['diversed_accepted_tokens_total{quality="0.5"}']
    assert 0 < accepted <= drafted <= spec(found, "draft_tokens")
    assert 0 < found['diversed_mean_weight{quality="0.5"}'] < 1


@pytest.mark.slow
def test_two_minutes_of_64_clients(server):
    """No error, no growing memory, acceptance of the last stretch as that of the first."""
    seconds, clients = 120.0, 64
    errors: list[str] = []
    served = [0] * clients
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            setting = SETTINGS[(number + served[number]) % len(SETTINGS)]
            body = {"temperature": draw.choice([0.0, 1.0]), "max_tokens": 32, "vllm_xargs": setting}
            if draw.random() < 0.05:
                body["vllm_xargs"] = {"diversed_quality": 0.1}
            try:
                with server.post(body | {"stream": draw.random() < 0.5}) as answer:
                    answer.read()
                served[number] += 1
            except urllib.error.HTTPError as error:
                if error.code != 400 or "minimum quality" not in error.read().decode():
                    errors.append(f"HTTP {error.code}")
            except OSError as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    marks, memory = [], []
    for _ in range(4):
        marks.append(server.metrics())
        memory.append(resident(server.process.pid))
        time.sleep(seconds / 4)
    for thread in threads:
        thread.join()
    marks.append(server.metrics())
    memory.append(resident(server.process.pid))
    assert errors == []
    assert min(served) > 0

    def acceptance(start: dict[str, float], stop: dict[str, float]) -> tuple[float, float]:
        drafted = spec(stop, "draft_tokens") - spec(start, "draft_tokens")
        return (spec(stop, "accepted_tokens") - spec(start, "accepted_tokens")) / drafted, drafted

    (first, n), (last, m) = acceptance(marks[0], marks[1]), acceptance(marks[-2], marks[-1])
    print(f"{sum(served)} requests, acceptance {first:.3f} then {last:.3f}, resident {memory} MB")
    # Blocks of one sequence are alike: take a fifth of the tokens as independent.
    assert abs(first - last) < 4 * (0.25 * 5 / n + 0.25 * 5 / m) ** 0.5
    assert memory[-1] < 1.1 * memory[1] + 50


def resident(pid: int) -> float:
    """Memory of a process and its descendants, MB."""
    children: dict[int, list[int]] = {}
    sizes = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{entry}/statm") as statm:
                    sizes[int(entry)] = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    total, todo = 0.0, [pid]
    while todo:
        one = todo.pop()
        total += sizes.get(one, 0.0)
        todo += children.get(one, [])
    return round(total, 1)
