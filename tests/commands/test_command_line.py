"""The command line: which commands there are, what they say, how they fail."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.emulated import run_on_emulator
from tflms.__main__ import COMMANDS, main
from tflms.commands import bench, doctor, options
from tflms.config import Config
from tflms.errors import ConfigError, TflmsError
from tflms.rewriting import ruleset

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command_without_loading_tensorflow():
    code = (
        "import sys\nfrom tflms.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["dmeo"])
    assert leaving.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_an_error_of_the_package_is_one_line_and_exit_status_2(capsys):
    assert main(["rules", "swapp"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tflms: no rule 'swapp'; did you mean 'swap'?")
    assert "Traceback" not in told


def test_every_rule_is_listed(capsys):
    assert main(["rules"]) == 0
    told = capsys.readouterr().out
    assert len(ruleset.load_all()) >= 6
    assert all(name in told for name in ruleset.load_all())


@pytest.mark.parametrize("name", ruleset.load_all())
def test_a_rule_is_printed_with_all_its_parts(name, capsys):
    assert main(["rules", name]) == 0
    told = capsys.readouterr().out
    rule = ruleset.load_all()[name]
    assert told.count("refused, ") == len(rule.refusals)
    assert told.count("example: ") == len(rule.examples)
    for call in (*rule.requires, *rule.ensures):
        assert call.name in told
    for case in (*rule.examples, *rule.refusals):
        for line in case["before"].strip().splitlines():
            assert line in told


def test_the_source_of_a_rule_is_its_file(capsys):
    assert main(["rules", "swap", "--source"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "[[refusal]]" in told
    assert 'name = "swap"' in told


# Options made from the fields of Config.


def settings(*words: str, **defaults: object) -> Config:
    parser = argparse.ArgumentParser()
    options.add_config_options(parser, **defaults)
    return options.config_of(parser.parse_args(words))


def test_without_options_the_config_is_the_default():
    assert settings() == Config()


def test_every_field_of_config_has_an_option():
    parser = argparse.ArgumentParser()
    options.add_config_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for entry in dataclasses.fields(Config):
        assert "--" + entry.name.replace("_", "-") in flags


def test_options_become_settings_of_the_right_type():
    got = settings(
        *("--n-tensors", "40", "--lb", "3", "--ub", "50", "--strategy", "direct_order"),
        *("--swap-branches", "--branch-threshold", "9", "--no-fuse-swapins"),
        *("--excl-types", "Relu", "MaxPool", "--min-swap-bytes", "1MB", "--memory-limit", "0.6"),
    )
    assert got == Config(
        n_tensors=40, lb=3, ub=50, strategy="direct_order", swap_branches=True, branch_threshold=9,
        fuse_swapins=False, excl_types=("Relu", "MaxPool"), min_swap_bytes="1MB", memory_limit=0.6,
    )  # fmt: skip


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("lb = 4\nub = 90\n", encoding="utf-8")
    got = settings("--config", str(file), "--lb", "6", lb=2, ub=20, n_tensors=7)
    assert (got.lb, got.ub, got.n_tensors) == (6, 90, 7)


def test_what_config_refuses_is_refused_on_the_command_line():
    with pytest.raises(ConfigError, match="lb must not be larger than ub"):
        settings("--lb", "9", "--ub", "3")


def test_an_unknown_strategy_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        settings("--strategy", "chain")
    assert "chain_rule" in capsys.readouterr().err


# Benches.


def test_benches_are_found_and_described():
    found = bench.benches()
    assert {"max-batch", "solver"} <= set(found)
    assert all(found.values())


def test_a_benchs_parameters_become_options_and_its_rows_the_exit_status(tmp_path, monkeypatch):
    (tmp_path / "bench_two_plus.py").write_text(
        textwrap.dedent(
            '''
            """``python -m tflms bench two-plus``: adds."""
            import dataclasses
            from collections.abc import Sequence

            @dataclasses.dataclass
            class Row:
                total: float
                met: bool

            def run(*, numbers: Sequence[int] = (1, 2), least: float | None = None,
                    loud: bool = False, console: object = None) -> list[Row]:
                """Add.

                Args:
                    numbers: what is added,
                        all of it.
                    least: what the total must be.
                """
                total = sum(numbers)
                return [Row(total, least is None or total >= least)]
            '''
        ),
        encoding="utf-8",
    )
    (tmp_path / "bench_helper.py").write_text('"""No bench."""\n', encoding="utf-8")
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    monkeypatch.setattr("tflms.commands.__path__", [str(tmp_path)])
    assert bench.benches() == {"two-plus": "adds"}
    out = tmp_path / "rows.json"
    assert main(["bench", "two-plus", "--numbers", "3", "4", "--json", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == [{"total": 7, "met": True}]
    assert main(["bench", "two-plus", "--least", "3.5"]) == 1
    assert main(["bench", "two-plus", "--least", "3"]) == 0


def test_the_arguments_of_a_docstring_are_told():
    def example(first: int, second: str) -> None:
        """Do.

        Args:
            first: one thing that
                goes on.
            second: another.

        Returns:
            nothing: really.
        """

    assert options.argument_helps(example) == {
        "first": "one thing that goes on",
        "second": "another",
    }


# Doctor.


def test_doctor_finds_this_installation_fine():
    findings = doctor.examine()
    assert {each.subject: each.state for each in findings if each.state != "fine"} == {}
    assert "emulated accelerator" in [each.subject for each in findings]


def test_doctor_names_what_is_wrong_and_goes_on(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor.installed, "DISTRIBUTIONS", ("numpy", "rich"))
    assert main(["doctor", "--json"]) == 1
    findings = {each["subject"]: each for each in json.loads(capsys.readouterr().out)}
    assert findings["compiler"]["state"] == "wrong"
    assert "install g++" in findings["compiler"]["told"]
    assert "overwrite each other" in findings["one TensorFlow"]["told"]
    assert findings["rules"]["state"] == "fine"
    assert "emulated accelerator" not in findings  # nothing is built where that cannot work


# Saved graphs.


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A saved MLP, rewritten by the command line, and what both need and give."""
    folder = tmp_path_factory.mktemp("saved")
    plain = folder / "plain.meta"
    run_on_emulator(
        """
        from tflms.zoo import graphs
        c = graphs.mlp(8, 128, batch=512, device=emulator.device)
        with c.graph.as_default():
            v1.train.export_meta_graph(path)
        tf.io.write_graph(c.graph, folder, "plain.pbtxt")
        result = [c.loss.name, c.train_op.name]
        """,
        path=str(plain),
        folder=str(folder),
    )
    base = ["--loss", "loss:0", "--batch-size", "512", "--min-swap-bytes", "1"]

    def command(*words: str) -> tuple[int, str]:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            status = main(words)
        return status, told.getvalue()

    plan = command("plan", str(plain), *base, "-o", str(folder / "plan.json"))
    rewritten = command(
        *("rewrite", str(plain), "--loss", "loss:0", "--plan", str(folder / "plan.json")),
        *("-o", str(folder / "rewritten.meta"), "--save-report", str(folder / "report.json")),
    )
    text = command(
        *("rewrite", str(folder / "plain.pbtxt"), *base, "-o", str(folder / "rewritten.pbtxt")),
    )
    broken = folder / "broken.meta"
    broken.write_bytes(b"no graph")
    nothing = command("rewrite", str(broken), *base, "-o", str(folder / "x.meta"))
    trained = run_on_emulator(
        """
        tf.config.experimental.enable_op_determinism()
        result = {}
        data = np.random.RandomState(0).randn(512, 128).astype("f")
        for name in ("plain", "rewritten"):
            with tf.Graph().as_default() as graph:
                v1.train.import_meta_graph(f"{folder}/{name}.meta")
            with v1.Session(graph=graph) as session:
                session.run("init")
                emulator.reset_stats()
                losses = [float(session.run(["loss:0", train], {"x:0": data})[0])
                          for _ in range(3)]
                stats = emulator.stats()
                values = session.run(graph.get_collection("variables"))
            result[name] = [losses, [float(v.sum()) for v in values], stats.peak_bytes,
                            stats.to_host_bytes]
        """,
        folder=str(folder),
        train="GradientDescent",
    )
    return {"plan": plan, "rewritten": rewritten, "text": text, "nothing": nothing,
            "trained": trained, "folder": folder}  # fmt: skip


def test_a_saved_graph_is_planned(saved_run):
    status, told = saved_run["plan"]
    assert status == 0, told
    assert int(re.search(r"\bswap (\d+)", told)[1]) >= 6, told
    assert "before" in told


def test_a_saved_graph_is_rewritten_and_trains_with_the_same_numbers(saved_run):
    status, told = saved_run["rewritten"]
    assert status == 0, told
    plain, rewritten = saved_run["trained"]["plain"], saved_run["trained"]["rewritten"]
    assert rewritten[:2] == plain[:2]
    assert rewritten[3] > 512 * 128 * 4 > plain[3]
    assert rewritten[2] < plain[2]


def test_a_graph_def_as_text_is_rewritten(saved_run):
    status, told = saved_run["text"]
    assert status == 0, told
    text = (saved_run["folder"] / "rewritten.pbtxt").read_text(encoding="utf-8")
    assert text.count("_grappler_do_not_remove") >= 14


def test_a_file_without_a_graph_is_refused(saved_run):
    status, told = saved_run["nothing"]
    assert status == 2
    assert "neither a MetaGraphDef nor a GraphDef" in told
    assert not (saved_run["folder"] / "x.meta").exists()


def test_a_saved_report_reads_as_the_one_that_was_printed(saved_run, capsys):
    from tflms.commands import report as command

    file = saved_run["folder"] / "report.json"
    report = command.load(file)
    assert report.swaps and report.to_dict() == json.loads(file.read_text(encoding="utf-8"))
    assert main(["report", str(file), "--swaps", "--refusals"]) == 0
    told = capsys.readouterr().out
    assert f"{len(report.swaps)} values" in told
    assert main(["report", str(file), "--why", report.swaps[0].value]) == 0
    assert "is swapped" in capsys.readouterr().out
    assert main(["report", str(file), "--why", "nowhere"]) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "swaps": [{"value": 1}]}'])
def test_what_is_no_report_is_refused(content, tmp_path):
    from tflms.commands import report as command

    file = tmp_path / "report.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(TflmsError):
        command.load(file)
