"""The page of `corral view` in a real browser: every page, by click and key, without an error."""

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, browser
from commands import start_corral
from PIL import Image
from runs import VALIDATION, write_recipe
from served import running
from view_runs import HOSTILE, lines_of, metrics_of, record, write_run, write_workers

from corral.observe.console import Console, run_log
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter
from corral.recipe.errors import RunError
from corral.view import view_server
from corral.view.runs import Runs
from corral.view.static_files import export

pytestmark = [pytest.mark.slow, pytest.mark.lab, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def address(tmp_path: Path, tiny_model: Path, page: Browser) -> Iterator[str]:
    """A server with a finished run, a hostile one and a broken one; afterwards nothing must have gone wrong."""
    write_run(tmp_path, "done", model=str(tiny_model))
    write_run(tmp_path, "hostile", text=HOSTILE, model=str(tiny_model))
    broken = write_run(tmp_path, "broken")
    (broken / "recipe.yaml").write_text("name: [")
    (broken / "metrics.jsonl").write_text("{\n")
    with served(tmp_path) as own:
        page.problems.clear()
        page.requested.clear()
        yield own
        assert page.problems == []
        assert [asked for asked in page.requested if not asked.startswith((own, "data:", "blob:"))] == []
        page.open("about:blank")


def served(folder: Path, token: str | None = None) -> "running":
    return running(view_server.make_app(Runs([folder]), token))


def go(page: Browser, address: str, wanted: str) -> None:
    """Opens a page and waits for a text on it."""
    page.open(address)
    page.wait(f"document.body?.innerText.includes({wanted!r})")


def click(page: Browser, selector: str) -> None:
    page.wait(f"document.querySelector({selector!r}) !== null")
    page.run(f"document.querySelector({selector!r}).click()")


def test_from_the_list_to_a_token(page: Browser, address: str) -> None:
    go(page, f"{address}/#/", "75 %")
    assert page.run("document.querySelectorAll('.sparkline').length") == 2
    click(page, "a[href='#/run/done']")
    page.wait("document.querySelectorAll('figure:not([hidden])').length > 4")
    click(page, "a[href='#/run/done/steps']")
    click(page, "a[href='#/run/done/step/2']")
    page.wait("document.querySelectorAll('.sample').length === 8")
    # Whether the reward is right is seen in the row: question, answer, the best and the worst reply.
    first = page.run("document.querySelector('.groups tbody tr').innerText").replace("\n", " ")
    assert "What is 2 and ab? reference answer 2ab" in first
    assert page.run(
        "[...document.querySelectorAll('.groups tbody tr:first-child .words')].map(one => one.innerText).join()"
    ) == ("0.75 ab,0 ab")
    click(page, "a[href='#/run/done/step/2/5']")
    page.wait("document.querySelector('.card .asked')?.innerText === 'What is 3 and ab?'")
    page.wait("document.querySelectorAll('.token').length === 9")
    page.press("ArrowRight")
    for _ in range(4):
        page.press("ArrowRight")
    # The second token of the reply of sample 1: place 1 of `record`.
    assert "log-prob in the engine -0.375" in page.wait("document.querySelector('.values').innerText").replace(
        "\n", " "
    )
    assert "entropy 0.5" in page.run("document.querySelector('.values').innerText").replace("\n", " ")
    for column in ("advantages", "entropies", "versions", "generated"):
        page.run(
            f"(s => {{ s.value = '{column}'; s.dispatchEvent(new Event('change')) }})(document.querySelector('select'))"
        )
        assert page.run("[...document.querySelectorAll('.token')].some(one => one.style.backgroundColor)")
    assert page.run("[...document.querySelectorAll('.message')].map(one => one.className.split(' ')[1]).join()") == (
        "prompt,turn,observation,turn"
    )
    frame = "document.querySelector('.frame').innerText"
    assert page.run(frame) == "P_G"
    page.press(".")
    page.press(".")
    assert page.run(frame) == "__ab"
    assert "after turn 2 / 2" in page.run("document.querySelector('.frames').innerText")
    click(page, "a[href$='/tree']")
    page.wait("document.querySelectorAll('.tree .segment .sample').length === 4")
    click(page, "a[href$='/beside']")
    page.wait("document.querySelectorAll('.first-difference').length === 2")


def test_the_placement_is_drawn(page: Browser, address: str, tmp_path: Path) -> None:
    """Two nodes with three devices, each with a stripe for every role that it has."""
    go(page, f"{address}/#/run/done/plan", "one device")
    page.wait("document.querySelectorAll('.place').length === 6")
    stripes = "[...document.querySelectorAll('.place')].map(one => one.querySelectorAll('[class^=fill]').length).join()"
    assert page.run(stripes) == "2,2,1,2,2,1"
    titles = page.run("[...document.querySelectorAll('.place title')].map(one => one.textContent)")
    assert titles[0] == "device 0: actor, reference\n3 GiB"
    assert titles[5] == "device 5: judge"
    assert page.run("[...document.querySelectorAll('.node')].map(one => one.textContent).join()") == "node 0,node 1"
    (tmp_path / "done" / "plan.json").unlink()
    go(page, f"{address}/?old#/run/done/plan", "one device")
    assert page.run("document.querySelector('.placement')") is None


def test_every_other_page(page: Browser, address: str) -> None:
    for tab, wanted in {
        "recipe": "algorithm:", "plan": "one device", "logs": "WARNING corral.x", "logs/main.log": "WARNING corral.x",
        "ledger": "clean", "ledger/2": "trained at step 2", "step/3.validation": "Distribution", "x/y": "no such page",
        "step/99": "no trajectories of step 99", "step/1/99": "has no trajectory 99",
    }.items():  # fmt: skip
        go(page, f"{address}/#/run/done/{tab}", wanted)
    # What is not there is answered by 422 or 404, which the browser logs.
    page.problems[:] = [one for one in page.problems if "Failed to load resource" not in one]
    go(page, f"{address}/#/compare/done,hostile", "The recipes differ in nothing but the name")
    titles = page.wait("[...document.querySelectorAll('figure:not([hidden]) .title')].map(one => one.innerText)")
    assert titles[:2] == ["Reward: reward/mean", "Held-out score: validation/mean@1"]
    go(page, f"{address}/#/run/broken", "cannot be read")


def test_what_the_metrics_say_is_a_sentence_and_what_never_changes_a_line(page: Browser, address: str) -> None:
    go(page, f"{address}/#/run/done", "Always the same: samples/errors 0")
    assert "reward +0.143 in 3 steps (0.214 → 0.357); entropy 2.83 → 2.72" in page.text()
    shown = "[...document.querySelectorAll('figure')].filter(one => one.checkVisibility())"
    titles = page.run(f"{shown}.map(one => one.querySelector('.title').innerText)")
    assert titles[:2] == ["Reward", "Held-out score"]
    assert "Samples" not in titles
    assert "40 %" in page.run(f"{shown}[1].textContent")


def test_rewards_over_the_run_lead_to_samples(page: Browser, address: str) -> None:
    """In each of three steps eight samples have four rewards: four bins in a column, and a dot for each sample."""
    go(page, f"{address}/#/run/done", "Reward against length")
    figure = "[...document.querySelectorAll('figure')].find(one => one.innerText.includes('{}'))"
    cells = f"{figure.format('Distribution of rewards over')}.querySelectorAll('rect').length"
    assert page.run(cells) == 12
    dots = f"{figure.format('Reward against length')}.querySelectorAll('circle')"
    assert page.run(f"{dots}.length") == 2 * 2 * 8
    page.run(f"{dots}[11].dispatchEvent(new MouseEvent('click'))")
    page.wait("location.hash === '#/run/done/step/2/3'")


def test_parts_of_the_reward_repeats_and_ratios_by_position_are_drawn(page: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, "parts")
    recipe = "environment: {rewards: {right: {name: exact, weight: 2}, long: {name: exact, weight: -0.5}}}\n"
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text() + recipe)
    (run / "metrics.jsonl").write_text("")
    metrics = MetricsFile(run / "metrics.jsonl")
    for step in range(1, 5):
        rewards = {"reward/right/mean": step / 4, "reward/long/mean": 1.0}
        metrics.log(step, metrics_of(step) | rewards | {"samples/repeats": step / 10})
    tokens = {"response_tokens": [5] * 20, "generated": [1] * 20, "logprobs": [-1.0] * 20}
    drifted = {"trained_logprobs": [-1.0] * 18 + [-0.5] * 2}
    TrajectoryWriter(run / "trajectories").write(2, [record(0, 0, 1.0) | tokens | drifted])
    with served(tmp_path) as own:
        go(page, f"{own}/#/run/parts", "What the reward is the sum of")
        figure = "[...document.querySelectorAll('figure')].find(one => one.innerText.includes('{}'))"
        parts = figure.format("What the reward is the sum of")
        assert "long × -0.5" in page.run(f"{parts}.innerText")
        assert page.run(f"{parts}.querySelector('.bar title').textContent") == "step 1\nlong × -0.5 -0.5\nright × 2 0.5"
        assert page.run(f"[...{parts}.querySelectorAll('.bar')].at(-1).querySelectorAll('rect').length") == 2
        assert "40 %" in page.run(f"{figure.format('samples/repeats')}.textContent")
        go(page, f"{own}/#/run/parts/step/2", "Tokens with the largest ratio")
        assert "repeats 94 %" in page.run("document.querySelector('.facts').innerText").replace("\n", " ")
        click(page, "details summary")
        titles = f"[...{figure.format('by position in the reply')}.querySelectorAll('rect title')]"
        assert page.run(f"{titles}.at(-1).textContent") == "90–100 %: 0.649"
        page.open("about:blank")


def test_the_worst_token_and_the_slowest_sample_of_a_step_are_links(page: Browser, address: str) -> None:
    go(page, f"{address}/#/run/done/step/2", "Tokens with the largest ratio: 1.45")
    facts = page.run("document.querySelector('.facts').innerText").replace("\n", " ")
    assert "generation: median, slowest 1 s, 1.25 s environment: median, slowest 0.125 s, 0.125 s" in facts
    click(page, "details summary")
    assert page.run("document.querySelector('details tbody tr').innerText").split("\t")[::2] == ["1.455", "4", "3"]
    click(page, "details tbody a")
    page.wait("document.querySelector('.token.pointed')?.dataset.token === '7'")
    assert "ratio trainer / engine 1.45499" in page.run("document.querySelector('.values').innerText")
    said = "[...document.querySelectorAll('.said .who')].map(one => one.innerText).join()"
    assert page.run(said) == "prompt,reply"


def test_colors_do_not_depend_on_what_else_is_shown(page: Browser, address: str) -> None:
    """The tile of a reward and the color of a token are the same on every page that shows them."""
    color = "getComputedStyle(document.querySelector('{}')).backgroundColor"
    tile = color.format('.sample[href$="/step/2/3"]')
    token = color.format('[data-sample="3"] [data-token="4"], .message [data-token="4"]')
    go(page, f"{address}/#/run/done/step/2", "zero-variance")
    of_step = page.run(tile)
    go(page, f"{address}/#/run/done/step/2/3", "turn 1")
    assert page.run(tile) == of_step
    of_token = page.run(token)
    go(page, f"{address}/#/run/done/step/2/3/tree", "sample 3: 0.75")
    assert page.run(tile) == of_step
    assert page.run(token) == of_token


def test_roles_are_read_from_the_templates_of_chats(page: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, "chats", steps=0)
    texts = {
        "chatml": (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
            "A<|im_end|>",
        ),
        "llama": (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "A<|eot_id|>",
        ),
        "gemma": ("<bos><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n", "A<end_of_turn>"),
        "mistral": ("<s>[INST] U [/INST]", " A</s>"),
        "deepseek": ("<｜begin▁of▁sentence｜><｜User｜>U<｜Assistant｜>", "A<｜end▁of▁sentence｜>"),
    }
    rows = [
        {**record(i, 0, 1.0), "prompt": prompt, "response": reply} for i, (prompt, reply) in enumerate(texts.values())
    ]
    TrajectoryWriter(run / "trajectories").write(1, rows)
    page.problems.clear()
    with served(tmp_path) as address:
        for index, name in enumerate(texts):
            go(page, f"{address}/#/run/chats/step/1/{index}", f"What is {index} and")
            shown = page.wait("[...document.querySelectorAll('.said')].map(one => one.innerText.replace(/\\s+/, ' '))")
            assert shown == ["system S"] * (name == "chatml") + ["user U", "assistant A"], name
        page.open("about:blank")
    assert page.problems == []


def test_pairs_rows_and_failed_steps_have_pages_of_their_own(page: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, "others", of=9)
    writer = TrajectoryWriter(run / "trajectories")

    def answer(prompt_id: int, reward: float | None, text: str = "ab") -> dict[str, Any]:
        own = record(prompt_id, 0, reward, text)
        return {name: own[name] for name in own if name not in ("logprobs", "versions")} | {"turn_rewards": []}

    pair = [{**answer(0, 0.5 - i, "no" if i else "yes"), "is_chosen": not i} for i in range(2)]
    writer.write(4, [*pair, *({**one, "prompt_id": 1, "reward": -one["reward"] / 2} for one in pair)])
    writer.write(5, [{**answer(i, None), "trained_logprobs": [-i] * 6} for i in range(2)])
    writer.write(6, [{**record(i, 0, None), "error": "KeyError: 'judge'"} for i in range(2)], part="failed")
    with pytest.raises(RunError), run_log(run / "logs" / "main.log", Console(io.StringIO())):
        raise RunError("all 2 samples failed")
    page.problems.clear()
    with served(tmp_path) as address:
        go(page, f"{address}/#/run/others/step/4", "mean margin")
        facts = page.run("document.querySelector('.facts').innerText").replace("\n", " ")
        assert "accuracy 0.5 mean margin 0.25 implicit reward of the chosen 0.125" in facts
        assert page.run("document.querySelector('.groups tbody tr').innerText").split() == (
            [
                "0",
                "1",
                "What",
                "is",
                "0",
                "and",
                "yes?",
                "reference",
                "answer",
                "0yes",
                "chosen",
                "0.5",
                "yes",
                "rejected",
                "-0.5",
                "no",
            ]
        )
        go(page, f"{address}/#/run/others/step/5", "loss per token")
        assert "trained tokens 10 loss per token 0.6" in page.run("document.querySelector('.facts').innerText").replace(
            "\n", " "
        )
        go(page, f"{address}/#/", "all 2 samples failed")
        assert "ended_by" not in page.text()
        go(page, f"{address}/#/run/others", "Its last samples")
        click(page, "p.problem a")
        page.wait("location.hash === '#/run/others/step/6.failed'")
        page.wait("document.querySelectorAll('.sample.failed').length === 2")
        assert "KeyError: 'judge'" in page.text()
        page.open("about:blank")
    assert page.problems == []


def test_numbers_on_the_page_are_those_of_the_file(page: Browser, address: str, tmp_path: Path) -> None:
    go(page, f"{address}/#/run/done/steps", "step 3")
    shown = page.run("[...document.querySelectorAll('tbody tr')].map(row => row.children[2].innerText).join()")
    means = {row["step"]: row["reward/mean"] for row in lines_of(tmp_path / "done" / "metrics.jsonl") if len(row) > 4}
    assert shown == ",".join(["0.75" if step == 0 else f"{means[step]:.4g}" for step in (0, 3, 2, 1)])


def test_what_the_workers_of_a_cluster_do(page: Browser, address: str, tmp_path: Path) -> None:
    """While the run's folder is in use it is a run that is being trained; then it has ended."""
    write_workers(tmp_path / "hostile", HOSTILE, time.time())
    with RunFolder(tmp_path / "hostile"):
        go(page, f"{address}/#/run/hostile/workers", "host1 (10.0.0.2)")
        shown = page.run("[...document.querySelectorAll('.device')].map(one => one.innerText.replace(/\\s+/g, ' '))")
        assert shown[0].startswith("0 actor, reference busy actor.accumulate · 1 min · pid 100 last words: <script>")
        assert [one.split(" · ")[0] for one in shown[1:3]] == [
            "1 actor, reference idle pid 101",
            "2 rollout silent rollout.collect",
        ]
        assert page.run("document.querySelectorAll('.machine').length") == 2
        assert page.run("document.querySelectorAll('.device.lost').length") == 1
        write_workers(tmp_path / "hostile", "next line", time.time())
        page.wait("document.querySelector('.device').innerText.includes('next line')")  # without being asked
        page.run("[...document.querySelectorAll('button')].find(one => one.innerText.includes('Stacks')).click()")
        # This process trains nothing.
        page.wait("document.querySelector('main').innerText.includes('asks all nodes')")
    go(page, f"{address}/#/run/done/workers", "no workers on a cluster")
    go(page, f"{address}/#/run/hostile/workers", "ended")
    click(page, "a[href$='logs/worker-0.log']")
    page.wait("document.querySelector('pre')?.innerText.includes('next line')")
    assert page.run("window.hacked") is None


def test_hostile_text_is_text(page: Browser, address: str) -> None:
    for where in ("run/hostile/logs", "run/hostile/step/1", "run/hostile/step/1/0", "run/hostile/step/1/0/tree"):
        go(page, f"{address}/#/{where}", "1")
        time.sleep(0.3)
        assert page.run("window.hacked") is None
        assert page.run("document.querySelectorAll('main script, main img, main svg[onload]').length") == 0
    go(page, f"{address}/#/run/hostile/logs", "<script>window.hacked=1</script>")
    assert page.run("[...document.querySelectorAll('.code')].map(one => one.innerText).join()").startswith(
        "\\u202e,\\u001b"
    )


def test_pictures_of_an_environment_are_shown(page: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, "drawn")
    pictures = []
    for color in ("red", "blue"):
        file = io.BytesIO()
        Image.new("RGB", (5, 3), color).save(file, "PNG")
        pictures.append(file.getvalue())
    TrajectoryWriter(run / "trajectories").write(1, [{**record(0, 0, 1.0), "frames": None, "pictures": pictures}])
    page.problems.clear()
    with served(tmp_path) as address:
        go(page, f"{address}/#/run/drawn/step/1/0", "before the first turn")
        page.wait("document.querySelector('.frame img').naturalWidth === 5")
        page.press(".")
        page.wait("document.querySelector('.frames').innerText.includes('after turn 1 / 1')")
        page.open("about:blank")
    assert page.problems == []


def test_keys_theme_language_and_a_phone(page: Browser, address: str, tmp_path: Path) -> None:
    go(page, f"{address}/#/run/done", "Reward")
    theme = page.run("document.documentElement.dataset.theme")
    page.press("d")
    assert page.run("document.documentElement.dataset.theme") != theme
    page.press("l")
    page.wait("document.body.innerText.includes('奖励')")
    page.press("?")
    page.wait("document.querySelector('dialog[open]') !== null")
    page.press("Escape")
    page.wait("document.querySelector('dialog') === null")
    page.press("l")
    page.wait("document.body.innerText.includes('Reward')")
    page.resize(375, 800)
    write_workers(tmp_path / "done")
    for where in (
        "",
        "run/done",
        "run/done/workers",
        "run/done/plan",
        "run/done/step/1",
        "run/done/step/1/0",
        "compare/done,hostile",
    ):
        page.run(f"location.hash = '#/{where}'")
        page.wait("document.querySelector('main').innerText.length > 40")
        time.sleep(0.3)
        assert page.run("document.documentElement.scrollWidth") <= 375, where
    page.resize(1280, 900)


def test_charts_zoom_smooth_and_are_saved(page: Browser, address: str) -> None:
    go(page, f"{address}/#/run/done", "Entropy")
    texts = page.wait(
        "import('./chart_files.js').then(m => m.csvText([{name: 'a,b', steps: [1, 2], values: [0.5, null]}]))"
    )
    assert texts == 'step,"a,b"\n1,0.5\n2,\n'
    page.run("""(() => {
        const chart = document.querySelector('.chart'), box = chart.getBoundingClientRect();
        const at = (kind, x) => chart.dispatchEvent(new PointerEvent(kind, {clientX: box.left + x}));
        at('pointerdown', 60); at('pointermove', 160); at('pointermove', 230); at('pointerup', 230);
    })()""")
    last = "document.querySelector('.chart').querySelectorAll('circle').length"
    assert page.wait(f"{last} < 3") is True
    page.press("0")
    assert page.wait(f"{last} === 3")
    page.run(
        "(box => { box.value = 2; box.dispatchEvent(new Event('input')) })(document.querySelector('input[type=range]'))"
    )
    assert page.wait("document.querySelector('.chart .faint') !== null")
    page.run("window.saved = []; HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download) }")
    page.run("document.querySelectorAll('figure .menu')[0].querySelectorAll('button').forEach(one => one.click())")
    page.wait("window.saved.length === 3")
    assert sorted(page.run("window.saved")) == ["Reward.csv", "Reward.png", "Reward.svg"]


def test_a_run_is_watched_while_it_is_trained(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_server, "LOOK_EVERY_S", 0.05)
    run = write_run(tmp_path, "going-on", of=50)
    page.problems.clear()
    with RunFolder(run), served(tmp_path) as address:
        go(page, f"{address}/#/run/going-on", "running")
        before = page.wait("document.querySelector('.chart').querySelectorAll('circle').length")
        writer = threading.Thread(target=lambda: MetricsFile(run / "metrics.jsonl").log(4, metrics_of(4)))
        writer.start()
        page.wait(f"document.querySelector('.chart').querySelectorAll('circle').length > {before}")
        page.wait("document.body.innerText.includes('step 4 / 50')")
        assert "live" in page.text()
        writer.join()
        page.open("about:blank")
    assert page.problems == []


@pytest.mark.deadline("the page must be looked at before the run is over")
def test_a_run_of_corral_train_is_followed_to_its_end(page: Browser, tmp_path: Path, tiny_model: Path) -> None:
    """A real run, in a process of its own, while the page looks at it; all that it shows is what the run wrote."""
    recipe = write_recipe(tmp_path, tiny_model)
    options = ("schedule.steps=40", "logging.trajectories=true", *VALIDATION)
    (tmp_path / "runs").mkdir()
    page.problems.clear()
    with served(tmp_path / "runs") as address:
        training = start_corral(tmp_path, "train", str(recipe), *options)
        run = tmp_path / "runs" / "tiny"
        try:
            training.wait_until(lambda: (run / "metrics.jsonl").exists())
            go(page, f"{address}/#/run/tiny", "running")
            circles = "document.querySelector('.chart').querySelectorAll('circle').length"
            before = page.wait(f"{circles} > 1 && {circles}")
            page.wait(f"{circles} > {before} + 3")
            assert training.is_running()  # the curve grew while it was trained, without a reload
            click(page, "a[href='#/run/tiny/steps']")
            click(page, "a[href='#/run/tiny/step/1']")
            page.wait("document.querySelectorAll('.sample').length === 16")
            click(page, "a[href='#/run/tiny/step/1/3']")
            page.wait("document.querySelectorAll('.token').length > 8")
            go(page, f"{address}/#/run/tiny/workers", "no workers on a cluster")
            page.run("[...document.querySelectorAll('button')].find(one => one.innerText.includes('Stacks')).click()")
            page.wait("document.querySelector('details summary')?.innerText.includes('controller of run tiny')")
            go(page, f"{address}/#/run/tiny", "running")
            finished = training.wait()
            assert finished.code == 0, finished.stderr
            page.wait("document.body.innerText.includes('finished')")
            page.wait("document.body.innerText.includes('step 40 / 40')")
        finally:
            training.process.kill()
        go(page, f"{address}/#/run/tiny/steps", "step 40")
        cells = "[...document.querySelectorAll('tbody tr')].map(row => [0, 2].map(at => row.children[at].innerText))"
        shown = dict(page.wait(f"{cells}.length > 40 && {cells}"))
        rewards = {row["step"]: row["reward/mean"] for row in lines_of(run / "metrics.jsonl") if "reward/mean" in row}
        assert sorted(rewards) == list(range(1, 41))
        assert {step: float(shown[f"step {step}"]) for step in rewards} == pytest.approx(rewards, rel=1e-3)
        page.open("about:blank")
    assert page.problems == []


def test_an_empty_folder_and_a_token(page: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as address:
        go(page, f"{address}/#/", "There is no run here yet.")
    write_run(tmp_path, "one")
    with served(tmp_path, token="a-long-enough-token") as address:
        go(page, f"{address}/#/", "This server needs its token.")
        page.run("document.querySelector('input[type=password]').value = 'a-long-enough-token'")
        page.run("document.querySelector('form button').click()")
        page.wait("document.body.innerText.includes('75 %')")
        page.run("sessionStorage.clear()")
        page.open("about:blank")
        go(page, f"{address}/#token=a-long-enough-token", "75 %")
        assert "token" not in page.run("location.href")


def test_exported_files_are_the_same_pages(page: Browser, tmp_path: Path) -> None:
    from fastapi import FastAPI
    from fastapi.staticfiles import StaticFiles

    write_run(tmp_path / "runs", "done")
    export([tmp_path / "runs"], tmp_path / "out", report=lambda text: None)
    app = FastAPI()
    app.mount("/below", StaticFiles(directory=tmp_path / "out", html=True))
    page.problems.clear()
    with running(app) as address:
        for where, wanted in {
            "": "75 %",
            "run/done": "Entropy",
            "run/done/step/2/5": "turn 1",
            "run/done/ledger/2": "trained at",
        }.items():
            go(page, f"{address}/below/#/{where}", wanted)
    assert page.problems == []
