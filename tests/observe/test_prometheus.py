"""`logging.prometheus`: the run's last numbers, read by Prometheus' own parser; and the dashboard for Grafana."""

import asyncio
import io
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from deadlines import within
from runs import VALIDATION, write_recipe

import corral.observe
from corral.http_server import PrometheusText, labels
from corral.loop.train import running
from corral.loop.training_loop import Interrupt, run_steps
from corral.observe.console import Console, run_log
from corral.observe.prometheus import PrometheusServer, prometheus_name
from corral.observe.run_files import read_metrics
from corral.observe.run_folder import RunFolder
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.schema import Prometheus

parser = pytest.importorskip("prometheus_client.parser")
DASHBOARD = Path(corral.observe.__path__[0]) / "grafana_dashboard.json"
TOKEN = "a-token-that-nobody-guesses"


def scrape(url: str, token: str | None = None, host: str | None = None) -> dict[str, Any]:
    """The samples of a scrape, by name: labels and value of each."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers | ({} if host is None else {"Host": host}))
    with urllib.request.urlopen(request, timeout=within(10)) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    assert all(family.type == "gauge" for family in families)
    found: dict[str, Any] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_prometheus_reads_the_last_numbers_of_the_run() -> None:
    server = PrometheusServer(Prometheus(port=0), 'a "run"\\')
    try:
        server.log(0, {"validation/mean@8": 0.25})
        server.log(1, {"reward/mean": 0.1})
        server.log(2, {"reward/mean": 0.123456789012, "policy/loss": float("nan"), "x/b c": 1.0, "x/b_c": 2.0})
        found = scrape(server.url)
    finally:
        server.close()
    run = {"run": 'a "run"\\'}
    assert found["corral_run_step"] == [(run, 2.0)]
    assert found["corral_reward_mean"] == [({**run, "metric": "reward/mean"}, 0.123456789012)]
    assert found["corral_validation_mean_at_8"] == [({**run, "metric": "validation/mean@8"}, 0.25)]
    assert str(found["corral_policy_loss"][0][1]) == "nan"
    assert {own["metric"]: value for own, value in found["corral_x_b_c"]} == {"x/b c": 1.0, "x/b_c": 2.0}


@pytest.mark.parametrize("token_file", ["{folder}/token", "~/token"])
def test_who_has_no_token_learns_nothing(token_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    server = PrometheusServer(Prometheus(port=0, token_file=token_file.format(folder=tmp_path)), "run")
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(server.url)
        assert refused.value.code == 401
        found = scrape(server.url, TOKEN)
        assert found["corral_run_updated_timestamp_seconds"]
        assert "corral_run_step" not in found  # nothing was logged yet; of a resumed run, 0 would be wrong
    finally:
        server.close()


def test_a_page_of_another_name_is_refused_and_the_end_frees_the_port() -> None:
    server = PrometheusServer(Prometheus(port=0), "run")
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(server.url, host="evil.example")
    assert refused.value.code == 403
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port}.*logging.prometheus"):
        PrometheusServer(Prometheus(port=port), "run")
    server.close()
    PrometheusServer(Prometheus(port=port), "run").close()


def test_labels_are_escaped_as_prometheus_wants() -> None:
    page = PrometheusText("a")
    page.add("b", "gauge", "What.", {labels(x='1"\\\n'): 1e-9, labels(x="two"): 123456789.5})
    [family] = parser.text_string_to_metric_families(page.text)
    assert [(one.labels["x"], one.value) for one in family.samples] == [('1"\\\n', 1e-9), ("two", 123456789.5)]


@pytest.mark.slow
def test_every_query_of_the_dashboard_finds_a_metric_of_a_run(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("logging.prometheus.port=0", "schedule.steps=1", *VALIDATION)
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    console = Console(io.StringIO())
    found: dict[str, Any] = {}

    async def run_here(folder: RunFolder, interrupt: Interrupt) -> None:
        async with running(recipe, folder, console, interrupt, None) as run:
            await run_steps(run)
            url = re.search(r"http://\S+/metrics", (folder.logs / "main.log").read_text())
            assert url is not None
            found.update(await asyncio.to_thread(scrape, url[0]))

    with (
        RunFolder.open(tmp_path / "runs", "tiny", "never") as folder,
        Interrupt(console.warn) as interrupt,
        run_log(folder.logs / "main.log", console),
    ):
        asyncio.run(run_here(folder, interrupt))
    rows = read_metrics(folder.metrics)
    written = {name: row[name] for row in rows for name in row if name != "step"}
    served = {own["metric"]: value for name in found for own, value in found[name] if "metric" in own}
    assert served == pytest.approx(written, rel=1e-12)
    assert set(found) >= {f"corral_{prometheus_name(name)}" for name in written}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"]["query"])
    assert len(queries) > 10
    for query in queries:
        names = re.findall(r"\bcorral_\w+", query)
        exact = [name for name in names if f'"{name}' not in query]
        patterns = re.findall(r'__name__=~"([^"]+)"', query)
        assert exact or patterns, query
        assert all(name in found for name in exact), query
        assert all(any(re.fullmatch(pattern, name) for name in found) for pattern in patterns), query
