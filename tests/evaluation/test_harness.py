"""The model "diversed" inside lm-evaluation-harness, on a small local task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from diversed import ModelPair, generate
from diversed.evaluation.harness import DiversedLM
from diversed.tasks import load_task

TASK = """
task: nuts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 70}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "#### (-?\\\\d+)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    examples = load_task("shop", n=3).examples
    rows = [{"prompt": e.prompt, "answer": str(e.columns["answer"])} for e in examples]
    (folder / "nuts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "nuts.yaml").write_text(TASK.format(file=folder / "nuts.jsonl"))
    return folder


def test_a_task_of_the_harness_runs_under_a_verifier(folder: Path) -> None:
    """The lossless verifier at temperature 0 answers like the target: these three problems it solves."""
    model = DiversedLM(verifier="lossless", num_speculative_tokens=4, batch_size=2)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=["nuts"], task_manager=tasks, bootstrap_iters=0, log_samples=True)
    answers = [s["resps"][0][0] for s in found["samples"]["nuts"]]
    examples = load_task("shop", n=3).examples
    alone = generate(
        ModelPair.embedded(), [e.prompt for e in examples], num_speculative_tokens=0, temperature=0, max_new_tokens=70,
        stop_strings=["\n\n"],
    )  # fmt: skip
    assert answers == [text.removesuffix("\n\n") for text in alone.texts]
    right = [f"#### {e.columns['answer']}" in text for e, text in zip(examples, alone.texts, strict=True)]
    assert found["results"]["nuts"]["exact_match,number"] == pytest.approx(sum(right) / 3)
    assert model.stats.acceptance_rate > 0
    assert model.stats.tokens == sum(map(len, alone.token_ids))


def test_it_is_registered_and_reads_model_args() -> None:
    arguments = "verifier=static:0.5,quality=0.4,num_speculative_tokens=2,seed=3"
    model = get_model("diversed").create_from_arg_string(arguments)
    assert isinstance(model, DiversedLM)
    assert (model.setting.verifier, model.setting.quality, model.seed) == ("static:0.5", 0.4, 3)
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "until": "\n", "max_gen_toks": 5}
    texts = model.generate_until([Instance("generate_until", {}, ("Question: Ada has", sampled), 0) for _ in range(2)])
    again = model.generate_until([Instance("generate_until", {}, ("Question: Ada has", sampled), 0) for _ in range(2)])
    assert texts == again
    assert all("\n" not in text for text in texts)
    chat = model.apply_chat_template([{"role": "user", "content": "How many nuts?"}])
    assert "How many nuts?" in chat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verifier": "nope"}, "verifier='nope'"),
        ({"verifier": "transformers"}, "verifier='transformers' is no decoding of ours"),
        ({"target": "a"}, "give both target and draft"),
        ({"temprature": 1}, "model_args: temprature is unknown"),
        ({"batch_size": "auto"}, "batch_size='auto'"),
    ],
)
def test_bad_model_args_are_one_clear_error(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiversedLM(**arguments)


def test_log_likelihoods_are_refused_and_unknown_arguments_named() -> None:
    model = DiversedLM()
    with pytest.raises(NotImplementedError, match="choose generate_until tasks"):
        model.loglikelihood([])
    with pytest.raises(ValueError, match="generation_kwargs: num_beams"):
        model.generate_until([Instance("generate_until", {}, ("x", {"num_beams": 4}), 0)])
