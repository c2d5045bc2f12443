"""Writes all_dtypes.safetensors beside this file with Python's safetensors.

Run: python tests/checkpoint/golden/make_golden.py   (made with safetensors 0.8.0, torch 2.13.0)
Each tensor `name` of 2 x 8 bytes holds the bytes 0, 1, 2, ... 15 (bool: 0 and 1 in turn).
"""
import pathlib

import torch
from safetensors.torch import save_file

NAMES = ("uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
         "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2").split()

raw = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
tensors = {name: raw.clone().view(getattr(torch, name)) for name in NAMES}
tensors["bool"] = raw % 2 == 1
tensors["empty"] = torch.zeros(3, 0, 2)
tensors["scalar"] = torch.tensor(2.5, dtype=torch.float64)
tensors["a name.with \"quotes\" \\ and \u00e9\n"] = torch.tensor([1, 2, 3])
save_file(tensors, pathlib.Path(__file__).with_name("all_dtypes.safetensors"),
          metadata={"a": "\u00e9 \"x\" / \\"})  # one key: Python writes several in random order
