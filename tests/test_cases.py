"""Cases from practice: things that went wrong for people who do this job with other tools, and the right behaviour.

`CASES` names, for each case, the tests that cover it; the tests below are those that have no better place. Most of them
look at one run over one file whose rows differ in all that rows can differ in.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry, clean_registries

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import keys, serializer
from batonq.producer.client import Producer
from batonq.producer.schema import PromptJob
from tests.support import null_worker
from tests.support.definition import alone
from tests.support.running import NULL_WORKER_COMMAND, environment, read_rows, run, write_rows
from tests.support.servers import eventually, server
from tests.support.workers import QUEUE, worker

#: Case: the tests that cover it, as `file::test`, or `test` for one of this file.
CASES: dict[str, tuple[str, ...]] = {
    "blank lines are skipped and counted": (
        "test_producer_rows::test_blank_lines_keep_their_numbers_and_a_bom_is_stripped_once",
        "test_run_mixed::test_killed_at_20_random_times_it_ends_as_the_calm_run",
    ),
    "a BOM before the first row": (
        "test_producer_rows::test_blank_lines_keep_their_numbers_and_a_bom_is_stripped_once",
        "test_run_rows::test_every_form_of_row",
    ),
    "70,000 characters in a prompt or an answer": ("test_run_rows::test_every_form_of_row",),
    "an 11 MB line": (
        "test_run_rows::test_bad_rows_get_error_rows_and_the_rest_runs",
        "test_producer_rows::test_a_line_that_is_too_long_is_measured_and_not_kept",
    ),
    "a custom_id twice": ("test_run_rows::test_duplicates", "test_producer_state::test_duplicates_name_both_lines"),
    "stream, a missing method, another url": ("test_producer_rows::test_a_bad_row", "test_bad_batch_lines_are_named"),
    "input and output are one file": ("test_run_rows::test_same_file_for_input_and_output",),
    "a torn line at the end of a previous output": (
        "test_run_rows::test_rows_removed_from_the_output_run_again",
        "test_run_crash::test_killed_at_random_and_resumed",
        "test_producer_order::test_lives_that_are_killed",
    ),
    "Ctrl-C once, twice": ("test_run_crash::test_interrupted_once", "test_run_crash::test_interrupted_twice"),
    "1,000 short rows and one that never fits": ("test_rows_that_never_fit_fail_alone",),
    "rows with different limits": ("test_each_row_has_its_own_limit",),
    "logit_bias of a token that is none": ("test_a_bias_on_no_token_is_refused_for_that_row",),
    "a row that never emits EOS": ("test_a_row_without_an_end_ends_by_its_limit",),
    "a row that crashes the engine each time": (
        "test_worker::test_a_job_that_kills_the_engine_fails_and_its_neighbours_finish",
    ),
    "max_tokens missing": ("test_a_row_without_an_end_ends_by_its_limit",),
    "max_tokens above the room": ("test_a_limit_above_the_room_is_clamped",),
    "a prompt that begins with BOS already": (
        "test_tokenizer::test_bos_is_there_once",
        "test_tokenizer::test_bos_is_there_once_in_a_conversation",
    ),
    "messages and no chat template": ("test_tokenizer::test_a_conversation_without_a_template_is_refused",),
    "prompt_logprobs on an 8k prompt": ("test_sampling::test_log_probabilities_of_a_prompt_of_8k_take_bounded_memory",),
    "a stop string inside a token, and across tokens": (
        "test_text::test_pieces",
        "test_text::test_500_outputs_streamed_and_whole",
    ),
    "characters of many bytes, streamed": ("test_text::test_characters_byte_by_byte",),
    "penalties among neighbours that come and go": ("test_sampling::test_neighbours_that_come_and_go",),
    "a mask or bias on a row that leaves": ("test_sampling::test_a_bias_or_mask_ends_with_its_row",),
    "seeded rows, alone or in a crowd": (
        "test_seeded_rows_in_any_order",
        "test_sampling::test_shuffled_and_in_crowds",
    ),
    "greedy, cold and warm, preempted": (
        "test_families_parity::test_a_warm_cache_in_another_order",
        "test_families_parity::test_preempted_at_every_position_of_the_output",
    ),
    "temperature 0 with filters": (
        "test_kernels_sampling::test_every_row_is_drawn_by_the_contract",
        "test_sampling::test_greedy_whatever_the_filters",
    ),
    "a finished job, then registry cleanup": ("test_registry_cleanup_changes_no_job_that_has_ended",),
    "the same submission twice": (
        "test_producer_client::test_the_same_id_is_enqueued_once",
        "test_producer_client::test_many_producers_with_the_same_ids",
    ),
    "1,000,000 tiny rows": (
        "test_soak_rows::test_memory_is_flat",
        "test_soak_rows::test_the_index_is_built_and_matched_in_flat_memory",
    ),
    "Redis away while results are ready": ("test_worker::test_the_server_dies_and_comes_back",),
    "jobs whose time is over, among others": ("test_worker_endings::test_deadlines_and_timeouts",),
    "a job that runs for longer than rq's cleanup waits": (
        "test_worker::test_rq_info_counts_what_one_worker_runs",
        "test_worker_lifecycle::test_five_hundred_jobs_over_two_queues",
    ),
    "cancel of a running job": (
        "test_worker_commands::test_canceling",
        "test_worker_commands::test_nothing_is_published_after_cancel_has_returned",
    ),
    "an unseeded job": ("test_an_unseeded_job_keeps_the_seed_it_was_given",),
}


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_tests(case: str) -> None:
    assert CASES[case]
    for name in CASES[case]:
        file, _, test = name.rpartition("::")
        source = Path(__file__).with_name(f"{file}.py") if file else Path(__file__)
        defined = {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in defined, f"{source.name} has no {test}"


#: Tokens of the null engine's longest context, and of its whole cache (which is smaller).
_MODEL_LENGTH, _CACHE = 200, 160
_ENGINE = {"max_model_len": _MODEL_LENGTH, "num_blocks": _CACHE // 4, "max_num_seqs": 64, "max_num_batched_tokens": 512}

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The output rows of a run over one file, by custom_id."""
    directory = tmp_path_factory.mktemp("cases")
    batch_line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    greedy = {"temperature": 0}
    endless = {"prompt": "abcdefghij", "ignore_eos": True} | greedy
    lines: list[Any] = [
        *({"custom_id": f"short {i}", "prompt": f"{i}", "max_tokens": 2, "seed": i} for i in range(500)),
        {"custom_id": "longer than the model", "prompt": "x" * (_MODEL_LENGTH + 1)},
        {"custom_id": "longer than the cache", "prompt": "x" * (_CACHE + 1)},
        *({"custom_id": f"short {i}", "prompt": f"{i}", "max_tokens": 2, "seed": i} for i in range(500, 1000)),
        {"custom_id": "limit 3", "max_tokens": 3} | endless,
        {"custom_id": "limit 50", "max_tokens": 50} | endless,
        {"custom_id": "no limit"} | endless,
        {"custom_id": "limit 10,000", "max_tokens": 10_000} | endless,
        {"custom_id": "bias", "prompt": "x", "logit_bias": {"999999": 5}},
        {"custom_id": "stream"} | batch_line | {"body": {"prompt": "x", "stream": True}},
        {"custom_id": "no method", "url": "/v1/completions", "body": {"prompt": "x"}},
        {"custom_id": "other url"} | batch_line | {"url": "/v1/embeddings"},
        *({"custom_id": f"seed {i % 50} {i}", "prompt": "x", "max_tokens": 9, "seed": i % 50} for i in range(150)),
    ]
    env = environment(**{null_worker.ENVIRONMENT: json.dumps(_ENGINE)})
    source = write_rows(directory / "in.jsonl", lines)
    done = run(source, directory / "out.jsonl", "--worker-command", NULL_WORKER_COMMAND, own_worker=False, env=env)
    assert done.returncode == 3, done.stderr
    found = read_rows(directory / "out.jsonl")
    assert len(found) == len(lines)
    numbers = {line["custom_id"]: number for number, line in enumerate(lines, 1)}
    return {row["custom_id"]: row | {"number": numbers[row["custom_id"]]} for row in found}


def text(row: dict[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["text"])


def completion_tokens(row: dict[str, Any]) -> int:
    return int(row["response"]["body"]["usage"]["completion_tokens"])


def finish_reason(row: dict[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["finish_reason"])


def test_rows_that_never_fit_fail_alone(rows: Rows) -> None:
    assert sum(rows[f"short {i}"]["error"] is None for i in range(1000)) == 1000
    for name in ("longer than the model", "longer than the cache"):
        assert rows[name]["error"]["code"] == "context_length_exceeded"
        assert rows[name]["error"]["line"] == rows[name]["number"]


def test_each_row_has_its_own_limit(rows: Rows) -> None:
    assert [completion_tokens(rows[f"limit {limit}"]) for limit in (3, 50)] == [3, 50]
    assert text(rows["limit 50"]).startswith(text(rows["limit 3"]).rstrip("\ufffd"))


def test_a_row_without_an_end_ends_by_its_limit(rows: Rows) -> None:
    assert completion_tokens(rows["no limit"]) == _CACHE - 10
    assert finish_reason(rows["no limit"]) == "length"
    effective = rows["no limit"]["response"]["body"]["batonq"]["sampling"]
    assert effective["max_tokens"] == _CACHE - 10


def test_a_limit_above_the_room_is_clamped(rows: Rows) -> None:
    assert text(rows["limit 10,000"]) == text(rows["no limit"])
    assert finish_reason(rows["limit 10,000"]) == "length"
    assert rows["limit 10,000"]["response"]["body"]["batonq"]["sampling"]["max_tokens"] == _CACHE - 10


def test_a_bias_on_no_token_is_refused_for_that_row(rows: Rows) -> None:
    error = rows["bias"]["error"]
    assert "logit_bias" in error["param"]
    assert error["line"] == rows["bias"]["number"]


def test_bad_batch_lines_are_named(rows: Rows) -> None:
    for name, param in (("stream", "stream"), ("no method", "method"), ("other url", "url")):
        assert rows[name]["error"]["param"] == param
        assert rows[name]["error"]["line"] == rows[name]["number"]


def test_seeded_rows_in_any_order(rows: Rows) -> None:
    by_seed = [{text(row) for name, row in rows.items() if name.startswith(f"seed {seed} ")} for seed in range(50)]
    assert [len(texts) for texts in by_seed] == [1] * 50
    assert len(set.union(*by_seed)) > 40


def test_registry_cleanup_changes_no_job_that_has_ended(tmp_path: Path) -> None:
    with server(tmp_path / "valkey") as valkey, redis.Redis.from_url(valkey.url) as connection:
        queue = Queue(QUEUE, connection=connection, serializer=serializer)
        producer = Producer(connection, queue=QUEUE)
        prompts = ["good", "x" * 1000]
        ids = [producer.submit(prompt=prompt, max_tokens=3) for prompt in prompts]
        with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
            assert running.wait() == 0
        before = [connection.hgetall(keys.job(job_id)) for job_id in ids]
        for registry in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry):
            registry(queue=queue).cleanup()
        clean_registries(queue)
        assert [connection.hgetall(keys.job(job_id)) for job_id in ids] == before
        assert producer.statuses(ids) == dict(zip(ids, ["finished", "failed"], strict=True))
        assert queue.finished_job_registry.get_job_ids() == ids[:1]
        assert queue.failed_job_registry.get_job_ids() == ids[1:]
        assert producer.result(ids[0]).error is None


def test_an_unseeded_job_keeps_the_seed_it_was_given(tmp_path: Path) -> None:
    """The first worker is killed in the middle: the second draws on with the same seed."""
    slow = {"step_seconds": 0.01, "max_num_batched_tokens": 64, "num_blocks": 400}
    with server(tmp_path / "valkey") as valkey, redis.Redis.from_url(valkey.url) as connection:
        producer = Producer(connection)
        job = PromptJob.model_validate(
            {"model": QUEUE, "prompt": "no seed", "sampling": {"max_tokens": 100, "ignore_eos": True}}
        )
        job_id = producer.submit(job)
        with worker(valkey.url, "first", log=tmp_path / "log", **slow) as first:
            eventually(lambda: connection.strlen(keys.tokens(job_id)) > 40, "tokens are committed")
            first.process.kill()
            first.wait()
        with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **slow) as second:
            assert second.wait() == 0
        result = producer.result(job_id)
        assert result.owners == ["first", "second"]
        assert result.seed is not None
        given = SamplingParams(max_tokens=100, ignore_eos=True, seed=result.seed)
        assert result.choices[0].token_ids == alone(list(b"no seed"), given)
