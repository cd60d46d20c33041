"""Names: what is well-formed, the model token and its inverse, and parsers that take any text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.subjects import (
    LANES,
    Ingress,
    Names,
    QueueName,
    is_job_id,
    is_model_name,
    is_name,
    is_prefix,
    is_worker_id,
    model_to_token,
    token_to_model,
)

NAMES = Names()
TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+\Z")

any_text = st.text(st.characters(exclude_categories=()), max_size=120)
"""Lone surrogates too: what a careless decoder may hand us."""
subject_like = st.lists(
    st.one_of(st.sampled_from(["headrace", "v1", "infer", "log", "jobs", "wake", "0", "default", "chat"]), any_text),
    max_size=9,
).map(".".join)
model_names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=100).filter(is_model_name)
names = st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)
job_ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(model_names)
def test_model_token_is_one_plain_token_and_comes_back(model: str) -> None:
    token = model_to_token(model)
    assert TOKEN.match(token)
    assert not set(token) & set(". *>\t\r\n")
    assert token_to_model(token) == model


@given(model_names, model_names)
def test_different_models_have_different_tokens(one: str, other: str) -> None:
    assert (model_to_token(one) == model_to_token(other)) == (one == other)


@given(any_text)
def test_model_name_is_encoded_or_refused(text: str) -> None:
    if is_model_name(text):
        assert token_to_model(model_to_token(text)) == text
    else:
        with pytest.raises(ValueError, match="model name"):
            model_to_token(text)


@given(st.one_of(any_text, st.from_regex(r"([A-Za-z0-9_-]|=[0-9A-F]{2}){1,20}", fullmatch=True)))
def test_token_decodes_only_if_the_encoder_makes_it(token: str) -> None:
    try:
        model = token_to_model(token)
    except ValueError:
        return
    assert model_to_token(model) == token


@pytest.mark.parametrize(
    "token", ["", "=6D", "m=2f", "a.b", "a b", "=", "=4", "=FF", "=C3", "=00", "=E9", "é", "*", ">"]
)
def test_foreign_tokens_are_refused(token: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the type is the contract
        token_to_model(token)


@pytest.mark.parametrize(
    ("model", "is_fine"),
    [
        ("m", True),
        ("a" * 100, True),
        ("a" * 101, False),
        ("é" * 50, True),
        ("é" * 51, False),
        ("", False),
        ("a\nb", False),
        ("a\x00", False),
        ("a\x7f", False),
        ("a\x85", False),
        ("\ud800", False),
        ("a b.*>", True),
    ],
)
def test_model_names(model: str, is_fine: bool) -> None:
    assert is_model_name(model) is is_fine


def test_well_formed_names() -> None:
    assert is_job_id("A-b_9" * 10)
    assert is_job_id("x" * 64)
    for bad in ("", "x" * 65, "a.b", "a b", "a*", "a\n", "ü"):
        assert not is_job_id(bad)
        assert not is_worker_id(bad)
    assert is_name("a-9")
    assert is_name("x" * 40)
    for bad in ("", "x" * 41, "A", "a_b", "a.b", "a\n", "_svc"):
        assert not is_name(bad)
    for good in ("headrace.v1", "a", "A_b-c.d"):
        assert is_prefix(good)
    for bad in ("", ".", "a.", ".a", "a..b", "a b", "a.*", "a.>", "a" * 65, "a\n"):
        assert not is_prefix(bad)


@given(any_text)
def test_predicates_take_any_text(text: str) -> None:
    for predicate in (is_job_id, is_name, is_worker_id, is_prefix, is_model_name):
        assert predicate(text) in (True, False)


@given(st.one_of(any_text, subject_like))
def test_parsers_take_any_text(subject: str) -> None:
    ingress = NAMES.parse_infer(subject)
    if ingress is not None:
        assert is_name(ingress.tenant)
        assert NAMES.infer(ingress.tenant, ingress.op, ingress.model) == subject
    where = NAMES.parse_log(subject)
    if where is not None:
        assert is_name(where[0])
        assert is_job_id(where[1])
    for queue in (QueueName.from_subject(subject), QueueName.from_consumer(subject)):
        assert queue is None or (is_name(queue.pool) and queue.lane in LANES and is_name(queue.queue))
    model = NAMES.model_of_stream(subject)
    assert model is None or NAMES.jobs_stream(model) == subject


@given(names, model_names)
def test_ingress_subject_comes_back(tenant: str, model: str) -> None:
    subject = NAMES.infer(tenant, "chat", model)
    assert len(subject.split(".")) == 6
    assert NAMES.parse_infer(subject) == Ingress(tenant, "chat", model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "subject",
    [
        "headrace.v1.infer.default.chat",
        "headrace.v1.infer.default.chat.m.x",
        "headrace.v2.infer.default.chat.m",
        "infer.default.chat.m",
        "headrace.v1.infer.Default.chat.m",
        "headrace.v1.infer.default.chat.=6D",
    ],
)
def test_other_subjects_are_no_ingress(subject: str) -> None:
    assert NAMES.parse_infer(subject) is None


@given(names, job_ids, st.integers(1, 64))
def test_log_subject_comes_back_from_its_shard(tenant: str, job: str, num_shards: int) -> None:
    sharded = Names(num_shards=num_shards)
    assert 0 <= sharded.shard_of(job) < num_shards
    assert sharded.parse_log(sharded.log(tenant, job)) == (tenant, job)


def test_shards_are_used_evenly() -> None:
    sharded = Names(num_shards=4)
    counts = [0] * 4
    for number in range(4000):
        counts[sharded.shard_of(f"job-{number}")] += 1
    assert min(counts) > 800


@given(names, st.sampled_from(LANES), names, model_names)
def test_queue_comes_back_from_subject_and_consumer(pool: str, lane: str, queue: str, model: str) -> None:
    name = QueueName(pool, lane, queue)  # type: ignore[arg-type]
    assert QueueName.from_consumer(name.consumer) == name
    assert QueueName.from_subject(NAMES.jobs(model, name)) == name
    assert QueueName.from_subject(NAMES.wake(model, name)) == name


@given(model_names)
def test_stream_names_its_model_within_its_deployment(model: str) -> None:
    stream = NAMES.jobs_stream(model)
    assert NAMES.model_of_stream(stream) == model
    assert Names(prefix="other.v1").model_of_stream(stream) is None


def test_other_streams_have_no_model() -> None:
    for stream in (NAMES.log_stream(0), NAMES.dead_stream, f"KV_{NAMES.workers_bucket}", "HEADRACE_V1_JOBS_"):
        assert NAMES.model_of_stream(stream) is None


def test_a_filter_of_dead_letters_names_what_is_given() -> None:
    assert NAMES.dead_filter() == "headrace.v1.dead.*.*.*"
    assert NAMES.dead_filter(tenant="t", model="a.b", job="j") == NAMES.dead("t", "a.b", "j")
    assert NAMES.dead_filter(model="*") == "headrace.v1.dead.*.=2A.*"
