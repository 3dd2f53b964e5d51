"""The demo keeps what it claims, and says so with its exit status."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tflms.__main__ import main
from tflms.commands import bench_max_batch, children, demo
from tflms.commands.job import Alive, Job, Outcome, Training
from tflms.commands.worker import telling_line
from tflms.errors import TflmsError


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    status = main(
        ["demo", "--size", "32", "--steps", "3", "--strategy", "direct_order", "--json", str(file)]
    )
    return status, json.loads(file.read_text(encoding="utf-8"))


def test_the_demo_is_as_claimed(small_demo):
    status, told = small_demo
    assert status == 0
    assert told["as_claimed"] is True
    assert [run["problems"] for run in told["runs"]] == [[]] * 3
    plain, reference, rewritten = told["runs"]
    assert [run["fits"] for run in told["runs"]] == [False, True, True]
    assert "OOM when allocating" in plain["outcome"]["out_of_memory"]
    assert "EMU:0" in plain["outcome"]["out_of_memory"]
    assert reference["measured"]["peak_bytes"] > told["limit_bytes"]
    wanted = reference["outcome"]["trainings"][0]
    assert len(set(wanted["losses"])) == 3 and len(wanted["variables"]) > 20
    got = rewritten["outcome"]["trainings"][0]
    assert got["losses"] == wanted["losses"] and got["variables"] == wanted["variables"]
    assert rewritten["measured"]["peak_bytes"] <= told["limit_bytes"]
    assert rewritten["measured"]["to_host_bytes"] > 1e7
    alive = rewritten["outcome"]["in_run"]
    assert alive["survived"] == alive["expected"] > 0


GOOD = Training(
    losses=[1.0, 0.5],
    peak_bytes=[90, 80],
    to_host_bytes=[10, 10],
    to_device_bytes=[10, 10],
    seconds=[1.0, 0.5],
    variables={"w:0": "ab"},
)
ALIVE = Alive(4, 4)
JOB = Job("unet3d", {"size": 16}, 100, 2, config={"strategy": "chain_rule"})


def outcome(*, before: Alive | None = ALIVE, run: Alive | None = ALIVE, **changes):
    return Outcome([dataclasses.replace(GOOD, **changes)], before_run=before, in_run=run, report={})


def problems(found: Outcome) -> str:
    return "; ".join(demo.problems_of("it", JOB, found, Outcome([GOOD])))


def test_a_good_run_has_no_problems():
    assert problems(outcome()) == ""


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (outcome(losses=[1.0, 0.5000001]), "losses differ"),
        (outcome(losses=[1.0, float("nan")]), "losses differ"),
        (outcome(variables={"w:0": "ac"}), "variables differ"),
        (outcome(variables={}), "variables differ"),
        (outcome(peak_bytes=[90, 101]), "over the limit"),
        (outcome(to_host_bytes=[0, 0]), "nothing was moved"),
        (outcome(run=Alive(4, 3)), "missing in the first run's graph"),
        (outcome(before=None), "missing in the optimised graph"),
        (Outcome(out_of_memory="OOM"), "does not fit"),
    ],
)
def test_each_claim_that_does_not_hold_is_named(found, told):
    assert told in problems(found)


def test_a_plain_graph_that_fits_is_a_problem():
    assert demo.problems_of("plain", JOB, Outcome([GOOD]), None) == ("plain fits in 100 B",)
    assert demo.problems_of("plain", JOB, Outcome(out_of_memory="OOM"), None) == ()


@pytest.mark.parametrize("words", [["--size", "20"], ["--size", "8"], ["--steps", "1"]])
def test_a_size_or_number_of_steps_that_cannot_be_is_refused(words):
    assert main(["demo", *words]) == 2


def test_the_line_that_tells_is_found_in_an_error():
    message = "Graph execution error:\n\nDetected at node 'x'\n (0) OOM when allocating tensor\n"
    assert telling_line(message) == "(0) OOM when allocating tensor"


def test_a_child_that_fails_is_reported_with_what_it_wrote():
    with pytest.raises(TflmsError, match=r"exit 1.*\n(.*\n)*.*unexpected keyword"):
        children.run_job(Job("mlp", {"depth": 3}, 10**8, 1))


def test_a_child_that_takes_too_long_is_ended():
    with pytest.raises(TflmsError, match="exit -9, limit 1 s"):
        children.run_job(Job("mlp", {}, 10**9, 1), timeout_seconds=1)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 31, 100])
@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_search_finds_the_largest_batch_that_fits(limit, start):
    tried = []

    def attempt(batch: int) -> Outcome:
        tried.append(batch)
        return Outcome([GOOD]) if batch <= limit else Outcome(out_of_memory="OOM")

    batch, best, failed, failure = bench_max_batch.largest(attempt, start, 0.0)
    assert (batch, failed, failure) == (limit, limit + 1, "OOM")
    assert (best is not None) == (limit > 0)
    assert len(tried) == len(set(tried)) <= 15


def test_the_bench_compares_plain_and_rewritten_in_one_memory(monkeypatch, capsys):
    jobs = []

    def linear(job: Job) -> Outcome:  # 10 bytes an image, a third of that rewritten
        jobs.append(job)
        nbytes = job.arguments["batch"] * (10 if job.config is None else 3)
        if nbytes > job.memory_bytes:
            return Outcome(out_of_memory="OOM when allocating")
        return Outcome([dataclasses.replace(GOOD, peak_bytes=[nbytes])])

    monkeypatch.setattr(bench_max_batch, "run_job", linear)
    rows = bench_max_batch.run(memory="100B", plain_batch=4, resolution=0.0, strategy="auto")
    assert [(row.way, row.batch, row.failed_batch) for row in rows] == [
        ("plain", 10, 11),
        ("auto", 33, 34),
    ]
    assert (rows[1].times_plain, rows[1].goal, rows[1].met) == (3.3, 5.5, False)
    assert {job.config["memory_limit"] for job in jobs if job.config} == {
        97
    }  # and three percent are 100
    assert "3.30" in capsys.readouterr().out
    rows = bench_max_batch.run(memory="100B", plain_batch=4, model="mlp")
    assert rows[1].met and rows[1].goal is None


def test_an_error_that_is_not_of_memory_ends_the_bench(monkeypatch):
    def broken(job: Job) -> Outcome:
        raise TflmsError("training failed (exit -11, limit 9 s)")

    monkeypatch.setattr(bench_max_batch, "run_job", broken)
    with pytest.raises(TflmsError, match="exit -11"):
        bench_max_batch.run(memory="100B")


def test_the_bench_refuses_an_unknown_model():
    assert main(["bench", "max-batch", "--model", "vgg"]) == 2


def test_what_the_bench_asks_for_trains_and_moves():
    config = bench_max_batch._config("chain_rule", 10**9, 2, 8, 512)
    found = children.run_job(Job("mlp", {"layers": 8, "batch": 512}, 10**9, 2, config=config))
    assert found.fits and min(found.trainings[0].to_host_bytes) > 512 * 512 * 4
