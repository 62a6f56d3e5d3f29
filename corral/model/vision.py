"""Images for models that read them: how many tokens an image is, and what the model's forward pass gets in their place.

Tokens have an image's id at each of its positions (`corral.data.images`). The forward pass gets the model's own image
token there, the pixels as the model's image processor makes them, and which tokens are an image's, from which the model
computes positions of two dimensions. Everything else is the model's own code.
"""

import io
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corral.data.images import image_id
from corral.model.families import VISION_TYPES
from corral.recipe.errors import UserError, pip_install
from corral.recipe.shape import model_folder

OF_VIDEOS = "video_preprocessor_config.json"
"""transformers' and vLLM's processor of the model needs it as well, for images, too."""
NUM_KEPT = 64
"""Images whose pixels are kept: the samples of a prompt come one after the other."""


class VisionInputs:
    def __init__(self, config: Any, processor: Any, source: str) -> None:
        """`source`: the folder or hub name that the processor is from."""
        self.processor, self.source = processor, source
        self.image_token = int(config.image_token_id)
        self.placeholders = [self.image_token, int(config.video_token_id)]
        self.pixels = lru_cache(NUM_KEPT)(self._pixels)

    def save(self, folder: Path) -> None:
        """Writes what others need to read images as this model does, and what its source says of videos."""
        self.processor.save_pretrained(folder)
        own = model_folder(self.source)
        if own is not None and (own / OF_VIDEOS).is_file():
            shutil.copyfile(own / OF_VIDEOS, folder / OF_VIDEOS)

    def num_tokens(self, data: bytes) -> int:
        image = open_image(data)
        patches = self.processor.get_number_of_image_patches(image.height, image.width, {})
        return int(patches) // int(self.processor.merge_size) ** 2

    def _pixels(self, data: bytes) -> tuple[Tensor, Tensor]:
        """(patches [patches, values], their grid [1, 3])"""
        made = self.processor(images=[open_image(data)], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def expand(self, tokens: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """The tokens with each image token replaced by the image's id, as often as the image has tokens."""
        if sum(token == self.image_token for token in tokens) != len(images):
            raise ValueError(f"the chat template made {tokens.count(self.image_token)} images of {len(images)}")
        left = iter(images)
        expanded: list[int] = []
        for token in tokens:
            if token == self.image_token:
                image = next(left)
                expanded += [image_id(image)] * self.num_tokens(image)
            else:
                expanded.append(int(token))
        return expanded

    def model_inputs(self, tokens: Tensor, images: Mapping[int, bytes]) -> dict[str, Tensor]:
        """What the model's forward pass gets for tokens [rows, tokens] with ids of images among them."""
        is_image = tokens < 0
        # An image token that the model generated has no image, and its embedding would be replaced by one.
        text = tokens.masked_fill(torch.isin(tokens, tokens.new_tensor(self.placeholders)), 0)
        inputs = {"input_ids": text.masked_fill(is_image, self.image_token)}
        if not bool(is_image.any()):
            return inputs
        made = [self.pixels(images[id]) for row in tokens.tolist() for id in runs_of_ids(row)]
        pixels, grids = (torch.cat(part).to(tokens.device) for part in zip(*made, strict=True))
        return inputs | {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image.int()}


def runs_of_ids(tokens: Sequence[int]) -> list[int]:
    """Ids of the images in a sequence, in their order. Two images are never neighbors: each has a token for its start
    and one for its end."""
    return [token for i, token in enumerate(tokens) if token < 0 and (i == 0 or tokens[i - 1] != token)]


def open_image(data: bytes) -> Any:
    """The decoded image in RGB, upright as its EXIF data says, on white where it is transparent: as vLLM and Qwen's own
    utilities read it. Raises ValueError if it cannot be read."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UserError(f"images need Pillow: {pip_install('pillow')}") from error
    try:
        # Now, and not in the forward pass, where a file that is cut off would fail others with it.
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # of many kinds, by format
        raise ValueError(f"an image of {len(data)} bytes cannot be read: {error}") from error


def load_vision(config: Any, source: str) -> VisionInputs | None:
    """For a model that reads images: how it does. `source`: a folder or a hub name."""
    if getattr(config, "model_type", None) not in VISION_TYPES:
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model.path: no image processor could be loaded from {source}: {error}") from error
    return VisionInputs(config, processor, source)
