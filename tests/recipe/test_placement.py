import time
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import (
    format_devices,
    parse_devices,
    parse_placement,
    resolve_meshes,
    resolve_placement,
    runs_on_ray,
    transfer_kind,
)
from corral.recipe.plan import make_plan
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Recipe

sets = st.sets(st.integers(0, 63), min_size=1)


# --- device sets


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0-3", (0, 1, 2, 3)),
        ("5", (5,)),
        (5, (5,)),
        ("0,2,5", (0, 2, 5)),
        ("5, 2 ,0", (0, 2, 5)),
        ("0-1,6", (0, 1, 6)),
        ("0-1, 4-5,7", (0, 1, 4, 5, 7)),
        ("0 - 2", (0, 1, 2)),
        ([0, 1], (0, 1)),
        ("[0, 1]", (0, 1)),
        ("[0-2, 4]", (0, 1, 2, 4)),
        ("list(range(0, 4))", (0, 1, 2, 3)),
        ("list(range(4))", (0, 1, 2, 3)),
        ("range(0, 4)", (0, 1, 2, 3)),
        ("list(range(0,8,2))", (0, 2, 4, 6)),
        ("list(range(3, -1, -1))", (0, 1, 2, 3)),
        (" list( range( 1 , 3 ) ) ", (1, 2)),
    ],
)
def test_devices_can_be_written_in_many_ways(written, devices):
    assert parse_devices(written, 8) == devices


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("8", "device 8 does not exist; `cluster.nodes` x `cluster.devices_per_node` gives devices 0-7"),
        (8, "device 8 does not exist"),
        (-1, "device -1 does not exist"),
        ("6-9", "device 8 does not exist"),
        ("0-999999999", "device 8 does not exist"),
        ("list(range(0, 999999999))", "device 8 does not exist"),
        ("list(range(5, 20, 4))", "device 9 does not exist"),
        ("list(range(-2, 2))", "device -2 does not exist"),
        ("3-1", "`3-1` runs backwards; write `1-3`"),
        ("0,0", "device 0 is listed twice"),
        ("0-3,2", "device 2 is listed twice"),
        ([1, 1], "device 1 is listed twice"),
        ("", "`` is not a device or a span of devices; write `all`"),
        ("[]", "`` is not a device or a span of devices"),
        ([], "there is no device in it"),
        ("list(range(4, 4))", "there is no device in it"),
        ("0,,1", "`` is not a device"),
        ("-1", "`-1` is not a device"),
        ("0-", "`0-` is not a device"),
        ("gpu0", "`gpu0` is not a device"),
        ("1.5", "`1.5` is not a device"),
        ("٣", "`٣` is not a device"),
        ("9" * 5000, "is not a device"),
        ("list(range(0, 4, 0))", "`list(range(0, 4, 0))` has a step of 0"),
        ("list(range())", "is not a range"),
        ("list(range(0, 1, 2, 3))", "is not a range"),
        ("list(range(0, n))", "is not a range"),
        ("list(range(0, 4)", "has unbalanced parentheses"),
        ("range(0, 4))", "has unbalanced parentheses"),
    ],
)
def test_what_is_no_set_of_devices_is_told_why(written, message):
    with pytest.raises(RecipeError) as caught:
        parse_devices(written, 8)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "list(map(int, '01'))",
        "list(range(len('ab')))",
        "(0)",
        "exit()",
        "[x for x in y]",
        "list(range(0, 4)) + [5]",
        "list(range(0, int('4')))",
        "{0}",
        "lambda: 0",
        "0 if 1 else 2",
        "0 or 1",
    ],
)
def test_code_is_refused_and_never_evaluated(text):
    with pytest.raises(RecipeError):
        parse_devices(text, 8)


@given(sets)
def test_every_set_of_devices_can_be_written_and_read_back(devices):
    assert parse_devices(format_devices(devices), 64) == tuple(sorted(devices))


@given(sets, st.randoms(use_true_random=False))
def test_the_order_of_writing_does_not_matter(devices, random):
    shuffled = random.sample(sorted(devices), len(devices))
    written = ",".join(map(str, shuffled))
    assert parse_devices(written, 64) == parse_devices(f"[{written}]", 64) == parse_devices(shuffled, 64)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5))
def test_a_range_means_what_it_means_in_python(start, stop, step):
    expected = tuple(range(start, stop, step))
    try:
        assert parse_devices(f"list(range({start}, {stop}, {step}))", 20) == expected
    except RecipeError:
        assert not expected or max(expected) >= 20


fragments = st.sampled_from(
    ["list(", "range(", ")", "[", "]", ",", "-", "0", "1", "7", "12", " ", "all", "(", "a", ".", "\n", "²"]
)


@given(st.text() | st.lists(fragments).map("".join), st.integers(1, 16))
@pytest.mark.slow
def test_any_text_is_a_set_of_devices_or_a_recipe_error(text, num_devices):
    with suppress(RecipeError):
        devices = parse_devices(text, num_devices)
        assert devices == tuple(sorted(set(devices)))
        assert set(devices) <= set(range(num_devices))


@given(st.dictionaries(st.text() | st.sampled_from(["actor", "rollout", "actor,critic"]), st.text() | st.integers()))
def test_any_mapping_is_a_placement_or_a_recipe_error(written):
    with suppress(RecipeError):
        parse_placement(written, 4)


def test_sets_of_devices_are_written_in_the_shortest_way():
    assert format_devices([8, 0, 1, 2, 3]) == "0-3,8"


# --- roles


def test_several_roles_can_share_a_line():
    placement = parse_placement({"actor, rollout": "0-1", "reference": "2"}, 4)
    assert placement.roles == {"actor": (0, 1), "rollout": (0, 1), "reference": (2,)}


def test_devices_that_nobody_uses_are_known():
    assert parse_placement({"actor": "0", "rollout": "2-3"}, 6).idle == (1, 4, 5)


def test_devices_are_grouped_by_who_uses_them():
    groups = parse_placement({"rollout": "2-3", "actor,critic": "0,1"}, 5).groups()
    assert groups == {("actor", "critic"): (0, 1), ("rollout",): (2, 3)}


def placement_problems(written, num_devices=4):
    with pytest.raises(RecipeError) as caught:
        parse_placement(written, num_devices)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (
            {"actor": "0-2", "rollout": "2-3"},
            ": actor (0-2) and rollout (2-3) share device 2 but not all; two roles share all of their devices or none",
        ),
        ({"actor,rollout": "0", "actor": "1"}, ", `actor`: actor has been placed before"),
        ({"actr": "0"}, ", `actr`: `actr` is not a role; did you mean `actor`?"),
        (
            {"judge": "0"},
            ", `judge`: `judge` is not a role; the roles are actor, rollout, reference, critic, reward_model",
        ),
        (
            {"actor,rollout": "0-4"},
            ", `actor,rollout: 0-4`: device 4 does not exist; "
            "`cluster.nodes` x `cluster.devices_per_node` gives devices 0-3",
        ),
    ],
    ids=["a partial overlap", "a role placed twice", "an unknown role", "one like no other", "a device out of range"],
)
def test_a_wrong_placement_is_an_error_that_names_roles_and_devices(written, problem):
    assert placement_problems(written) == [f"`cluster.placement`{problem}"]


@pytest.mark.parametrize("rollout", ["0-1", "2-3", "[1, 0]"])
def test_a_total_overlap_or_none_is_fine(rollout):
    assert parse_placement({"actor": "0,1", "rollout": rollout}, 4)


def test_a_role_within_another_is_a_partial_overlap():
    assert len(placement_problems({"actor": "0-3", "rollout": "1"})) == 1


def test_all_problems_of_a_placement_are_reported():
    assert len(placement_problems({"actr": "9", "actor": "0-1", "rollout": "1-2"})) == 3


# --- the picture


def test_the_picture_has_a_row_for_each_node_and_a_cell_for_each_device():
    placement = parse_placement({"actor": "0-1", "rollout": "2"}, 4)
    assert placement.picture(2, 2).splitlines() == [
        "node 0 | 0 actor   | 1 actor   |",
        "node 1 | 2 rollout | 3 idle    |",
    ]


def test_roles_that_share_a_device_share_its_cell():
    assert parse_placement({"actor,rollout": "all"}, 1).picture(1, 1) == "node 0 | 0 actor+rollout |"


def test_a_wide_picture_uses_initials_and_explains_them():
    placement = parse_placement({"actor,rollout,reference": "0-7", "critic": "8-14"}, 16)
    assert placement.picture(2, 8).splitlines() == [
        "node 0 |  0 A+R+F |  1 A+R+F |  2 A+R+F |  3 A+R+F |  4 A+R+F |  5 A+R+F |  6 A+R+F |  7 A+R+F |",
        "node 1 |  8 C     |  9 C     | 10 C     | 11 C     | 12 C     | 13 C     | 14 C     | 15 .     |",
        "A actor, R rollout, F reference, C critic, . idle",
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_device_is_in_the_picture_once(nodes, devices_per_node, data):
    devices = data.draw(st.sets(st.integers(0, nodes * devices_per_node - 1), min_size=1))
    picture = parse_placement({"actor": format_devices(devices)}, nodes * devices_per_node).picture(
        nodes, devices_per_node
    )
    cells = [cell.split() for row in picture.splitlines() for cell in row.split("|")[1:-1]]
    assert cells == [[str(i), "actor" if i in devices else "idle"] for i in range(nodes * devices_per_node)]


# --- what follows from a placement


@pytest.mark.parametrize(
    ("section", "on_ray"),
    [
        ("", False),
        ("cluster: {}\n", True),
        ("cluster: {nodes: 2}\n", True),
        ("cluster: {runtime: ray}\n", True),
        ("cluster: {runtime: local}\n", False),
    ],
)
def test_a_recipe_with_a_cluster_runs_on_ray(load, section, on_ray):
    assert runs_on_ray(load(text=MINIMAL + section)) is on_ray


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([], "shared"),
        (["cluster.nodes=2", "cluster.devices_per_node=2"], "shared"),
        (["cluster.devices_per_node=2", "cluster.placement={actor: 0, rollout: 1}"], "collective"),
        (["cluster.nodes=2", "cluster.placement={actor: 0, rollout: 1}"], "collective"),
        (["cluster.nodes=2", "cluster.placement={actor: 0, rollout: 1}", "cluster.transfer=object"], "object"),
    ],
)
def test_weights_travel_in_the_least_costly_way_unless_another_is_written(load, overrides, kind):
    recipe = load(*overrides)
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    assert transfer_kind(recipe, placement) == kind


def test_each_role_with_a_mesh_has_one_of_its_own_devices(load):
    recipe = load(
        "algorithm.name=ppo",
        "cluster.devices_per_node=8",
        "train.parallel.tensor=2",
        "cluster.placement={actor: 0-3, critic: 4-5, reference: 6-7, rollout: 0-3}",
    )
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    pair = MeshShape(tensor=2)
    assert resolve_meshes(recipe, placement) == {
        "actor": MeshShape(shard=2, tensor=2),
        "reference": pair,
        "critic": pair,
    }


# --- devices of services


def with_services(placement: dict[str, str], services: dict[str, int], **cluster: int | str) -> Recipe:
    """`services`: how many devices each claims."""
    claims = {
        name: {"command": ["serve"], "port": 8000 + place, "devices": devices}
        for place, (name, devices) in enumerate(services.items())
    }
    return Recipe.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "data": {"train": {"path": "d.jsonl"}},
            "schedule": {"steps": 1},
            "cluster": {**cluster, "placement": placement, "services": claims},
        }
    )


TWO_NODES = {"nodes": 2, "devices_per_node": 4}


def test_services_have_the_last_devices_of_every_node_and_no_role_is_on_them():
    plan = make_plan(with_services({"actor,rollout": "all"}, {"judge": 1, "search": 1, "plain": 0}, **TWO_NODES))
    assert plan.placement.roles["actor"] == (0, 1, 4, 5)
    assert plan.as_dict()["cluster"]["devices_of_services"] == {"judge": [2, 6], "search": [3, 7]}
    assert plan.placement.idle == ()
    assert "node 1 | 4 actor+rollout | 5 actor+rollout | 6 judge         | 7 search        |" in plan.text()


def test_a_wide_picture_has_one_letter_for_all_services():
    recipe = with_services({"actor,rollout": "all"}, {"judge": 1, "search": 2}, nodes=1, devices_per_node=16)
    *rows, legend = make_plan(recipe).placement.picture(1, 16).splitlines()
    assert rows[0].endswith("| 12 A+R | 13 s   | 14 s   | 15 s   |")
    assert legend == "A actor, R rollout, s judge and search"


def test_a_role_on_a_device_that_a_service_claims_is_an_error():
    with pytest.raises(RecipeError) as error:
        make_plan(with_services({"actor": "0-3", "rollout": "4-6"}, {"judge": 1}, **TWO_NODES))
    (problem,) = error.value.problems
    assert problem == "`cluster.placement`, `actor: 0-3`: `cluster.services.judge.devices` claims device 3"


def test_services_that_leave_no_device_are_an_error():
    with pytest.raises(RecipeError, match=r"\(judge, search\) claim 4 devices of every node, and .* leaves none"):
        make_plan(with_services({"actor,rollout": "all"}, {"judge": 1, "search": 3}, **TWO_NODES))


def test_one_process_has_no_devices_for_services():
    with pytest.raises(RecipeError, match=r"`cluster.services.judge.devices: 1` cannot be had: with `cluster.runtime"):
        make_plan(with_services({"actor,rollout": "all"}, {"judge": 1}, runtime="local", devices_per_node=2))


@pytest.mark.parametrize("service", ["{}", "{search: {command: [a], port: 8000, devices: 1}}"])
def test_a_cluster_of_too_many_devices_is_refused_before_they_are_listed(load, service):
    recipe = load("cluster.nodes=1e30", "cluster.devices_per_node=4", f"cluster.services={service}")
    with pytest.raises(RecipeError, match="more devices than Corral counts"):
        make_plan(recipe)


def test_a_placement_of_many_devices_is_grouped_at_once():
    placement = parse_placement({"actor": "0-49999", "rollout": "50000-99999"}, 100_000)
    began = time.process_time()
    assert [len(devices) for devices in placement.groups().values()] == [50_000, 50_000]
    assert placement.picture(1000, 100).startswith("node   0 | ")
    assert time.process_time() - began < 5
