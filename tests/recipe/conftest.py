from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError
from corral.recipe.load import load_recipe
from corral.recipe.schema import Recipe

Load = Callable[..., Recipe]
Problems = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load("a.b=c", ..., text=...) reads `recipe.yaml`, a minimal recipe unless `text` is given, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load(*overrides: str, text: str = MINIMAL) -> Recipe:
        Path("recipe.yaml").write_text(text)
        return load_recipe("recipe.yaml", overrides)

    return load


@pytest.fixture
def problems(load: Load) -> Problems:
    """As `load`, for a recipe that must not load: its problems."""

    def problems(*overrides: str, text: str = MINIMAL) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load(*overrides, text=text)
        assert str(caught.value) == "\n".join(caught.value.problems)
        return list(caught.value.problems)

    return problems
