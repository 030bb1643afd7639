# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0
"""Writes small.safetensors with the official Python package, or checks a file of the same content.

    pip install "safetensors>=0.8" numpy
    python make_small.py                # writes small.safetensors beside this script
    python make_small.py --check FILE   # reads FILE with the official package and compares

The tensors go in as raw bytes, because numpy has no bfloat16. There is one metadata key: the
official writer takes several in the order of a hash table, which differs from run to run.
"""

import argparse
import ctypes
import pathlib
import struct
import sys

import safetensors

METADATA = {"made_by": 'holdfast "tests/data", \u00fc\t1'}

# name: (dtype as the writer takes it, as the reader gives it, shape, little-endian bytes)
TENSORS = {
    "layer.weight": (
        "float32", "F32", [2, 3],
        struct.pack("<6I", 0x3F800000, 0xC0200000, 0x00000000, 0x80000000, 0x7F7FFFFF, 0x00800000),
    ),
    "layer.bias": ("bfloat16", "BF16", [3], struct.pack("<3H", 0x3F80, 0xC020, 0x7F7F)),
    "layer.scale": ("float32", "F32", [], struct.pack("<I", 0x3E800000)),
    "layer.half_scale": ("bfloat16", "BF16", [], struct.pack("<H", 0x4049)),
    "layer.empty": ("float32", "F32", [0, 3], b""),
    "ids": ("int64", "I64", [2], struct.pack("<2q", -1, 2**40)),
    "mask": ("bool", "BOOL", [5], bytes([1, 0, 0, 1, 1])),
}


def write(path):
    # The specs hold addresses only: `buffers` keeps the bytes alive while the package reads them.
    buffers = {
        name: ctypes.create_string_buffer(data, len(data) + 1)
        for name, (_, _, _, data) in TENSORS.items()
    }
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype,
            shape=shape,
            data_ptr=ctypes.addressof(buffers[name]),
            data_len=len(data),
        )
        for name, (dtype, _, shape, data) in TENSORS.items()
    }
    safetensors.serialize_file(specs, str(path), METADATA)


def check(path):
    found = {
        name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }
    expected = {
        name: (dtype, shape, data) for name, (_, dtype, shape, data) in TENSORS.items()
    }
    if found != expected:
        sys.exit(f"{path}: expected {expected}, found {found}")
    with safetensors.safe_open(str(path), framework="np") as opened:
        if opened.metadata() != METADATA:
            sys.exit(f"{path}: expected metadata {METADATA}, found {opened.metadata()}")
    print(f"{path}: the official package reads the expected {len(found)} tensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", metavar="FILE", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.check is not None:
        check(arguments.check)
    else:
        write(pathlib.Path(__file__).with_name("small.safetensors"))


if __name__ == "__main__":
    main()
