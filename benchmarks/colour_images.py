"""Made-up colour images of 32 x 32 pixels with classes, for choosing settings: not CIFAR-10.

Three sets, of photographs, of the glyphs of a colour font, and of Fashion-MNIST:

* "objects": the glyph of one of ten kinds of things, turned, mirrored, scaled, moved, faint or
  not, with hue, saturation and brightness changed at random, on a crop of a photograph;
* "textures": crops of ten photographs at random scales, with the same changes of colour; which of
  the ten is to be told. Crops to choose on come from the right-hand fifth of each photograph, which
  none to train on shows;
* "garments": an image of Fashion-MNIST, no two of the same, turned, mirrored, scaled, moved and
  coloured at random, faint or not, on a crop of a photograph.

Each is a function of a folder of pictures, what lies on them, and a seed.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Bytes = NDArray[np.uint8]
SIZE = 32
CHUNK = 1_000  # images at a time, whose colours are numbers of eight bytes
GLYPH = 109  # pixels: the one size that Noto Color Emoji has
KINDS = {
    "airplane": "✈🛩🛫🛬🚁🚀",
    "car": "🚗🚕🚙🏎🚓🚘",
    "bird": "🐦🦆🦅🦉🦜🐓🕊🦚🦩🐧🦢",
    "cat": "🐱🐈😺😸🐅🐆🦁🐯",
    "deer": "🦌🐂🐃🐄🐪🐫🦒🐘",
    "dog": "🐶🐕🐩🐺🦊🦮🦝",
    "frog": "🐸🐊🐢🦎🐍🦖",
    "horse": "🐴🐎🦄🦓🐐🐑🐏",
    "ship": "⛵🚢🛳🚤⛴🛥",
    "truck": "🚚🚛🚒🚑🚐🚌🚜",
}


def photographs(folder: Path) -> list[Image.Image]:
    """The pictures of a folder, in order of their names, at most 1,000 pixels wide."""
    found = []
    for path in sorted(folder.glob("*.jpg")):
        with Image.open(path) as file:
            picture = file.convert("RGB")
            picture.thumbnail((1_000, 1_000))
            found.append(picture)
    if len(found) < 10:
        raise FileNotFoundError(f"{folder} holds {len(found)} pictures (*.jpg); give ten or more.")
    return found


def glyphs(font: Path) -> list[list[Image.Image]]:
    """Pictures of each kind of `KINDS`, with transparent backgrounds."""
    drawn = ImageFont.truetype(str(font), GLYPH)

    def glyph(letter: str) -> Image.Image:
        canvas = Image.new("RGBA", (GLYPH + 40, GLYPH + 40), (0, 0, 0, 0))
        ImageDraw.Draw(canvas).text((0, 0), letter, font=drawn, embedded_color=True)
        return canvas.crop(canvas.getbbox())

    return [[glyph(letter) for letter in letters] for letters in KINDS.values()]


def crop(
    picture: Image.Image, rng: np.random.Generator, columns: tuple[float, float] = (0.0, 1.0)
) -> Image.Image:
    """A square of 60 to 240 pixels from a band of columns, mirrored or not, reduced to `SIZE`."""
    low, high = (share * picture.width for share in columns)
    side = min(60 * 4 ** rng.random(), high - low, picture.height)
    left = low + rng.random() * (high - low - side)
    top = rng.random() * (picture.height - side)
    box = (left, top, left + side, top + side)
    part = picture.resize((SIZE, SIZE), Image.Resampling.BOX, box=box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def recoloured(x: NDArray[Any], rng: np.random.Generator, hue: float) -> Bytes:
    """Colours (n, 3, ...) in [0, 255], turned about grey by up to ``hue`` radians, made duller or
    not, brighter or darker, each image by itself.
    """
    grey = np.full((3, 3), 1 / 3)
    turn = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    angle = rng.uniform(-hue, hue, (len(x), 1, 1))
    rotation = grey + np.cos(angle) * (np.eye(3) - grey) + np.sin(angle) * turn
    saturation = rng.uniform(0.5, 1.2, (len(x), 1, 1))
    mix = (grey + saturation * (rotation - grey)) * rng.uniform(0.6, 1.2, (len(x), 1, 1))
    made = np.empty(x.shape, dtype=np.uint8)
    for part in (slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)):
        made[part] = np.clip(np.einsum("nij,nj...->ni...", mix[part], x[part]), 0, 255)
    return made


def objects(folder: Path, font: Path, count: int, seed: int) -> tuple[Bytes, NDArray[np.int64]]:
    """Glyphs on photographs, bytes (count, 3, 32, 32), and their kinds."""
    rng = np.random.default_rng(seed)
    pictures, kinds = photographs(folder), glyphs(font)
    labels = rng.integers(len(kinds), size=count)
    backgrounds = np.stack(
        [np.asarray(crop(pictures[rng.integers(len(pictures))], rng)) for _ in range(count)]
    )
    things = np.stack([placed(kinds[label], rng) for label in labels])
    alpha = things[..., 3:] / 255 * rng.uniform(0.5, 1.0, (count, 1, 1, 1))
    front = recoloured(np.moveaxis(things[..., :3].astype(float), -1, 1), rng, 0.6)
    mixed = alpha * np.moveaxis(front, 1, -1) + (1 - alpha) * backgrounds
    return recoloured(np.moveaxis(mixed, -1, 1), rng, 0.3), labels


def placed(letters: Sequence[Image.Image], rng: np.random.Generator) -> Bytes:
    """One of these glyphs, turned, scaled and moved, as RGBA of (32, 32, 4)."""
    drawn = letters[rng.integers(len(letters))]
    if rng.random() < 0.5:
        drawn = drawn.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    drawn = drawn.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR, expand=True)
    scale = SIZE * rng.uniform(0.6, 1.1) / max(drawn.size)
    width, height = (max(1, round(scale * side)) for side in drawn.size)
    canvas = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    at = tuple(
        round((SIZE - side) / 2 + rng.uniform(-0.15, 0.15) * SIZE) for side in (width, height)
    )
    canvas.paste(drawn.resize((width, height), Image.Resampling.BOX), at)
    return np.asarray(canvas)


def garments(
    folder: Path, grey: Bytes, seed: int, columns: tuple[float, float] = (0.0, 1.0)
) -> Bytes:
    """Grey images (n, 28, 28), each in two random colours on a crop, bytes (n, 3, 32, 32)."""
    rng = np.random.default_rng(seed)
    pictures = photographs(folder)
    made = np.empty((len(grey), 3, SIZE, SIZE), dtype=np.uint8)
    for i, image in enumerate(grey):
        shade = Image.fromarray(image)
        if rng.random() < 0.5:
            shade = shade.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        cover = shade.point(lambda value: min(255, 4 * value))
        drawn = Image.merge("LA", (shade, cover))
        across, up = rng.uniform(-0.1, 0.1, 2)
        scale, angle = rng.uniform(0.8, 1.2), rng.uniform(-0.25, 0.25)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / scale
        start = 14 - turn @ (np.array([16, 16]) + SIZE * np.array([across, up]))
        map_ = (*turn[0], start[0], *turn[1], start[1])
        placed = drawn.transform(
            (SIZE, SIZE), Image.Transform.AFFINE, map_, Image.Resampling.BILINEAR
        )
        shades, covers = np.moveaxis(np.asarray(placed, dtype=np.float64), -1, 0) / 255
        dark, light = rng.uniform(0, 160, (3, 1, 1)), rng.uniform(95, 255, (3, 1, 1))
        alpha = covers * rng.uniform(0.4, 1.0)
        photograph = crop(pictures[rng.integers(len(pictures))], rng, columns)
        behind = np.moveaxis(np.asarray(photograph, dtype=np.float64), -1, 0)
        made[i] = alpha * (dark + shades * (light - dark)) + (1 - alpha) * behind
    return recoloured(made, rng, 0.3)


def textures(
    folder: Path, count: int, seed: int, *, held_out: bool
) -> tuple[Bytes, NDArray[np.int64]]:
    """Crops of the first ten photographs, bytes (count, 3, 32, 32), and of which they are."""
    rng = np.random.default_rng(seed)
    pictures = photographs(folder)[:10]
    labels = rng.integers(10, size=count)
    columns = (0.8, 1.0) if held_out else (0.0, 0.8)
    x = np.stack([np.asarray(crop(pictures[label], rng, columns)) for label in labels])
    return recoloured(np.moveaxis(x, -1, 1).astype(float), rng, 0.6), labels
