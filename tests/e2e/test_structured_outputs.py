"""Answers keep to their form, whatever the model's scores and however memory runs out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.random_schemas import random_schemas
from support.tiny_model import save_tiny_model

from chairlift import LLM, SamplingParams
from chairlift.model.source import resolve
from chairlift.scheduling.sampling_params import StructuredSpec
from chairlift.text.tokenizer import load_tokenizer

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens × layers × (key, value) × heads × width × fp32
NUM_SCHEMAS = 500


def run(model: Path, specs: list[StructuredSpec], *, num_blocks: int = 3000, **options: Any) -> tuple[list[Any], int]:
    """The answers, each with a seed of its own, and how often a request was put aside."""
    params = [
        SamplingParams(max_tokens=900, temperature=1.0, seed=seed, structured=spec) for seed, spec in enumerate(specs)
    ]
    with LLM(
        str(model),
        dtype="float32",
        num_threads=1,
        max_num_seqs=32,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
        **options,
    ) as llm:
        outputs = [answer.outputs[0] for answer in llm.generate(["give me JSON: "] * len(specs), params)]
        assert llm.core.scheduler.kv.num_used_blocks == 0
        return outputs, sum(record.preempted for record in llm.core.step_log.records)


def schema_specs(schemas: list[dict[str, Any]]) -> list[StructuredSpec]:
    return [StructuredSpec("json_schema", json.dumps(schema)) for schema in schemas]


def check(schemas: list[dict[str, Any]], outputs: list[Any]) -> None:
    """Every answer is JSON of its schema; a few that noise made long are cut, and say so."""
    cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.finish_reason == "length":
            cut += 1
            continue
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
    assert cut <= len(schemas) // 50, f"{cut} of {len(schemas)} answers have no end"


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[str]:
    """With memory for all."""
    schemas = random_schemas(NUM_SCHEMAS)
    outputs, preempted = run(tiny_model, schema_specs(schemas))
    assert preempted == 0
    check(schemas, outputs)
    return [output.text for output in outputs]


def test_500_schemas(undisturbed: list[str]):
    assert len(set(undisturbed)) > NUM_SCHEMAS // 2, "the schemas should differ"


@pytest.mark.parametrize(
    "options",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.01}],
    ids=["recompute", "swap"],
)
def test_preemption_changes_no_answer(tiny_model: Path, undisturbed: list[str], options: dict[str, Any]):
    count = 120
    outputs, preempted = run(tiny_model, schema_specs(random_schemas(NUM_SCHEMAS)[:count]), num_blocks=64, **options)
    assert preempted > 10
    assert [output.text for output in outputs] == undisturbed[:count]


def test_static_batches_keep_to_it_too(tiny_model: Path, undisturbed: list[str]):
    count = 40
    specs = schema_specs(random_schemas(NUM_SCHEMAS)[:count])
    outputs, _ = run(tiny_model, specs, batching="static", static_batch_size=8)
    assert [output.text for output in outputs] == undisturbed[:count]


def test_tokens_of_several_characters(tmp_path: Path):
    """The built-in model's own tokens, whose borders are nowhere near JSON's."""
    tokenizer = load_tokenizer(resolve("smollm2"))
    save_tiny_model(tmp_path, backend=tokenizer._backend, eos_token_id=tokenizer.eos_token_ids[0])
    schemas = random_schemas(10, seed=1)
    outputs, _ = run(tmp_path, schema_specs(schemas))
    check(schemas, outputs)


def test_other_forms(tiny_model: Path):
    specs = [
        StructuredSpec("regex", r"[a-f]{3}-[0-9]{1,4}"),
        StructuredSpec("choice", json.dumps(["a", "ab", 'é"\n\\', "日本"])),
        StructuredSpec("grammar", 'start: greeting " " name\ngreeting: "hi" | "bye"\nname: /[A-Z][a-z]{1,6}/'),
        StructuredSpec("grammar", 'root ::= "x" item{2}\nitem ::= [0-9] ","'),
    ]
    outputs, _ = run(tiny_model, specs * 5)
    for number, output in enumerate(outputs):
        assert output.finish_reason == "stop"
        match number % 4:
            case 0:
                assert re.fullmatch(r"[a-f]{3}-[0-9]{1,4}", output.text)
            case 1:
                assert output.text in ["a", "ab", 'é"\n\\', "日本"]
            case 2:
                assert re.fullmatch(r"(hi|bye) [A-Z][a-z]{1,6}", output.text)
            case 3:
                assert re.fullmatch(r"x([0-9],){2}", output.text)


def test_limits_and_stop_strings_cut_the_form_and_say_so(tiny_model: Path):
    spec = StructuredSpec("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 50}))
    with LLM(str(tiny_model), dtype="float32", num_threads=1) as llm:
        [cut, stopped] = llm.generate(
            ["x", "x"],
            [
                SamplingParams(max_tokens=5, seed=1, structured=spec),
                SamplingParams(max_tokens=500, seed=1, structured=spec, stop=[","]),
            ],
        )
        assert cut.outputs[0].finish_reason == "length"
        assert cut.outputs[0].text.startswith("[")
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", ",")
        assert re.fullmatch(r"\[\s*-?\d+\s*", stopped.outputs[0].text)
        assert not llm.core.has_work
        with pytest.raises(ValueError, match="objct"):
            llm.generate("x", SamplingParams(structured=StructuredSpec("json_schema", '{"type": "objct"}')))
        [plain] = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
        assert len(plain.outputs[0].token_ids) == 3


def test_several_answers_to_one_prompt_have_a_place_of_their_own(tiny_model: Path):
    spec = StructuredSpec("regex", "[ab]{10}")
    with LLM(str(tiny_model), dtype="float32", num_threads=1) as llm:
        [answer] = llm.generate("x", SamplingParams(n=4, max_tokens=30, seed=3, structured=spec))
    texts = [output.text for output in answer.outputs]
    assert all(re.fullmatch("[ab]{10}", text) for text in texts)
    assert len(set(texts)) > 1
