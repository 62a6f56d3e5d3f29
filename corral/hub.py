"""Where files of models and data come from: Hugging Face's hub (`owner/name`) or ModelScope (`ms:owner/name`), their
caches on this machine, and what to do where one cannot be reached; and what models of other forms were converted to.

Transformers downloads from Hugging Face's hub by itself, so that a name stays a name. ModelScope's client downloads all
of a model or data set, and everything after it sees a folder.
"""

import logging
import re
import ssl
import threading
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Literal
from zlib import crc32

from corral.recipe.errors import UserError, first_line, one_line, pip_install

logger = logging.getLogger(__name__)

SMOLLM2, BLANK, BLANK_VISION = BUILTIN_MODELS = ("smollm2-135m-instruct", "blank-1m", "blank-vision-1m")
"""Names of models that need no hub (`model/builtin_models.py`)."""
MODELSCOPE = "ms:"
REACHED_WITHIN_S = 5.0
"""A hub that has not answered anything by then is unreachable. Its own client would try for half a minute a file, and
longer where packets are dropped."""
OTHER_FORMATS = ["*.gguf", "*.onnx", "*.pth", "*.msgpack", "*.h5", "*.ot", "original/*", "onnx/*"]
"""Files of a model that transformers does not read."""
INSTEAD = (
    "name a folder that has it, set HF_ENDPOINT to a mirror that can be reached, or take it from ModelScope "
    "(`ms:owner/name`); with HF_HUB_OFFLINE=1 no hub is asked, and what is in the cache is used"
)
Kind = Literal["model", "dataset"]


def is_only_path(name: str) -> bool:
    """Whether a model's name can only be a folder's or a file's: names on a hub have an owner, but for GPT-2's."""
    is_known = name.lower() in BUILTIN_MODELS or name.startswith((MODELSCOPE, "gpt2", "distilgpt2"))
    return name.startswith((".", "/", "~")) or is_gguf(name) or (name.count("/") != 1 and not is_known)


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def cached_folder(name: str) -> Path:
    """Where Corral keeps a model that it has made or converted."""
    return Path.home() / ".cache" / "corral" / "models" / name


def gguf_folder(name: str) -> Path:
    """What a GGUF file is converted to, when it is loaded for the first time: another folder once the file changes."""
    file = Path(name).expanduser().resolve()
    status = file.stat()
    return cached_folder(f"{file.stem}-{crc32(f'{file} {status.st_size} {status.st_mtime_ns}'.encode()):08x}")


def cached_model(name: str) -> Path | None:
    """The folder of a model in its hub's cache on this machine, with its config.json at least, or what a GGUF file was
    converted to. Asks no server."""
    if is_gguf(name):
        folder = gguf_folder(name) if Path(name).expanduser().is_file() else None
        return folder if folder is not None and (folder / "config.json").is_file() else None
    if name.startswith(MODELSCOPE):
        folder = _modelscope_cache(name, "model")
        return folder if folder is not None and (folder / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that a hub could have
        return None
    return Path(file).parent if isinstance(file, str) else None


def model_files(name: str, key: str) -> str:
    """What transformers loads a model from: a folder as it is, its name on a hub, or the folder that it was downloaded
    to; where the hub cannot be reached, that in the cache. `key`: of the recipe, for errors."""
    if is_only_path(name) or Path(name).exists():
        return name
    if name.startswith(MODELSCOPE):
        return str(modelscope_folder(name, "model", key))
    if (problem := hugging_face_problem()) is None:
        return name
    if (folder := cached_model(name)) is None:
        raise UserError(f"{key}: {name} is neither a folder nor in the cache here, and {problem}; {INSTEAD}")
    logger.info("%s: %s is taken from %s, because %s", key, name, folder, problem)
    return str(folder)


def require_data_set(name: str, cache: Path) -> None:
    """Raises where neither Hugging Face's hub nor its cache of data sets has a chance to have it."""
    problem = hugging_face_problem()
    if problem is not None and not (cache / name.replace("/", "___")).exists():
        raise UserError(f"hf:{name} could not be loaded: {problem}; there is no such file here, either; {INSTEAD}")


def hugging_face_problem() -> str | None:
    """Why Hugging Face's hub cannot be asked for anything; None if it can."""
    from huggingface_hub import constants, is_offline_mode

    return "HF_HUB_OFFLINE is set" if is_offline_mode() else unreachable(constants.ENDPOINT)


def unreachable(endpoint: str) -> str | None:
    """Why a hub does not answer, asked once for each that does."""
    try:
        _reach(endpoint)
    except OSError as error:
        return str(error)
    return None


@cache
def _reach(endpoint: str) -> None:
    """Raises an OSError if nothing there answers, whatever the answer. In a thread, as a name may have many addresses,
    and the time for a connection is that of each."""
    if "all" in urllib.request.getproxies():  # a SOCKS proxy, which the hubs' clients know and this does not
        return
    problems: list[OSError] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=REACHED_WITHIN_S).close()
        except (urllib.error.HTTPError, HTTPException):  # an answer
            pass
        except ValueError as error:  # no address
            problems.append(OSError(str(error)))
        except OSError as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):  # the hub's client may have certificates of its own
                problems.append(reason if isinstance(reason, OSError) else error)

    asking = threading.Thread(target=ask, name="reach-hub", daemon=True)
    asking.start()
    asking.join(REACHED_WITHIN_S)
    if asking.is_alive():
        raise OSError(f"{endpoint} does not answer within {REACHED_WITHIN_S:g} s")
    if problems:
        raise OSError(f"{endpoint} cannot be reached ({first_line(problems[0])})")


@cache
def modelscope_folder(name: str, kind: Kind, key: str) -> Path:
    """Where all files of a model or data set on ModelScope are, downloaded if they were not. The cache's, where it
    cannot be reached."""
    owned = modelscope_name(name, key)
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found]
        from modelscope_hub.config import HubConfig  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(f"{key}: {name} needs ModelScope's package: {pip_install('modelscope')}") from error
    if (problem := unreachable(HubConfig().endpoint)) is not None:
        if (folder := _modelscope_cache(name, kind)) is None:
            instead = "name a folder that has it, or set MODELSCOPE_ENDPOINT to a server that can be reached"
            raise UserError(f"{key}: {name} is not in the cache here, and {problem}; {instead}")
        return folder
    ignored = OTHER_FORMATS if kind == "model" else None
    with one_line(f"{key}: {name} could not be downloaded"):
        return Path(snapshot_download(owned, repo_type=kind, ignore_patterns=ignored))


def modelscope_name(name: str, key: str) -> str:
    owned = name.removeprefix(MODELSCOPE)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", owned) is None:
        raise UserError(f"{key}: {name} is no name on ModelScope, which are `ms:owner/name`")
    return owned


def _modelscope_cache(name: str, kind: Kind) -> Path | None:
    try:
        from modelscope import snapshot_download

        return Path(snapshot_download(name.removeprefix(MODELSCOPE), repo_type=kind, local_files_only=True))
    except Exception:  # without the package nothing was downloaded with it; its error for what is not there is new
        return None


def config_text(name: str, key: str) -> str:
    """The `config.json` of a model on a hub, and of its files that one alone. Hugging Face's hub is asked once: its
    client would try for half a minute where there is no network."""
    if name.startswith(MODELSCOPE):
        from modelscope import model_file_download

        return Path(model_file_download(modelscope_name(name, key), "config.json")).read_text()
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    answer = get_session().get(
        hf_hub_url(name, "config.json"), headers=build_hf_headers(), timeout=2 * REACHED_WITHIN_S
    )
    answer.raise_for_status()
    return str(answer.text)
