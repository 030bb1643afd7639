# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the golden files with the official Python package, or checks files of the same content.

    pip install "safetensors>=0.8" numpy
    python make_small.py                # writes the golden files beside this script
    python make_small.py --check FILE   # reads FILE with the official package and compares with the
                                        # golden file of that name

The tensors go in as raw bytes, because numpy has no bfloat16. There is one metadata key at most:
the official writer takes several in the order of a hash table, which differs from run to run.
"""

import argparse
import ctypes
import pathlib
import struct
import sys

import safetensors

SMALL_METADATA = {"made_by": 'holdfast "tests/data", \u00fc\t1'}

# name: (dtype as the writer takes it, as the reader gives it, shape, little-endian bytes)
SMALL = {
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

# Every type that the writer has a name for: as it takes it, as the reader gives it, size in bits.
DTYPES = [
    ("bool", "BOOL", 8),
    ("float4_e2m1fn_x2", "F4", 4),
    ("uint8", "U8", 8),
    ("int8", "I8", 8),
    ("float8_e5m2", "F8_E5M2", 8),
    ("float8_e4m3fn", "F8_E4M3", 8),
    ("float8_e8m0fnu", "F8_E8M0", 8),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 8),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", 8),
    ("int16", "I16", 16),
    ("uint16", "U16", 16),
    ("float16", "F16", 16),
    ("bfloat16", "BF16", 16),
    ("int32", "I32", 32),
    ("uint32", "U32", 32),
    ("float32", "F32", 32),
    ("complex64", "C64", 64),
    ("float64", "F64", 64),
    ("int64", "I64", 64),
    ("uint64", "U64", 64),
]


def every_dtype():
    """Two elements of each, their bytes counted on."""
    tensors = {}
    begin = 0
    for writer_name, reader_name, bits in DTYPES:
        end = begin + 2 * bits // 8
        tensors[reader_name] = (writer_name, reader_name, [2], bytes(range(begin, end)))
        begin = end
    return tensors


# file name: (tensors, metadata)
FILES = {
    "small.safetensors": (SMALL, SMALL_METADATA),
    "dtypes.safetensors": (every_dtype(), None),
}


def writer_shape(dtype, shape):
    """The writer takes 4-bit elements as PyTorch has them, two in each byte of an array."""
    return [*shape[:-1], shape[-1] // 2] if dtype == "float4_e2m1fn_x2" else shape


def write(path):
    tensors, metadata = FILES[path.name]
    # The specs hold addresses only: `buffers` keeps the bytes alive while the package reads them.
    buffers = {
        name: ctypes.create_string_buffer(data, len(data) + 1)
        for name, (_, _, _, data) in tensors.items()
    }
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype,
            shape=writer_shape(dtype, shape),
            data_ptr=ctypes.addressof(buffers[name]),
            data_len=len(data),
        )
        for name, (dtype, _, shape, data) in tensors.items()
    }
    safetensors.serialize_file(specs, str(path), metadata)


def check(path):
    tensors, metadata = FILES[path.name]
    found = {
        name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }
    expected = {
        name: (dtype, shape, data) for name, (_, dtype, shape, data) in tensors.items()
    }
    if found != expected:
        sys.exit(f"{path}: expected {expected}, found {found}")
    with safetensors.safe_open(str(path), framework="np") as opened:
        if opened.metadata() != metadata:
            sys.exit(f"{path}: expected metadata {metadata}, found {opened.metadata()}")
    print(f"{path}: the official package reads the expected {len(found)} tensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", metavar="FILE", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.check is not None:
        if arguments.check.name not in FILES:
            parser.error(f"--check: expected a {' or '.join(FILES)}, found {arguments.check}")
        check(arguments.check)
    else:
        for name in FILES:
            write(pathlib.Path(__file__).with_name(name))


if __name__ == "__main__":
    main()
