"""Ask a vLLM server with the diversed plug-in for one text at several qualities, side by side.

    python examples/vllm/client.py "Question: Ada has 12 nuts and buys 3 bags of 7 nuts. How many nuts are there now?
    Answer:" --quality 1 --quality 0.5 --quality 0.1

Start the server as examples/vllm/README.md shows. Needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request


def post(base: str, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--quality", type=float, action="append", help="may be repeated; 1 is exactly the target")
    parser.add_argument("--head", help="one of the server's heads; its first if not given")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    chosen = parser.parse_args()
    with urllib.request.urlopen(chosen.url + "/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    for quality in chosen.quality or [1.0, 0.5, 0.1]:
        # vLLM's vllm_xargs take flat values only; "diversed" may also hold all of them as JSON text.
        settings: dict[str, object] = {"diversed_quality": quality}
        if chosen.head:
            settings["diversed_head"] = chosen.head
        body = {
            "model": model,
            "prompt": chosen.prompt,
            "temperature": chosen.temperature,
            "max_tokens": chosen.max_tokens,
            "vllm_xargs": settings,
        }
        began = time.perf_counter()
        try:
            found = post(chosen.url, "/v1/completions", body)
        except urllib.error.HTTPError as error:
            sys.exit(f"refused ({error.code}): {json.load(error)['error']['message']}")
        seconds = time.perf_counter() - began
        tokens = found["usage"]["completion_tokens"]  # type: ignore[index]
        print(f"--- quality {quality:g}: {tokens} tokens in {seconds:.2f} s")
        print(found["choices"][0]["text"])  # type: ignore[index]


if __name__ == "__main__":
    main()
