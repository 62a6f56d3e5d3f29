"""Images in conversations.

A message has its images as `images`, and its text says with `<image>` where each of them is. Among tokens, an image is
a run of one negative number, its id, which is a hash of its bytes. So sequences with different images differ, for
everything that compares them or shares their prefixes, and nothing of that has to know about images. The model's own
image token and the pixels take the place of the ids in the forward pass (`corral.model.vision`).
"""

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.data.batch import IntArray
    from corral.data.rows import Message

MARK = "<image>"
FORMS = "a path, bytes, {'bytes': ...}, {'path': ...}, a data: URL or a PIL image"


def image_id(data: bytes) -> int:
    """The number below zero that stands for an image among tokens."""
    return -1 - (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1)


def load_images(messages: Iterable["Message"]) -> list[bytes]:
    """The images of a conversation, in their order. Reads those that are given by their path."""
    return [
        Path(image).read_bytes() if isinstance(image, str) else image
        for message in messages
        for image in message.get("images", ())
    ]


def images_by_id(messages: Iterable["Message"]) -> dict[int, bytes]:
    return {image_id(data): data for data in load_images(messages)}


def for_template(messages: Sequence["Message"]) -> list[Any]:
    """The messages as chat templates of models that read images want them: those with images as a list of parts."""
    return [message if not message.get("images") else _in_parts(message) for message in messages]


def for_api(messages: Sequence["Message"]) -> list[Any]:
    """The messages as the OpenAI API has them: images are parts with a `data:` URL."""
    sent = []
    for message, parts in zip(messages, for_template(messages), strict=True):
        if message.get("images"):
            images = iter(load_images([message]))
            content = [part if part["type"] == "text" else _as_url(next(images)) for part in parts["content"]]
            sent.append({"role": message["role"], "content": content})
        else:
            sent.append(parts)
    return sent


def _as_url(data: bytes) -> dict[str, Any]:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _in_parts(message: "Message") -> dict[str, Any]:
    texts = message["content"].split(MARK)
    if len(texts) - 1 != len(message["images"]):
        raise ValueError(f"a message has {len(message['images'])} images and {len(texts) - 1} times `{MARK}`")
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def decode_tokens(tokenizer: Any, tokens: "Sequence[int] | IntArray", **options: Any) -> str:
    """`tokenizer.decode` of tokens that may have images among them, each of which becomes the model's image token."""
    import numpy as np  # here: processes of reward functions import this file, and not numpy

    ids = np.asarray(tokens, np.int64)  # of a list, transformers looks at the type of each number
    is_image = ids < 0
    if is_image.any():
        continues = is_image & (ids == np.roll(ids, 1)) & (np.arange(len(ids)) > 0)
        ids = np.where(is_image, tokenizer.vision.image_token, ids)[~continues]
    decoded: str = tokenizer.decode(ids, **options)
    return decoded


# --- reading what users write


def read_parts(content: Sequence[Any], folder: Path = Path()) -> tuple[str, list[str | bytes]]:
    """The text of a message that was given as a list of parts, and its images. Raises ValueError."""
    texts: list[str] = []
    images: list[str | bytes] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            given = next((part[key] for key in ("image_url", "image", "path", "bytes", "url") if part.get(key)), None)
            images.append(read_image(given, folder))
            texts.append(MARK)
        else:
            raise ValueError(f"a part of its content must be text or an image; it is {kind or type(part).__name__}")
    # Parts that are text alone are paragraphs; around an image there is no line break, as in chat templates.
    return ("" if images else "\n").join(texts), images


def read_image(value: Any, folder: Path = Path()) -> str | bytes:
    """An image as its bytes, or as a path that exists; relative ones are looked for in `folder` first."""
    if isinstance(value, bytes | bytearray) and value:
        return bytes(value)
    if isinstance(value, Mapping):
        if value.get("bytes"):
            return bytes(value["bytes"])
        return read_image(value.get("path") or value.get("url"), folder)
    if isinstance(value, str):
        if value.startswith("data:"):
            head, _, data = value.partition(",")
            if not head.endswith(";base64"):
                raise ValueError("an image in a data: URL must be in base64")
            return base64.b64decode(data, validate=True)
        if value.startswith(("http:", "https:")):
            raise ValueError(f"images are not downloaded; store {value:.80} in a file and give its path")
        with suppress(RuntimeError):  # the home of a user who does not exist
            value = str(Path(value).expanduser())
        for path in (folder / value, Path(value)):
            if path.is_file():
                return str(path.resolve())
        raise ValueError(f"no image {value:.200}")
    if hasattr(value, "save") and hasattr(value, "convert"):
        with io.BytesIO() as file:
            value.save(file, format="PNG")
            return file.getvalue()
    raise ValueError(f"an image must be {FORMS}, not {type(value).__name__}")


def place_images(messages: list["Message"], images: Sequence[str | bytes]) -> list["Message"]:
    """Gives a column of images to the `<image>` in the messages, in their order; where there is none, they go before
    the text of the first message of the user."""
    counts = [message["content"].count(MARK) for message in messages]
    if not any(counts):
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        counts[first] = len(images)
        changed = {**messages[first], "content": MARK * len(images) + messages[first]["content"]}
        messages = [*messages[:first], changed, *messages[first + 1 :]]  # type: ignore[list-item]
    if sum(counts) != len(images):
        raise ValueError(f"the prompt has {sum(counts)} times `{MARK}`, and the row {len(images)} images")
    left = list(images)
    placed: list[Any] = []
    for message, count in zip(messages, counts, strict=True):
        placed.append({**message, "images": left[:count]} if count else message)
        del left[:count]
    return placed
