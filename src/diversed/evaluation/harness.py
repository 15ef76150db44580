"""The model ``diversed`` for lm-evaluation-harness: its ``generate_until`` tasks under any verifier.

    python -m diversed.evaluation.harness run --model diversed --tasks gsm8k \
      --model_args target=big/,draft=small/,verifier=learned,quality=0.5,num_speculative_tokens=5

Importing this module registers the model; run as a module it is the harness' own command line. Needs the extra
``lm-eval``. Tasks that score given answers by log-likelihood say nothing about how text is decoded, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError("lm-evaluation-harness is missing: pip install 'diversed[lm-eval]'") from error

from diversed.engine import ModelPair, generate
from diversed.engine.output import Stats
from diversed.evaluation.settings import Setting


@register_model("diversed")
class DiversedLM(LM):  # type: ignore[misc]
    """A pair and a verifier as the harness sees a model.

    Args:
        target, draft: folders, Hub ids or GGUF files; the embedded pair where neither is given.
        verifier, quality, num_speculative_tokens: as for ``diversed bench``; 0 tokens is target-only decoding.
        batch_size: prompts at a time.
        seed: prompt i of the run draws from ``seed + i``.
        max_gen_toks: new tokens where a task does not say.
        dtype, device: for both models.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        verifier: str = "lossless",
        quality: float | None = None,
        num_speculative_tokens: int = 5,
        batch_size: int | str = 1,
        seed: int = 0,
        max_gen_toks: int = 256,
        dtype: str = "auto",
        device: str | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        known = {"max_batch_size"}  # the harness passes its own settings along
        if other.keys() - known:
            raise ValueError(f"model_args: {', '.join(sorted(other.keys() - known))} is unknown to the model diversed")
        if (target is None) != (draft is None):
            raise ValueError("model_args: give both target and draft, or neither for the embedded pair")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1")
        if target is None or draft is None:
            self.pair = ModelPair.embedded()
        else:
            self.pair = ModelPair.from_pretrained(target, draft, dtype=dtype, device_map=device)
        self.setting = Setting(verifier, quality, int(num_speculative_tokens))
        if self.setting.is_peer:
            raise ValueError(f"verifier={verifier!r} is no decoding of ours: use --model hf for transformers")
        drafted = self.setting.prepare(self.pair)[1]["num_speculative_tokens"]
        self.batch_size, self.seed, self.max_gen_toks = int(batch_size), int(seed), int(max_gen_toks)
        self.stats = Stats.zero(drafted)  #: counts of all requests so far

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A text for each request, without the stop string. Requests of equal arguments go in batches."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(i)
        for members in groups.values():
            pair, arguments = self.request_of(requests[members[0]].args[1])
            for start in range(0, len(members), self.batch_size):
                chosen = members[start : start + self.batch_size]
                prompts = [requests[i].args[0] for i in chosen]
                out = generate(pair, prompts, seed=[self.seed + i for i in chosen], **arguments)
                self.stats.add(out.stats)
                for i, text in zip(chosen, out.texts, strict=True):
                    ends = [text.find(stop) for stop in arguments["stop_strings"] or () if stop in text]
                    texts[i] = text[: min(ends)] if ends else text
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def request_of(self, asked: Mapping[str, Any]) -> tuple[ModelPair, dict[str, Any]]:
        """What a task's ``generation_kwargs`` mean for :func:`diversed.generate`."""
        wanted = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        setting = replace(self.setting, temperature=float(wanted.pop("temperature", 0.0)))
        stops = [stop for stop in wanted.pop("until", None) or [] if stop]
        pair, arguments = setting.prepare(self.pair)
        arguments |= {
            "max_new_tokens": int(wanted.pop("max_gen_toks")),
            "stop_strings": stops or None,
        }
        wanted.pop("do_sample", None)
        arguments |= {k: wanted.pop(k) for k in ("top_k", "top_p", "min_p", "repetition_penalty") if k in wanted}
        if wanted:
            raise ValueError(f"generation_kwargs: {', '.join(sorted(wanted))} has no counterpart in diversed.generate")
        return pair, arguments

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Refused: see the module."""
        raise NotImplementedError(
            "diversed decodes text and gives no log-likelihoods: choose generate_until tasks (gsm8k, humaneval, ...), "
            "or evaluate the target alone with --model hf"
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The target's own chat template, as text."""
        assert self.pair.tokenizer is not None
        text = self.pair.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template itself, where one is asked for; the harness records it."""
        assert self.pair.tokenizer is not None
        return str(self.pair.tokenizer.chat_template) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness' caches."""
        return self.pair.target_name.replace("/", "__")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
