"""The image pipeline of one thread: Cohort beside Pillow by hand, on the same images, round by round.

    python benchmarks/data/image_pipeline.py build/benchmarks/data/image_pipeline_benchmark [rounds]

Cases: gray28 is a 28 x 28 gray JPEG of quality 95, decoded, flipped, normalised; colour256 is a 256 x 256 JPEG of
quality 75, RandomResizedCrop(64), flipped, normalised; decode256 is its decoding alone. Files are in memory.
Times are the processor's, so that a busy machine disturbs them little; nothing here waits.
"""
import io
import math
import os
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image, ImageFilter

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def write_images(folder, count, size, gray, quality):
    rng = np.random.RandomState(0)
    for index in range(count):
        shape = (size, size) if gray else (size, size, 3)
        noise = Image.fromarray(rng.randint(0, 256, shape).astype(np.uint8)).filter(ImageFilter.GaussianBlur(size / 40))
        values = np.asarray(noise, np.float32)
        values = (values - values.mean()) / values.std() * 60 + 127 + rng.randn(*shape) * 2  # detail of a photograph
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(f"{folder}/{index:05}.jpg", quality=quality)


def crop_box(width, height):
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = random.randint(0, height - h), random.randint(0, width - w)
            return left, top, left + w, top + h
    return 0, 0, width, height


def gray28(data):
    image = Image.open(io.BytesIO(data)).convert("L")
    if random.random() < 0.5:
        image = image.transpose(Image.FLIP_LEFT_RIGHT)
    return (np.asarray(image, np.float32) / 255 - 0.286) / 0.353


def colour256(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop(crop_box(*image.size)).resize((64, 64), Image.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.FLIP_LEFT_RIGHT)
    return (np.asarray(image, np.float32) / 255 - MEAN) / STD


def decode256(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def python_pass(files, work):
    start = time.process_time()
    for data in files:
        work(data)
    return (time.process_time() - start) / len(files)


def summary(seconds):
    micro = sorted(1e6 * s for s in seconds)
    return micro[0], micro[len(micro) // 2], micro[min(len(micro) - 1, int(len(micro) * 0.99))]


def main():
    binary, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"image_pipeline: 1 thread, {rounds} rounds, commit {commit}, {' '.join(sys.argv)}")
    heads = "".join(f"{side + ' min':>12}{'median':>9}{'p99':>9}" for side in ("Cohort", "Pillow"))
    print(f"{'microseconds an image':24}{heads}{'ratio':>8}{'Cohort/s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("small", "large"):
            os.mkdir(f"{folder}/{name}")
        write_images(f"{folder}/small", 2000, 28, True, 95)
        write_images(f"{folder}/large", 200, 256, False, 75)
        for work in (gray28, colour256, decode256):
            images = f"{folder}/{'small' if work is gray28 else 'large'}"
            files = [open(f"{images}/{name}", "rb").read() for name in sorted(os.listdir(images))]
            python_pass(files[:50], work)
            size = sum(map(len, files)) // len(files)
            ours, theirs = [], []
            for _ in range(rounds):
                result = subprocess.run([binary, images, work.__name__], capture_output=True, text=True, check=True)
                ours.append(float(result.stdout))
                theirs.append(python_pass(files, work))
            a, b = summary(ours), summary(theirs)
            label = f"{work.__name__} ({size} bytes)"
            ours_text = f"{a[0]:12.1f}{a[1]:9.1f}{a[2]:9.1f}"
            theirs_text = f"{b[0]:12.1f}{b[1]:9.1f}{b[2]:9.1f}"
            print(f"{label:24}{ours_text}{theirs_text}{b[0] / a[0]:7.2f}x{1e6 / a[0]:10,.0f}")


if __name__ == "__main__":
    main()
