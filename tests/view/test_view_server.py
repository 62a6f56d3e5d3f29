"""What `corral view` answers: the numbers of the run's files, to its own page only, from its runs only."""

import io
import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import corral, start_corral
from deadlines import within
from fastapi.testclient import TestClient
from guides import block
from runs import train_here
from served import running
from view_runs import HOSTILE, PLAN, lines_of, record, write_run, write_workers

from corral.observe.console import Console, run_log
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryStore, TrajectoryWriter
from corral.recipe.errors import RunError, UserError
from corral.view import view_server
from corral.view.runs import MOST_STEPS, MetricsReader, Runs, read_placement, split_tokens
from corral.view.static_files import export

PAGE = Path(view_server.PAGE)


def client(*folders: Path, token: str | None = None, **options: Any) -> TestClient:
    return TestClient(view_server.make_app(Runs(folders), token), base_url="http://localhost", **options)


def ask(folder: Path, path: str) -> Any:
    answer = client(folder).get(f"/api/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- the numbers


def test_metrics_are_those_of_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    expected: dict[str, dict[int, float]] = {}
    for row in lines_of(tmp_path / "one" / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step" and value is not None:
                expected.setdefault(name, {})[row["step"]] = value
    shown = ask(tmp_path, "run/one/metrics.json")
    assert shown["steps"] == [0, 1, 2, 3]
    assert expected == {
        name: {step: value for step, value in zip(shown["steps"], values, strict=True) if value is not None}
        for name, values in shown["columns"].items()
    }
    assert 2 not in expected["policy/loss"]  # NaN


def test_steps_and_trajectories_are_those_of_the_store(tmp_path: Path) -> None:
    store = TrajectoryStore(write_run(tmp_path, "one") / "trajectories")
    assert ask(tmp_path, "run/one/run.json")["parts"] == [[1, ""], [2, ""], [3, ""], [3, "validation"]]
    assert ask(tmp_path, "run/one/step/2.json")["trajectories"] == store.summaries(2)
    assert ask(tmp_path, "run/one/step/3.validation.json")["trajectories"] == store.summaries(3, "validation")
    shown = ask(tmp_path, "run/one/step/2/6.json")
    assert {name: shown[name] for name in record(3, 2, 0.5)} == record(3, 2, 0.5)
    assert shown["index"] == 6


def test_the_list_has_score_sparkline_and_speed(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    [run] = ask(tmp_path, "runs.json")["runs"]
    assert (run["before"]["value"], run["after"]["value"], run["after"]["ci95"]) == (0.25, 0.75, 0.1)
    assert run["sparkline"] == [1 / 7, 2 / 7, 3 / 7]
    assert (run["tokens_per_s"], run["step"], run["num_steps"], run["algorithm"]) == (103.0, 3, 3, "grpo")


def test_rewards_and_lengths_of_samples_are_those_of_the_store(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    steps = ask(tmp_path, "run/one/samples.json")["steps"]
    expected = {"reward": 2 * [0, 0.25, 0.5, 0.75], "num_generated": 8 * [5], "index": list(range(8))}
    assert steps == [{"step": step, **expected} for step in (1, 2, 3)]
    TrajectoryWriter(run / "trajectories").write(2, [record(0, 0, None), *(record(0, i, i) for i in range(200))])
    [_, second, _] = ask(tmp_path, "run/one/samples.json")["steps"]
    assert second["reward"] == [float(i) for i in range(0, 200, 4)]  # evenly spread, without those that have none
    assert second["index"] == [i + 1 for i in range(0, 200, 4)]


def test_of_a_long_run_the_same_steps_are_looked_at_when_some_are_added(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    trajectories = run / "trajectories"
    (run_reader := Runs([run]).get("one")).samples()
    for step in range(4, MOST_STEPS + 10):
        shutil.copy(trajectories / "step_000001.parquet", trajectories / f"step_{step:06d}.parquet")
    assert [one["step"] for one in run_reader.samples()["steps"]] == list(range(1, MOST_STEPS + 10, 2))


def test_steps_are_in_order_and_count_once_however_they_were_written(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "a": 1},
        {"step": 4, "b": 2},
        {"step": 3, "a": 5, "b": None},
        {"step": 2, "a": 7},
        {"step": 5, "a": 8},
    ]
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    for row in rows:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        reader.table()
    assert reader.table() == ("1-5", [2, 3, 4, 5], {"a": [7, 5, None, 8], "b": [None, None, 2, None]})


def test_the_states_of_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "done")
    write_run(tmp_path, "cut-short", steps=2)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / ".lock").touch()
    failed = write_run(tmp_path, "failed", steps=2)
    with pytest.raises(RunError), run_log(failed / "logs" / "main.log", Console(io.StringIO())):
        raise RunError("the disk is full")
    write_run(tmp_path, "going-on", steps=2)
    with RunFolder(tmp_path / "going-on"):
        runs = {run["id"]: run for run in ask(tmp_path, "runs.json")["runs"]}
    assert {name: run["state"] for name, run in runs.items()} == {
        "done": "finished",
        "cut-short": "stopped",
        "nothing": "empty",
        "failed": "failed",
        "going-on": "running",
    }
    assert runs["failed"]["last_line"].endswith("the disk is full")


@pytest.mark.parametrize(("schedule", "expected"), [("{steps: 8}", ("stopped", 8)), ("{epochs: 2}", ("finished", 4))])
def test_a_run_that_was_extended_is_as_long_as_its_latest_recipe_says(
    tmp_path: Path, schedule: str, expected: tuple[str, int]
) -> None:
    run = write_run(tmp_path, "longer", steps=5, of=4)
    (run / "recipe.2.yaml").write_text(f"schedule: {schedule}\n")
    checkpoint = run / "checkpoints" / "step_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"step": 4, "num_steps": 4}')
    [found] = ask(tmp_path, "runs.json")["runs"]
    assert (found["state"], found["num_steps"]) == expected


def test_the_ledger_and_logs_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    history = ["issued for step 2", "generated for step 2", "trained at step 2"]
    assert ask(tmp_path, "run/one/prompt/2.json") == {"prompt": 2, "history": history}
    assert ask(tmp_path, "run/one/ledger.json")["trained"] == 6
    assert ask(tmp_path, "run/one/log/main.log.json")["lines"] == ["2026-01-01T00:00:00+0000 WARNING corral.x: ab"]


def test_what_workers_do_is_what_the_controller_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    assert ask(tmp_path, "run/one/workers.json") == {"written": None, "workers": []}
    assert ask(tmp_path, "run/one/stacks.json") == {"processes": []}  # nobody trains it
    write_workers(run, "a line", now=12.0)
    written = json.loads((run / "logs" / "workers.json").read_text())
    lines = ["last words: a line", "", "", ""]
    own = [{**one, "last_line": line} for one, line in zip(written["workers"], lines, strict=True)]
    assert ask(tmp_path, "run/one/workers.json") == {"written": 12.0, "workers": own}
    for broken in ("{", "[]", '{"workers": [1]}', '{"workers": [{"log": "../../x"}]}'):
        (run / "logs" / "workers.json").write_text(broken)
        assert not any(one["last_line"] for one in ask(tmp_path, "run/one/workers.json")["workers"])


def test_folders_are_runs_or_around_them_and_equal_names_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "one")
    write_run(tmp_path / "b", "one")
    app = client(tmp_path / "a", tmp_path / "b" / "one")
    runs = app.get("/api/runs.json").json()["runs"]
    assert [(run["id"], Path(run["folder"]).parent.name) for run in runs] == [("one", "a"), ("one.2", "b")]
    write_run(tmp_path / "a", "late")
    assert app.get("/api/run/late/run.json").status_code == 200


def test_no_such_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        Runs([tmp_path / "nowhere"])


# --- the text of tokens


def test_tokens_of_a_character_are_joined_and_spaces_kept() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "a é 漢字 😀\n"
    tokens = tokenizer.encode(text).ids
    texts = split_tokens(tokenizer, tokens)
    assert "".join(texts) == text
    assert len(texts) == len(tokens) == len(text.encode())
    assert texts[:4] == ["a", " ", "", "é"]
    assert split_tokens(tokenizer, tokens[:3]) == ["a", " ", "\ufffd"]
    assert split_tokens(tokenizer, [*tokens[2:3], *tokens[:2]]) == ["\ufffd", "a", " "]  # bytes that are no character


def test_token_texts_come_from_the_tokenizer_of_the_model_or_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    write_run(tmp_path, "one", model=str(tiny_model))
    shown = ask(tmp_path, "run/one/step/1/1.json")
    assert "".join(shown["response_pieces"]) == tokenizer.decode(shown["response_tokens"], skip_special_tokens=False)
    assert len(shown["prompt_pieces"]) == len(shown["prompt_tokens"])
    write_run(tmp_path, "without")
    assert ask(tmp_path, "run/without/step/1/1.json")["response_pieces"] is None


# --- broken, hostile, being written


def test_broken_files_are_shown_as_problems(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 1, "reward/mean": 1}\n\xff\xfe{\n[]\n{"step": "x"}\n{"reward/mean": 2}\n'
    )
    (run / "recipe.yaml").write_text("name: [")
    (run / "ledger.jsonl").write_text("{}\n")
    (run / "logs" / "main.log").write_bytes(b"\xff\xfe")
    for path in (run / "trajectories").iterdir():
        path.write_bytes(b"\x1f\x8b neither gzip nor Parquet")
    app = client(tmp_path, raise_server_exceptions=False)
    shown = app.get("/api/run/one/run.json").json()
    assert len(shown["problems"]) == 2
    metrics = app.get("/api/run/one/metrics.json").json()
    assert (metrics["steps"], metrics["columns"]) == ([1], {"reward/mean": [1]})
    assert app.get("/api/run/one/ledger.json").json()["problems"]
    assert app.get("/api/run/one/samples.json").json() == {"steps": []}
    assert app.get("/api/run/one/step/1.json").status_code == 422
    assert app.get("/api/run/one/prompt/0.json").status_code == 422
    assert app.get("/api/run/one/step/1/0.json").status_code == 422


def test_empty_folders_are_shown(tmp_path: Path) -> None:
    assert ask(tmp_path, "runs.json")["runs"] == []
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").touch()
    assert ask(tmp_path, "run/new/metrics.json") == {"position": "0-0", "steps": [], "columns": {}}
    assert ask(tmp_path, "run/new/ledger.json") == {}


def test_hostile_text_is_json_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path, "one", text=HOSTILE)
    answer = client(tmp_path).get("/api/run/one/step/1/0.json")
    assert answer.json()["response"] == HOSTILE
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_long_text_is_cut_in_lists_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    TrajectoryWriter(run / "trajectories").write(1, [record(0, 0, 1.0, "x" * 10_000_000)])
    (run / "logs" / "main.log").write_text("x" * 10_000_000)
    app = client(tmp_path)
    assert len(app.get("/api/run/one/step/1.json").content) < 10_000
    assert len(app.get("/api/run/one/step/1/0.json").json()["response"]) == 10_000_000
    assert len(app.get("/api/runs.json").content) < 600_000


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    assert reader.read()[1] == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2,')
    assert reader.read()[1] == [{"step": 1, "a": 1}]
    position, _ = reader.read()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(' "a": 2}\n')
    assert reader.read_after(position)[1] == [{"step": 2, "a": 2}]
    MetricsFile(tmp_path / "metrics.jsonl").truncate_after(1)  # a run that resumes
    assert reader.read_after(position)[1] is None
    assert reader.read()[1] == [{"step": 1, "a": 1}]


def test_new_rows_are_sent_while_a_run_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_server, "LOOK_EVERY_S", 0.02)
    run = write_run(tmp_path, "one", steps=2)
    is_over = threading.Event()
    with RunFolder(run), running(view_server.make_app(Runs([tmp_path]), None, is_over.is_set)) as address:
        with urllib.request.urlopen(f"{address}/api/run/one/metrics.json", timeout=within(10)) as answer:
            position = json.load(answer)["position"]
        with urllib.request.urlopen(f"{address}/api/run/one/events?position={position}", timeout=within(10)) as events:
            first = next_event(events)
            assert (first["rows"], first["state"], first["reset"]) == ([], "running", False)
            MetricsFile(run / "metrics.jsonl").log(3, {"reward/mean": 0.875})
            assert next_event(events)["rows"] == [{"step": 3, "reward/mean": 0.875}]
            MetricsFile(run / "metrics.jsonl").truncate_after(2)
            while not (event := next_event(events))["reset"]:
                assert (event["rows"], event["step"]) == ([], 2)  # the state was looked at after the rows
            is_over.set()
            assert events.read().strip() == b""


def next_event(events: Any) -> dict[str, Any]:
    for line in events:
        if line.startswith(b"data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the events have ended")


# --- who may ask, and for what


@pytest.mark.parametrize(
    "path",
    [
        "api/run/..%2f..%2fetc/run.json", "api/run/%2e%2e/run.json", "api/run/.../run.json", "api/run/%00/run.json",
        "api/run/one/log/..%2f..%2frecipe.yaml.json", "api/run/one/log/%2fetc%2fpasswd.json",
        "api/run/one/log/out.log.json", "api/run/one/step/..%2f1.json", "api/run/one/step/1.%2e%2e.json",
        "api/run/one/step/1/-1.json", "api/run/one/step/9.json", "api/run/one/step/99999999999999999999.json",
        "api/run/one/prompt/x.json", "..%2fserver.py", "%2e%2e/runs.py", "api/openapi.json", "docs", "nowhere.js",
    ],
)  # fmt: skip
def test_no_request_names_a_path(tmp_path: Path, path: str) -> None:
    write_run(tmp_path, "one")
    (tmp_path / "secret").write_text("secret-content")
    os.symlink(tmp_path / "secret", tmp_path / "one" / "logs" / "out.log")
    answer = client(tmp_path / "one").get(path)
    assert answer.status_code in (404, 422), answer.text
    assert "secret-content" not in answer.text


INFINITE = json.dumps({**PLAN, "cluster": {"nodes": 2, "devices_per_node": float("inf"), "devices_of_services": {}}})
ELSEWHERE = json.dumps({**PLAN, "placement": {"actor": [0, 6]}})
HUGE = json.dumps({**PLAN, "cluster": {"nodes": 10**9, "devices_per_node": 10**9, "devices_of_services": {}}})


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"placement": 1, "cluster": {}, "memory": []}',
        HUGE,
        "[" * 100_000,
        INFINITE,
        ELSEWHERE,
    ],
)
def test_the_placement_is_that_of_the_plan_or_nothing(tmp_path: Path, text: str | None) -> None:
    run = write_run(tmp_path, "one")
    if text is not None:
        (run / "plan.json").write_text(text)
    found = client(tmp_path).get("/api/run/one/run.json").json()["placement"]
    if text is not None:
        assert found is None
        return
    assert (found["nodes"], found["devices_per_node"]) == (2, 3)
    assert found["roles"] == {"actor": [0, 1, 3, 4], "reference": [0, 1, 3, 4], "rollout": [2], "judge": [5]}
    assert found["memory"] == [[[0, 1, 3, 4], 3 * 2**30]]


def test_a_run_writes_the_plan_that_is_drawn(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, "schedule.steps=1")
    found = read_placement(run / "plan.json")
    assert found is not None
    assert (found["nodes"], found["devices_per_node"]) == (1, 1)
    assert found["roles"] == {"actor": [0], "rollout": [0]}
    assert found["memory"][0][1] > 2**20


def test_links_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "one")
    (tmp_path / "secret").write_text('{"step": 1, "secret": 1}\n')
    for name in ("plan.txt", "plan.json", "recipe.yaml", "metrics.jsonl", "ledger.jsonl", "logs/main.log"):
        (run / name).unlink()
        os.symlink(tmp_path / "secret", run / name)
    (tmp_path / "runs" / "link").symlink_to(write_run(tmp_path / "elsewhere", "two"))
    app = client(tmp_path / "runs")
    assert [one["id"] for one in app.get("/api/runs.json").json()["runs"]] == ["one"]
    for name in ("run", "metrics", "ledger"):
        assert "secret" not in app.get(f"/api/run/one/{name}.json").text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "runs.example"}, 403),  # a name that was made to stand for this machine
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://pages.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_other_pages_get_no_answer(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    app = view_server.make_app(Runs([tmp_path]), None)
    with TestClient(app, base_url="http://127.0.0.1") as asking:
        asking.headers["host"] = "localhost"
        assert asking.get("/api/runs.json", headers=headers).status_code == status


def test_nothing_can_be_changed(tmp_path: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client(tmp_path).request(method, "/api/runs.json").status_code == 405


def test_with_a_token_the_page_is_open_and_the_numbers_are_not(tmp_path: Path) -> None:
    asking = client(tmp_path, token="a-long-enough-token")
    assert asking.get("/").status_code == 200
    assert asking.get("/app.js").status_code == 200
    for path in ("runs.json", "run/one/run.json", "run/one/events?position=0-0", "nowhere"):
        assert asking.get(f"/api/{path}").status_code == 401
        assert asking.get(f"/api/{path}", headers={"Authorization": "Bearer wrong"}).status_code == 401
    right = {"Authorization": "Bearer a-long-enough-token"}
    assert asking.get("/api/runs.json", headers=right).status_code == 200
    assert asking.get("/api/runs.json", headers={**right, "Origin": "http://pages.example"}).status_code == 403


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one")
    [command] = block("view").commands
    server_process = start_corral(tmp_path, *command.replace("8080", "0").split()[1:])
    server_process.wait_until(lambda: "Ctrl-C" in server_process.stdout.read_text())
    [address] = re.findall(r"http://[0-9.:]+", server_process.stdout.read_text())
    with urllib.request.urlopen(f"{address}/api/runs.json", timeout=within(30)) as answer:
        [run] = json.load(answer)["runs"]
    with urllib.request.urlopen(f"{address}/api/run/one/events?position=1-5", timeout=within(30)) as events:
        assert next_event(events)["state"] == run["state"] == "finished"
        server_process.send(signal.SIGINT)  # while somebody is watching
        finished = server_process.wait(within(30))
    assert (finished.code, finished.stderr) == (0, "")


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    refused = corral(tmp_path, "view", str(tmp_path), "--host", "0.0.0.0")
    assert refused.code == 2
    assert "--token-file" in refused.stderr


# --- the page and static files


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text(tmp_path: Path) -> None:
    policy = client(tmp_path).get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    for path in PAGE.iterdir():
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`>)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path.name
        for danger in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert danger not in text, f"{path.name}: {danger}"


def test_every_word_of_the_page_has_a_chinese_one() -> None:
    chinese = (PAGE / "language.js").read_text()
    names = {"page_run.js": r"const TABS = (\[.*?\])", "panels.js": r"export const TIMES = (\[.*?\])"}
    for path in PAGE.glob("*.js"):
        text = path.read_text()
        words = re.findall(r"""\bt\("([^"]+)"\)""", text)
        if path.name in names:  # shown through t(name)
            [listed] = re.findall(names[path.name], text)
            words += json.loads(listed)
        if path.name == "panels.js":
            words += re.findall(r"""\[\s*"([A-Z][^"]+)",\s*\[""", text)
        for word in words:
            assert re.search(rf'^  "?{re.escape(word)}"?:', chinese, re.MULTILINE), f"{path.name}: {word}"


@pytest.mark.slow
def test_exported_files_are_the_answers_of_the_server(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one")
    write_run(tmp_path / "runs", "two", steps=1)
    [command] = block("view-export").commands
    result = corral(tmp_path, *command.replace("site", "out").split()[1:])
    assert result.code == 0, result.stderr
    app = client(tmp_path / "runs")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 40
    for path in files:
        name = path.relative_to(tmp_path / "out")
        answer = app.get(f"/{name}")
        if name.name == "runs.json":
            assert {**answer.json(), "live": False} == json.loads(path.read_bytes())
        else:
            assert answer.content == path.read_bytes(), name
    assert corral(tmp_path, "view", "runs", "--export", "out").code == 2


def test_damaged_files_of_a_run_are_left_out_of_an_export(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "one", steps=2)
    (run / "trajectories" / "step_000001.parquet").write_bytes(b"damaged")
    (run / "ledger.jsonl").write_text("damaged\n")
    reported: list[str] = []
    export([tmp_path / "runs"], tmp_path / "out", reported.append)
    assert [line.startswith("warning: left out: ") for line in reported] == [True, True, False]
    assert "step_000001.parquet cannot be read" in reported[0]
    assert "is not a line of a ledger" in reported[1]
    assert {path.name for path in (tmp_path / "out/api/run/one/step").glob("*.json")} == {"2.json", "2.validation.json"}


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "one", steps=1)
    (run / "trajectories" / "step_000001.parquet").write_bytes(b"damaged")

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export([tmp_path / "runs"], tmp_path / "out", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
