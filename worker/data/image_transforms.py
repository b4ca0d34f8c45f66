"""The random changes of single images that `training.augmentation` describes, by kornia's operations.

Each image is changed alone, by draws from its own seed. Needs the extra `augmentation`.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
from kornia import enhance
from kornia.color import rgb_to_grayscale
from kornia.geometry import transform as geometry
from torch import Tensor
from torch.nn.functional import interpolate, pad

from tessera.shared.run_settings import MAX_MAGNITUDE, Augmentation

TRIES = 10
"""Number of crops to draw before one is taken from the middle, because those drawn did not fit into the image."""


def transform(images: Tensor, settings: Augmentation, seeds: Sequence[int]) -> Tensor:
    """Return the images, float32 [images, channels, height, width], each changed by draws from its seed.

    Changes of colours need values from 0 (black) to 1.
    """
    return torch.cat([_changed(image[None], settings, seed) for image, seed in zip(images, seeds, strict=True)])


def _changed(image: Tensor, settings: Augmentation, seed: int) -> Tensor:
    """Return an image, [1, channels, height, width], after all changes in their order."""
    dice = Random(seed)  # noqa: S311  (reproducible; under privacy, the seed is secret)
    if settings.crop:
        image = _cropped(image, settings.crop, settings.crop_aspect, dice)
    if settings.crop_padding:
        image = _moved(image, settings.crop_padding, dice)
    if dice.random() < settings.horizontal_flip:
        image = image.flip(-1)
    if dice.random() < settings.vertical_flip:
        image = image.flip(-2)
    for _ in range(settings.rand_augment):
        image = dice.choice(OPERATIONS)(image, settings.rand_augment_magnitude / MAX_MAGNITUDE, dice)
    return _jittered(image, settings, dice)


def _cropped(image: Tensor, shares: tuple[float, float], aspects: tuple[float, float], dice: Random) -> Tensor:
    """Return a part of the image, resized to all of its size, as torchvision's RandomResizedCrop chooses it."""
    height, width = image.shape[-2:]
    for _ in range(TRIES):
        area = dice.uniform(*shares) * height * width
        aspect = math.exp(dice.uniform(*map(math.log, aspects)))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            break
    else:
        down, across = (max(1, round(side * math.sqrt(shares[1]))) for side in (height, width))
    top, left = dice.randint(0, height - down), dice.randint(0, width - across)
    part = image[..., top : top + down, left : left + across]
    return interpolate(part, (height, width), mode="bilinear", antialias=True)


def _moved(image: Tensor, padding: int, dice: Random) -> Tensor:
    """Return a part of the image's own size of the image with black around it."""
    height, width = image.shape[-2:]
    top, left = dice.randint(0, 2 * padding), dice.randint(0, 2 * padding)
    return pad(image, [padding] * 4)[..., top : top + height, left : left + width]


def _jittered(image: Tensor, settings: Augmentation, dice: Random) -> Tensor:
    """Return the image with its colours changed, in an order of its own."""
    changes: list[tuple[float, Callable[[Tensor, float], Tensor]]] = [
        (settings.brightness, _brighter),
        (settings.contrast, _contrasted),
        (settings.saturation, _saturated),
        (settings.hue, _turned),
    ]
    dice.shuffle(changes)
    for most, change in changes:
        if most:
            image = change(image, dice.uniform(-most, most))
    return image


def _brighter(image: Tensor, by: float) -> Tensor:
    return enhance.adjust_brightness_accumulative(image, 1 + by)


def _contrasted(image: Tensor, by: float) -> Tensor:
    grey = image if image.shape[1] == 1 else rgb_to_grayscale(image)
    # The mean of all pixels at once would depend on the number of threads.
    mean = grey.mean(dim=-1, keepdim=True).mean(dim=-2, keepdim=True)
    return (mean + (image - mean) * (1 + by)).clamp(0, 1)


def _saturated(image: Tensor, by: float) -> Tensor:
    return image if image.shape[1] == 1 else enhance.adjust_saturation_with_gray_subtraction(image, 1 + by)


def _turned(image: Tensor, by: float) -> Tensor:
    return image if image.shape[1] == 1 else enhance.adjust_hue(image, 2 * math.pi * by)


# ---------------------------------------------------------------- RandAugment

Operation = Callable[[Tensor, float, Random], Tensor]
"""A function from an image, a strength from 0 to 1 and a random generator to the changed image."""


def _either(change: Callable[[Tensor, float], Tensor], most: float) -> Operation:
    """Return the operation that changes an image by up to `most`, in one direction or the other."""
    return lambda image, strength, dice: change(image, dice.choice((-1, 1)) * most * strength)


def _warped(image: Tensor, of: Callable[..., Tensor], *values: float) -> Tensor:
    return of(image, torch.tensor([values]), mode="bilinear", padding_mode="zeros")


OPERATIONS: tuple[Operation, ...] = (
    lambda image, *_: image,
    _either(lambda image, by: _warped(image, geometry.shear, by, 0.0), 0.3),
    _either(lambda image, by: _warped(image, geometry.shear, 0.0, by), 0.3),
    _either(lambda image, by: _warped(image, geometry.translate, by * image.shape[-1], 0.0), 150 / 331),
    _either(lambda image, by: _warped(image, geometry.translate, 0.0, by * image.shape[-2]), 150 / 331),
    _either(lambda image, by: geometry.rotate(image, torch.tensor([by])), 30.0),
    _either(_brighter, 0.9),
    _either(_contrasted, 0.9),
    _either(_saturated, 0.9),
    _either(lambda image, by: enhance.sharpness(image, 1 + by), 0.9),
    lambda image, strength, _: enhance.posterize(image, 8 - round(4 * strength)),
    lambda image, strength, _: enhance.solarize(image, 1 - strength),
    lambda image, *_: enhance.normalize_min_max(image),
    lambda image, *_: enhance.equalize(image),
)
"""The operations of RandAugment and their largest strengths, as in torchvision (Cubuk et al. 2020, arXiv 1909.13719,
section 3)."""
