"""Decoding of images: the pixels are those that a viewer shows, compared with pillow and with a formula in float64."""

import io

import numpy as np
import pytest
from support.deep_png import deep_png
from support.running import call

import unskew
from unskew.data.readers import images
from unskew.data.readers.images import decode_column
from unskew.errors import DataError

pa = pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")

HEIGHT, WIDTH = 11, 16
FORMS = {
    "PNG": {},
    "JPEG": {"quality": 95},
    "WEBP": {"lossless": True},
    "TIFF": {},
    "TIFF compressed": {"compression": "tiff_lzw"},
}
MODES = ["L", "RGB", "CMYK", "LA", "RGBA", "P"]


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(images, "optional_simplejpeg", lambda: None)
    elif images.optional_simplejpeg() is None:
        pytest.skip("simplejpeg is not installed")


def picture(mode, seed=0):
    """A smooth picture that differs from all its rotations and reflections; transparency grows to the right."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    colors = np.stack([13 * x + 5 * y, 17 * y + seed, 7 * x + 40, 16 * x], -1).clip(0, 255).astype(np.uint8)
    return (
        Image.fromarray(colors).convert(mode)
        if mode in ("RGBA", "LA")
        else Image.fromarray(colors[..., :3]).convert(mode)
    )


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form.split()[0], **FORMS.get(form, {}), **options)
    return out.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def read(*blobs, **options):
    x = decode_column(pa.chunked_array([pa.array(list(blobs))]), "x", **options)
    return x.permute(0, 2, 3, 1).numpy()


def shown(data):
    """What a viewer with a white background shows, by pillow and a formula in float64."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    gray = image.mode in ("1", "L", "LA")
    if not image.has_transparency_data:
        return np.asarray(image.convert("L" if gray else "RGB"), float).reshape(image.height, image.width, -1)
    colors = np.asarray(image.convert("RGBA"), float)
    opacity = colors[..., 3:] / 255
    return (colors[..., :3] * opacity + 255 * (1 - opacity))[..., : 1 if gray else 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_images_are_read_as_a_viewer_shows_them(decoder, form, mode):
    for orientation in range(1, 9):
        try:
            data = encoded(picture(mode), form, exif=exif(orientation))
        except (OSError, ValueError):
            pytest.skip(f"pillow does not write {mode} as {form}")
        (pixels,) = read(data)
        expected = shown(data)
        assert pixels.shape[:2] == ((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT))
        assert np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize("orientation", [0, 9, "six"])
def test_orientations_that_do_not_exist_are_ignored(decoder, orientation):
    if orientation == "six":
        data = encoded(picture("RGB"), "JPEG", exif=exif(6)).replace(b"Exif\0\0MM\0*", b"Exif\0\0XX\0*")
    else:
        data = encoded(picture("RGB"), "JPEG", exif=exif(orientation))
    assert read(data).shape == (1, HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {"transparency": 3}),
        ("GIF", {"transparency": 3}),
        ("PNG", {"transparency": bytes(range(0, 256, 16))}),
    ],
)
def test_transparent_colors_of_a_palette_are_white(form, options):
    data = encoded(picture("RGB").quantize(16), form, **options)
    pixels = read(data)[0]
    assert np.abs(pixels - shown(data)).max() <= 1
    assert (pixels == 255).all(-1).any()


def test_a_transparent_gray_level_is_white_and_stays_gray():
    gray = picture("L")
    level = gray.getpixel((3, 3))
    pixels = read(encoded(gray, "PNG", transparency=level))[0]
    values = np.asarray(gray)
    assert np.array_equal(pixels[..., 0], np.where(values == level, 255, values))
    assert read(encoded(gray, "PNG", transparency=level), encoded(picture("RGB"), "PNG")).shape[-1] == 3


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_of_several_frames_is_read_and_reported_once(form, capsys):
    frames = [picture("RGB", seed) for seed in (0, 60, 120)]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    first, second = read(data, data)
    assert np.abs(first - shown(data)).max() <= 1
    assert np.array_equal(first, second)
    assert (
        capsys.readouterr().err.count("2 of 2 images have several frames; the first one is read, such as image 0 of x")
        == 1
    )


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_eight_bits_are_an_error(mode):
    data = encoded(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).convert(mode), "TIFF")
    with pytest.raises(DataError, match=r"Image 0 of x cannot be decoded \(it has more than 8 bits per channel"):
        read(data)


@pytest.mark.parametrize("alpha", [False, True])
def test_gray_png_files_of_sixteen_bits_are_an_error(alpha):
    gray = np.arange(64).reshape(8, 8, 1) * 60
    pixels = np.concatenate([gray, np.full_like(gray, 65535)], -1) if alpha else gray
    with pytest.raises(DataError, match=r"more than 8 bits per channel, pillow mode .*: convert it to 8 bits"):
        read(deep_png(pixels))


def test_colors_of_sixteen_bits_are_reduced_to_the_upper_eight():
    colors = np.random.default_rng(0).integers(0, 65536, (8, 8, 3))
    opaque = np.concatenate([colors, np.full((8, 8, 1), 65535)], -1)
    assert np.array_equal(read(deep_png(colors), deep_png(opaque)), np.stack([colors // 256] * 2))


def test_images_of_one_color_are_counted_and_the_first_is_named(capsys):
    blank = Image.new("RGB", (WIDTH, HEIGHT), (200, 30, 30))
    struct = [
        {"bytes": encoded(image, "PNG"), "path": f"{k}.png"} for k, image in enumerate([picture("RGB"), blank, blank])
    ]
    decode_column(pa.chunked_array([pa.array(struct)]), "x")
    assert "2 of 3 images have only one color, such as image 1 of x (1.png)" in capsys.readouterr().err
    read(encoded(picture("L"), "PNG"))
    assert not capsys.readouterr().err


def test_data_of_one_color_can_be_trained_on():
    x = np.full((20, 8, 8, 3), 7, np.uint8)
    fed = unskew.Federation.from_arrays([(x, np.arange(20) % 2)], test=(x, np.arange(20) % 2))
    assert fed.normalization.std == (1.0, 1.0, 1.0)


def test_images_in_a_table_are_turned_and_errors_name_their_path(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    data = encoded(picture("RGB"), "JPEG", exif=exif(6))
    rows = [{"bytes": data, "path": f"scan-{k}.jpg"} for k in range(8)]
    parquet.write_table(pa.table({"image": rows, "y": [0, 1] * 4}), tmp_path / "t.parquet")
    options = {"label": "y", "image": "image", "partition": "iid", "clients": 2}
    assert unskew.load_federation(f"table:{tmp_path / 't.parquet'}", **options).shape == (3, WIDTH, HEIGHT)
    rows[5]["bytes"] = data[:200]
    parquet.write_table(pa.table({"image": rows, "y": [0, 1] * 4}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"Image 5 of t, the training rows \(scan-5\.jpg\) cannot be decoded"):
        unskew.load_federation(f"table:{tmp_path / 't.parquet'}", **options)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_init_sees_the_size_of_turned_images(tmp_path, capsys, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 9, 3), dtype=np.uint8))
    for name in "ab":
        (tmp_path / "set" / name).mkdir(parents=True)
        for k in range(20):
            turned, orientation = (upright.rotate(90, expand=True), 6) if k % 2 else (upright, 1)
            (tmp_path / "set" / name / f"{k}.img.{form.lower()}").write_bytes(
                encoded(turned, form, exif=exif(orientation))
            )
    outcome = call(capsys, "init", "set")
    assert outcome.code == 0, outcome.err
    assert "all images have 9 x 12 pixels" in (tmp_path / "experiment.yaml").read_text()
