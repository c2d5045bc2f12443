"""Prints what torchvision's ImageFolder lists for the files of FolderScanTest.OrdersAsTorchvisionsImageFolder.

    python tests/golden/data_image_folder.py     # torchvision 0.28.0
"""
import importlib.util
import os
import pathlib
import sys
import tempfile
import types

# Only the module that lists files: the package itself loads compiled operators, which some installations lack.
root = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
for name, path in [("torchvision", root), ("torchvision.datasets", root / "datasets")]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(path)]
sys.modules["torchvision"]._utils = types.SimpleNamespace()
from torchvision.datasets.folder import ImageFolder  # noqa: E402

NAMES = ["b/x.png", "b/10.jpg", "b/9.JPG", "a/sub/1.jpeg", "a/sub-2/0.jpg", "a/z.jpg", "a/sub/deep/q.jpg", "B/y.jpg",
         "b/notes.txt", "loose.jpg", "\u00e4/u.jpg"]

with tempfile.TemporaryDirectory() as root:
    for name in NAMES:
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path, label in ImageFolder(root).samples:
        print(os.path.relpath(path, root), label)
