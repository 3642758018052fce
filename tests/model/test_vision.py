"""Images are decoded within limits, once, and become the rows that mlx-lm makes of them."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.processors import load_processor
from PIL import ExifTags, ImageOps
from PIL import Image as Pillow

from mlxcache.errors import BadRequest
from mlxcache.model import vision as module
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.vision import MlxLmImages, Vision, decode, load_vision
from mlxcache.types import Image
from tests.muse.toy import image, picture


@pytest.fixture(scope="module")
def loaded(toy_muse: Path) -> Loaded:
    return load(ModelSpec(str(toy_muse), trust_remote_code=True))


@pytest.fixture
def vision(loaded: Loaded) -> Vision:
    found = load_vision(loaded.model, loaded.tokenizer, loaded.config, label="toy")
    assert found is not None
    return found


def encoded(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Pillow.new(mode, size, 1).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_what_both_apis_document_is_decoded(kind: str) -> None:
    assert decode(encoded(kind)).shape == (30, 40, 3)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16"])
def test_any_colours_become_rgb(mode: str) -> None:
    pixels = decode(encoded("PNG", mode))
    assert pixels.shape == (30, 40, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_an_image_is_turned_by_its_exif_orientation(kind: str, orientation: int) -> None:
    """As Pillow turns it. Cameras store the sensor's rows, and how they were held."""
    corners = np.full((48, 32, 3), 255, np.uint8)
    corners[:16, :16], corners[:16, 16:], corners[32:, :16] = (255, 0, 0), (0, 255, 0), 0
    picture = Pillow.fromarray(corners)
    exif = picture.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    picture.save(file, kind, exif=exif, quality=95)
    expected = np.asarray(ImageOps.exif_transpose(Pillow.open(file)).convert("RGB"))
    found = decode(file.getvalue())
    assert found.shape == ((32, 48, 3) if orientation in (5, 6, 7, 8) else (48, 32, 3))
    assert found.flags["C_CONTIGUOUS"]
    assert np.array_equal(found, expected)


def test_a_damaged_exif_is_ignored() -> None:
    file = io.BytesIO()
    Pillow.new("RGB", (40, 30)).save(file, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(file.getvalue()).shape == (30, 40, 3)


def frames(kind: str, count: int) -> bytes:
    file = io.BytesIO()
    first, *more = [Pillow.new("RGB", (40, 30), (i * 60,) * 3) for i in range(count)]
    first.save(file, kind, save_all=True, append_images=more)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    assert decode(frames(kind, 1)).shape == (30, 40, 3)
    with pytest.raises(BadRequest, match="animated image is not accepted: send a single frame"):
        decode(frames(kind, 3))


def test_a_photo_with_a_second_picture_is_no_animation() -> None:
    """Phones write JPEG files with the depth or a brighter version behind the photo."""
    assert getattr(Pillow.open(io.BytesIO(frames("MPO", 2))), "n_frames", 1) == 2
    assert decode(frames("MPO", 2)).max() == 0


def test_what_is_transparent_is_white() -> None:
    """And not the colour that nobody sees, which is mostly black."""
    picture = Pillow.new("RGBA", (3, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (200, 100, 0, 255))
    picture.putpixel((2, 0), (0, 0, 0, 51))
    for kind in ("PNG", "WEBP"):
        file = io.BytesIO()
        picture.save(file, kind, lossless=True)
        assert decode(file.getvalue()).tolist() == [[[255] * 3, [200, 100, 0], [204] * 3]]


def test_sixteen_bits_become_eight() -> None:
    """Pillow would make white of all but the darkest."""
    file = io.BytesIO()
    Pillow.fromarray(np.array([[0, 0x1234, 0x8000, 0xFFFF]], np.uint16)).save(file, "PNG")
    assert decode(file.getvalue())[0].tolist() == [[i] * 3 for i in (0, 0x12, 0x80, 0xFF)]


def bomb(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG file of a few bytes that says it is as large as that. `pixels`: its compressed data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read"),
        (b"hello", "cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
        (encoded("BMP"), "cannot be read"),
        (encoded("PNG")[:60], "cannot be read"),
        (bomb(10_000, 10_000), "too large"),
        (bomb(1, 32_769), "32,768 a side"),
        (bomb(32_769, 1), "32,768 a side"),
        (bomb(60_000, 60_000), "cannot be read"),
        (bomb(2**31 - 1, 1), "cannot be read|too large"),
        (bomb(0, 5), "cannot be read"),
        (bomb(6_000, 6_000), "cannot be read"),
        (bomb(9, 9, zlib.compress(bytes(100))[:5] + b"\xff" * 100), "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "cannot be read"),
    ],
)
def test_what_cannot_be_an_image_is_a_bad_request(data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        decode(data)


def test_an_image_is_turned_though_another_tag_is_odd() -> None:
    file = io.BytesIO()
    shown = Pillow.new("RGB", (40, 30))
    exif = shown.getexif()
    exif.update({ExifTags.Base.Orientation: 6, ExifTags.Base.ImageDescription: "a"})
    shown.save(file, "JPEG", exif=exif)
    odd = file.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x1a\x00\x02")
    assert Pillow.open(io.BytesIO(odd)).getexif()[ExifTags.Base.XResolution] == "a"
    assert decode(odd).shape == (40, 30, 3)


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage that it goes on after
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "EXIF"])
def test_any_damage_is_a_bad_request_or_an_image(kind: str) -> None:
    file = io.BytesIO()
    shown = Pillow.open(io.BytesIO(picture(1)))
    exif = shown.getexif()
    exif.update({ExifTags.Base.Orientation: 6, 0x010E: "a description", 0x8825: {1: "N"}})
    shown.save(file, "JPEG" if kind == "EXIF" else kind, exif=exif)
    whole = file.getvalue()
    most = 160 if kind == "EXIF" else len(whole)
    noise = np.random.default_rng(3)
    for _ in range(200):
        data = bytearray(whole)
        for at in noise.integers(0, most, 3):
            data[at] ^= int(noise.integers(1, 256))
        try:
            assert decode(bytes(data)).ndim == 3
        except BadRequest:
            continue


def test_text_has_a_token_for_each_row(vision: Vision) -> None:
    for width, height, count in ((28, 28, 1), (140, 112, 20), (300, 50, 22), (1, 900, 33)):
        shown = image(1, width, height)
        text = vision.text(shown)
        assert text == "<|image_start|>" + "<|patch|>" * count + "<|image_end|>"
        assert vision.rows(shown)["input_embeddings"].shape == (count, 64)
        assert vision.grid(shown) is None


def test_rows_are_those_that_mlx_lm_makes(vision: Vision, loaded: Loaded) -> None:
    processor = load_processor(loaded.model, loaded.config)
    shown = [image(1), image(2, 280, 84)]
    text, pixels = processor("a<|patch|>b<|patch|>", images=[decode(i.data) for i in shown])
    ids = mx.array(loaded.tokenizer.encode(text, add_special_tokens=False))
    rows = loaded.model.embed_inputs(ids, pixel_values=pixels)
    expected = rows[mx.array(np.flatnonzero(np.array(ids) == vision.token_id))]
    assert text == f"a{vision.text(shown[0])}b{vision.text(shown[1])}"
    got = mx.concatenate([vision.rows(i)["input_embeddings"] for i in shown])
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_an_image_is_decoded_once_for_its_text_and_its_rows(
    vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def counted(data: bytes) -> Any:
        decoded.append(data)
        return decode(data)

    monkeypatch.setattr(module, "decode", counted)
    shown = image(1)
    vision.text(shown)
    vision.rows(shown)
    vision.text(Image(shown.data, shown.digest))
    assert len(decoded) == 1
    vision.rows(shown)
    assert len(decoded) == 2


def test_little_is_remembered(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_IMAGES", 5)
    monkeypatch.setattr(module, "KEPT_BYTES", 3 * 20 * 28 * 28 * 3 * 4)
    for seed in range(12):
        vision.text(image(seed))
    assert len(vision._shown) == 5
    assert len(vision._pixels) == 3
    assert vision.rows(image(0))["input_embeddings"].shape == (20, 64)


def test_an_image_that_the_processor_refuses_is_a_bad_request(loaded: Loaded) -> None:
    class Refusing:
        image_token = "<|patch|>"

        def __call__(self, text: str, images: Any) -> Any:
            raise ValueError("no grid")

    vision = Vision(MlxLmImages(loaded.model, Refusing(), 1))
    data = picture(77)
    with pytest.raises(BadRequest, match="does not accept this image: no grid"):
        vision.text(Image(data, hashlib.sha256(data).digest()))


def test_a_text_model_has_no_vision(toy_llama: Path) -> None:
    assert load(ModelSpec(str(toy_llama))).vision is None


def test_without_pillow_text_is_served_and_the_log_says_what_to_install(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert load_vision(loaded.model, loaded.tokenizer, loaded.config, label="toy") is None
    assert "mlxcache[vision]" in caplog.text


def test_a_model_that_cannot_be_fed_rows_is_a_text_model(
    loaded: Loaded, toy_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama = load(ModelSpec(str(toy_llama)))
    config = {**llama.config, "vision_config": {"patch_size": 14}, "processor_type": "muse_spark"}
    assert load_vision(llama.model, loaded.tokenizer, config, label="toy") is None
    assert "images disabled" in caplog.text
    caplog.clear()
    assert load_vision(loaded.model, llama.tokenizer, loaded.config, label="toy") is None
    assert "no token <|patch|>" in caplog.text
