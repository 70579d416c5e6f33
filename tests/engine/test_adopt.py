"""Which attempt of an earlier run is the one that is asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.adopt import (
    encode_basis,
    kept_message,
    name_by_makers,
    name_of_maker,
    named_checksums,
    stale_message,
    why_unwanted,
)
from snakemake_executor_plugin_mantik.engine.machine import choose_attempts
from snakemake_executor_plugin_mantik.engine.request import fingerprint_of
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from tests.support.controller import request

JOB = request(1)
SAME = "same"
OPEN = [AttemptState.PLANNED, AttemptState.SUBMITTING, AttemptState.SUBMITTED]


def always(fingerprint: str) -> Callable[[AttemptRecord], str]:
    return lambda _: fingerprint


def record(
    state: AttemptState,
    number: int = 1,
    *,
    fingerprint: str = "same",
    site: str = "sim",
    outcome: str = "",
) -> AttemptRecord:
    return AttemptRecord(
        id=f"{number:036}", site=site, bucket=0, job=JOB.job, rule="make", name="n",
        fingerprint=fingerprint, state=state, outcome=outcome,
    )  # fmt: skip


@pytest.mark.parametrize("state", OPEN)
def test_the_same_job_is_taken_up(state: AttemptState) -> None:
    found = record(state)
    assert choose_attempts(JOB, always(SAME), [found])[0] == found
    assert choose_attempts(replace(JOB, forced=True), always(SAME), [found])[0] == found


def test_of_segments_in_a_row_the_first_is_taken_up_and_the_others_stay() -> None:
    first, second, third = (record(AttemptState.SUBMITTED, n) for n in (1, 2, 3))
    second = replace(second, follows=first.id, segment=1)
    third = replace(third, follows=second.id, segment=2)
    choice = choose_attempts(JOB, always(SAME), [first, second, third])
    assert choice == (first, ())
    choice = choose_attempts(JOB, always(SAME), [second, third])
    assert choice == (second, ())
    choice = choose_attempts(JOB, always("other"), [first, second, third])
    assert choice == (None, (first, second, third))
    choice = choose_attempts(JOB, always(SAME), [first, third], given_up={second.id})
    assert choice == (first, (third,))


@pytest.mark.parametrize("state", [*OPEN, AttemptState.ENDED])
@pytest.mark.parametrize(("fingerprint", "site"), [("other", "sim"), ("same", "elsewhere")])
def test_another_job_is_not(state: AttemptState, fingerprint: str, site: str) -> None:
    found = record(state, outcome="succeeded", fingerprint=fingerprint, site=site)
    choice = choose_attempts(JOB, always(SAME), [found])
    assert choice[0] is None
    assert choice[1] == (found,)


@pytest.mark.parametrize(
    "change",
    [
        {"command": "other"},
        {"shell": "zsh"},
        {"parameters": "other"},
        {"variables": {"A": "1"}},
        {"secrets": {"A": "1"}},
        {"outputs": (OutputFile("other"),)},
        {"benchmark": Benchmark("b", "b.tsv", ("x",))},
        {"own_environment": True},
    ],
    ids=str,
)
def test_what_makes_it_another_job(change: dict[str, Any]) -> None:
    other = replace(JOB, **change)
    assert other.made_of({"a": "1"}, "e", {}) != JOB.made_of({"a": "1"}, "e", {})


def test_what_succeeded_is_taken_unless_forced() -> None:
    found = record(AttemptState.ENDED, outcome="succeeded")
    assert choose_attempts(JOB, always(SAME), [found])[0] == found
    assert choose_attempts(replace(JOB, forced=True), always(SAME), [found])[1] == (found,)


def test_what_failed_is_run_again() -> None:
    found = record(AttemptState.ENDED, outcome="failed: something")
    assert choose_attempts(JOB, always(SAME), [found])[1] == (found,)


def test_of_several_the_newest_is_taken_and_the_others_are_given_up() -> None:
    attempts = [record(AttemptState.SUBMITTED, n) for n in range(3)]
    choice = choose_attempts(JOB, always(SAME), attempts)
    assert choice[0] == attempts[2]
    assert choice[1] == (attempts[0], attempts[1])


SOURCES = {
    path: path for path in ("a/train.py", "a/util.py", "pkg/mod.py", "pkg/__init__.py", "x", "b.R")
}


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python a/train.py --x 1", {"a/train.py"}),
        ("set -e; cd a && python train.py", {"a/train.py", "a/util.py"}),
        ("python -m pkg.mod >out", {"pkg/mod.py"}),
        ("python -m pkg", {"pkg/mod.py", "pkg/__init__.py"}),
        ("Rscript './b.R'", {"b.R"}),
        ("FILE=b.R; cat <x", {"b.R", "x"}),
        ("echo . .. / a.txt", set()),
    ],
)
def test_sources_that_a_command_names(command: str, found: set[str]) -> None:
    assert set(named_checksums(command, SOURCES)) == found


def test_attempts_of_an_earlier_version_are_told_of() -> None:
    old = record(AttemptState.SUBMITTED)
    assert "changed: the executor's version." in why_unwanted(JOB, old, {"command": "x"})
    assert kept_message(old, {"queue": "other"}) == stale_message(old, "digest") == ""


def test_what_was_never_sent_or_had_failed_is_not_told_of() -> None:
    kept_back = encode_basis({"command": "old"}, {"queue": "q"}, "old")
    for state, outcome in [(AttemptState.PLANNED, ""), (AttemptState.ENDED, "failed: it")]:
        found = replace(record(state, outcome=outcome), made_of=kept_back)
        assert why_unwanted(JOB, found, {"command": "new"}) == ""
    planned = replace(record(AttemptState.PLANNED), made_of=kept_back)
    assert kept_message(planned, {"queue": "p"}) == stale_message(planned, "new") == ""


def test_what_is_forced_or_grouped_is_told_of() -> None:
    same = replace(
        record(AttemptState.ENDED, outcome="succeeded"), made_of=encode_basis({"a": "b"}, {}, "")
    )
    assert "as it is forced" in why_unwanted(replace(JOB, forced=True), same, {"a": "b"})
    assert "grouped in another way" in why_unwanted(replace(JOB, job="other"), same, {"a": "b"})


def test_of_many_changes_some_are_named() -> None:
    before = {f"input f{n}": "a" for n in range(20)}
    found = replace(record(AttemptState.SUBMITTED), made_of=encode_basis(before, {}, ""))
    told = why_unwanted(JOB, found, dict.fromkeys(before, "b"))
    assert "f0, f1, f2, f3, f4, …" in told


def test_of_a_job_that_updates_it_counts_where_it_began() -> None:
    found = record(AttemptState.ENDED, fingerprint="same+before", outcome="succeeded")
    assert choose_attempts(JOB, always("same+after"), [found])[0] is None
    assert choose_attempts(JOB, always("same+after"), [found], already=True)[0] == found
    assert choose_attempts(JOB, always("other+after"), [found], already=True)[0] is None


def test_what_it_updates_is_apart_in_what_a_job_is_made_of() -> None:
    job = replace(JOB, outputs=(OutputFile("model", keep=True, directory=True),))
    prints = [fingerprint_of(job.made_of({"a": "1", "model/x": held}, "e", {})) for held in "12"]
    assert prints[0] != prints[1]
    assert prints[0].partition("+")[0] == prints[1].partition("+")[0]
    assert "+" not in fingerprint_of(JOB.made_of({"a": "1"}, "e", {}))


def test_inputs_are_named_by_the_attempts_that_made_them() -> None:
    inputs = {"a": "1", "d": "", "d/x": "2", "d/.snakemake_timestamp": "3", "dd": "4"}
    made = {"A": {"a": "1"}, "D": {"d/x": "2"}}
    makers = {"a": "A", "d": "D"}
    named = name_by_makers(inputs, makers, lambda maker: made[maker])
    assert named == {"a": name_of_maker("A"), "d": name_of_maker("D"), "dd": "4"}


@pytest.mark.parametrize(
    "made", [{}, {"d/x": "other"}, {"d/x": "2", "d/y": "5"}, {"d/y": "2"}, {"dd": "4"}]
)
def test_an_input_that_has_changed_since_is_named_by_its_content(made: dict[str, str]) -> None:
    inputs = {"d/x": "2", "dd": "4"}
    assert name_by_makers(inputs, {"d": "D"}, lambda _: made) == inputs
