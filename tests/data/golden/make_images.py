"""Makes images.bin: small pictures of every kind, and the pixels that Pillow reads and resizes them to.

Run by hand with Pillow 13, torchvision 0.28 and numpy (`python tests/data/golden/make_images.py`); the output is committed.
Format: records of `name length` lines followed by that many bytes; see tests/data/codecs/golden.h.
A case NAME has NAME.file and, as raw [height, width, channels] bytes, NAME.rgb and NAME.grey; a resize case has
NAME.HxW.rgb, a random transform's its parameters. Where Pillow rejects a file there is only NAME.file.
"""
import io
import os
import struct
import warnings
import zlib

import numpy as np
import torchvision.transforms as T
import torchvision.transforms.functional as F
from PIL import Image, ImageFile

ImageFile.MAXBLOCK = 1 << 22
warnings.simplefilter("ignore")
RNG = np.random.RandomState(7)
RECORDS = []


def picture(height, width, channels):
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 110 * np.sin(x / 5 + k) * np.cos(y / (4 + k)) for k in range(channels)]
    noisy = np.stack(planes, -1) + RNG.randn(height, width, channels) * 12
    array = np.clip(noisy, 0, 255).astype(np.uint8)
    return array if channels > 1 else array[..., 0]


def add(name, data):
    RECORDS.append((name, bytes(data)))


def add_case(name, data):
    add(name + ".file", data)
    for mode, suffix in (("RGB", "rgb"), ("L", "grey")):
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
        add(f"{name}.{suffix}", pixels.tobytes())


def jpeg(image, **options):
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def png(image, **options):
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(height, width, depth, kind, rows, extra=b"", interlace=0):
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlace)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def adam7(pixels):
    """The rows of an interlaced 8-bit picture, pass by pass."""
    rows = []
    for y0, x0, dy, dx in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)):
        part = pixels[y0::dy, x0::dx]
        if part.shape[1]:
            rows += [row.tobytes() for row in part]
    return rows


def jpeg_cases():
    colour = Image.fromarray(picture(19, 27, 3))
    for subsampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1"):
        key = subsampling.replace(":", "")
        add_case(f"jpeg_{key}", jpeg(colour, quality=90, subsampling=subsampling))
        add_case(f"jpeg_{key}_progressive", jpeg(colour, quality=75, subsampling=subsampling, progressive=True))
    add_case("jpeg_restart", jpeg(colour, quality=60, restart_marker_blocks=1))
    add_case("jpeg_rgb", jpeg(colour, quality=95, keep_rgb=True))
    add_case("jpeg_grey", jpeg(Image.fromarray(picture(28, 28, 1)), quality=95))
    add_case("jpeg_grey_progressive", jpeg(Image.fromarray(picture(28, 28, 1)), quality=80, progressive=True))
    cmyk = Image.frombytes("CMYK", (27, 19), picture(19, 27, 4).tobytes())
    inverted = jpeg(cmyk, quality=90)
    add_case("jpeg_cmyk", inverted)
    # Adobe's transform 2: the same components as YCCK.
    at = inverted.index(b"Adobe")
    add_case("jpeg_ycck", inverted[: at + 11] + b"\x02" + inverted[at + 12 :])
    exif = Image.Exif()
    exif[0x0112] = 6
    add_case("jpeg_exif_rotated", jpeg(colour, quality=85, exif=exif))
    add_case("jpeg_trailing_bytes", jpeg(colour, quality=85) + b"trailing bytes")
    add_case("jpeg_1x1", jpeg(Image.fromarray(picture(1, 1, 3)), quality=85))


def png_cases():
    colour, grey = picture(11, 13, 3), picture(11, 13, 1)
    alpha = picture(11, 13, 4)
    add_case("png_rgb", png(Image.fromarray(colour)))
    add_case("png_grey", png(Image.fromarray(grey)))
    add_case("png_rgba", png(Image.fromarray(alpha, "RGBA")))
    add_case("png_grey_alpha", png(Image.fromarray(alpha[..., :2].copy(), "LA")))
    add_case("png_1bit", png(Image.fromarray(grey).convert("1")))
    palette = Image.fromarray(colour).quantize(37)
    add_case("png_palette", png(palette))
    add_case("png_palette_transparent", png(palette, transparency=bytes(range(37))))
    add_case("png_palette_4bit", png(Image.fromarray(colour).quantize(13), bits=4))
    for depth in (2, 4):
        rows = [RNG.bytes((13 * depth + 7) // 8) for _ in range(11)]
        add_case(f"png_grey_{depth}bit", raw_png(11, 13, depth, 0, rows))
    values = np.array([0, 1, 127, 128, 255, 256, 257, 511, 512, 32768, 65279, 65280, 65535], ">u2")
    add_case("png_grey16", raw_png(1, 13, 16, 0, [values.tobytes()]))
    add_case("png_grey16_alpha", raw_png(1, 13, 16, 4, [np.stack([values, values[::-1]], -1).tobytes()]))
    wide = RNG.randint(0, 65536, (11, 13, 4)).astype(">u2")
    add_case("png_rgb16", raw_png(11, 13, 16, 2, [row.tobytes() for row in wide[..., :3]]))
    add_case("png_rgba16", raw_png(11, 13, 16, 6, [row.tobytes() for row in wide]))
    add_case("png_rgb_key", raw_png(11, 13, 8, 2, [r.tobytes() for r in colour], chunk(b"tRNS", b"\0\1\0\2\0\3")))
    add_case("png_gamma_ignored", raw_png(11, 13, 8, 2, [r.tobytes() for r in colour], chunk(b"gAMA", struct.pack(">I", 100000))))
    add_case("png_interlaced", raw_png(11, 13, 8, 2, adam7(colour), interlace=1))
    add_case("png_interlaced_grey", raw_png(11, 13, 8, 0, adam7(grey), interlace=1))
    indices = np.arange(13, dtype=np.uint8) % 5
    add_case("png_palette_out_of_range", raw_png(1, 13, 8, 3, [indices.tobytes()], chunk(b"PLTE", bytes(range(10, 19)))))


def resize_cases():
    for index, (height, width, targets) in enumerate((
        (47, 61, ((24, 24), (61, 47), (20, 61), (47, 30), (5, 90))),
        (64, 37, ((24, 24), (32, 36), (7, 40), (70, 50))),
        (9, 12, ((24, 24), (1, 1), (9, 11))),
    )):
        for suffix, channels in (("rgb", 3), ("grey", 1)):
            image = Image.fromarray(picture(height, width, channels))
            name = f"resize_{index}_{height}x{width}"
            add(f"{name}.{suffix}", image.tobytes())
            for target in targets:
                resized = image.resize(target[::-1], Image.BILINEAR)
                add(f"{name}.to_{target[0]}x{target[1]}.{suffix}", resized.tobytes())


def pipeline_cases():
    """What torchvision's evaluation transforms make of jpeg_420: float32 [3, H, W]."""
    data = dict(RECORDS)["jpeg_420.file"]
    image = Image.open(io.BytesIO(data)).convert("RGB")
    normalize = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    for name, steps in (
        ("resize_crop", [T.Resize(15), T.CenterCrop(14)]),
        ("crop_pads", [T.CenterCrop(24)]),
        ("grey_of_three", [T.Resize((12, 30)), T.Grayscale(3)]),
    ):
        add(f"pipeline_{name}.float", T.Compose([*steps, T.ToTensor(), normalize])(image).numpy().tobytes())
    sizes = [(h, w, s) for h in (1, 28, 97, 256, 375) for w in (1, 28, 131, 256, 500) for s in (1, 28, 73, 256)]
    lines = []
    for height, width, size in sizes:
        resized = T.functional._compute_resized_output_size((height, width), [size])
        lines.append(f"{height} {width} {size} {resized[0]} {resized[1]}")
    add("resize_sizes.text", "\n".join(lines).encode())


def random_cases():
    """What the functions behind torchvision's random transforms make of jpeg_420, which is 19x27, at given parameters."""
    image = Image.open(io.BytesIO(dict(RECORDS)["jpeg_420.file"])).convert("RGB")
    for top, left, height, width, size in (
        (3, 5, 12, 14, (24, 24)),
        (6, 11, 13, 10, (5, 8)),
        (0, 2, 19, 25, (10, 31)),
        (7, 0, 12, 16, (12, 16)),
    ):
        pixels = F.resized_crop(image, top, left, height, width, list(size), T.InterpolationMode.BILINEAR)
        add(f"resized_crop_{top}_{left}_{height}x{width}.to_{size[0]}x{size[1]}", pixels.tobytes())
    add("hflip", F.hflip(image).tobytes())
    # The place is that in the padded picture.
    for padding, top, left, size in ((4, 0, 0, 20), (4, 8, 15, 19), (7, 3, 11, 30), (2, 5, 4, 12)):
        pixels = F.crop(F.pad(image, padding), top, left, size, size)
        add(f"pad_crop_{padding}_{top}_{left}.to_{size}", pixels.tobytes())


jpeg_cases()
png_cases()
resize_cases()
pipeline_cases()
random_cases()
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "images.bin"), "wb") as stream:
    for record_name, content in RECORDS:
        stream.write(f"{record_name} {len(content)}\n".encode() + content)
