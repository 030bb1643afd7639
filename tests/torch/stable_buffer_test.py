# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0
"""StableBuffer and StreamSum against PyTorch, in one process on one GPU.

Usage: python3 stable_buffer_test.py PATH/TO/libholdfast_torch.so

The sums must have the bits of `view(rows, 4, hidden).sum(1)`, and a torch.cuda.CUDAGraph that reads the
buffer through a tensor which aliases it must see every refit, while a tensor that is assigned anew after
capture must stay stale (or the first half proves nothing). Exits with 77 where PyTorch is missing, and
where a GPU is, unless HOLDFAST_REQUIRE_GPU=1.
"""

import ctypes
import os
import sys
import unittest

try:
    import torch
except ImportError:
    torch = None

LIBRARY = None
SKIPPED = 77


class Buffer:
    def __init__(self, name):
        self.handle = ctypes.c_void_p(LIBRARY.holdfast_create(name.encode()))

    def close(self):
        LIBRARY.holdfast_destroy(self.handle)

    def finalize(self, weights, streams):
        rows, columns = weights.shape
        failed = LIBRARY.holdfast_finalize(
            self.handle,
            ctypes.c_void_p(weights.data_ptr()),
            ctypes.c_int64(rows),
            ctypes.c_int64(streams),
            ctypes.c_int64(columns // streams),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if failed:
            raise RuntimeError(LIBRARY.holdfast_last_error().decode())

    def data(self):
        return LIBRARY.holdfast_data(self.handle)

    def tensor(self, rows, hidden):
        """A tensor at the buffer's address; no copy."""
        interface = {"shape": (rows, hidden), "typestr": "<f4", "data": (self.data(), False), "version": 3}
        return torch.as_tensor(type("Alias", (), {"__cuda_array_interface__": interface})(), device="cuda")


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


class StableBufferTest(unittest.TestCase):
    def setUp(self):
        self.buffer = Buffer("layers.0.hc_attn_fn_broadcast")

    def tearDown(self):
        torch.cuda.synchronize()
        self.buffer.close()

    def expect_same_bits(self, weights):
        rows, columns = weights.shape
        buffer = Buffer("sums")
        buffer.finalize(weights, 4)
        ours = buffer.tensor(rows, columns // 4)
        theirs = weights.view(rows, 4, columns // 4).sum(1)
        differ = int((bits(ours) != bits(theirs)).sum())
        torch.cuda.synchronize()
        buffer.close()
        self.assertEqual(differ, 0, f"{differ} of {theirs.numel()} sums of {tuple(weights.shape)} differ")

    def test_sums_have_the_bits_of_torch(self):
        torch.manual_seed(1)
        for rows in (1, 3, 24, 1536):
            # With hidden 1 the four terms lie side by side, and PyTorch adds them in another order.
            for hidden in (2, 3, 7, 64, 1280, 4096, 4100, 5120, 7168):
                for scale in (0.02, 1.0, 1e30):
                    weights = torch.randn(rows, 4 * hidden, device="cuda") * scale
                    self.expect_same_bits(weights)

    def test_order_and_signed_zeros_have_the_bits_of_torch(self):
        terms = torch.tensor([1e8, 1.0, -1e8, 1.0, -0.0, 0.0, 3e-41, float("inf")], device="cuda")
        picks = torch.cartesian_prod(*[torch.arange(8, device="cuda")] * 4)  # every row of four terms
        weights = terms[picks].t().contiguous().view(1, -1)  # [1, 4 * 4096]: stream-major
        self.expect_same_bits(weights)
        self.expect_same_bits(torch.full((24, 4 * 4096), -0.0, device="cuda"))

    def test_captured_graph_sees_every_refit_and_a_rebound_tensor_does_not(self):
        rows, hidden = 24, 4096
        weights = torch.randn(rows, 4 * hidden, device="cuda")
        self.buffer.finalize(weights, 4)
        address = self.buffer.data()
        alias = self.buffer.tensor(rows, hidden)
        self.assertEqual(alias.data_ptr(), address)
        rebound = weights.view(rows, 4, hidden).sum(1)
        first = rebound.clone()
        kept = [rebound]  # the storage stays allocated, so that a stale read gives old numbers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            from_buffer = alias * 2.0
            from_rebound = rebound * 2.0
        for _ in range(5):
            weights.copy_(torch.randn_like(weights))
            self.buffer.finalize(weights, 4)
            rebound = weights.view(rows, 4, hidden).sum(1)
            kept.append(rebound)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(from_buffer, rebound * 2.0))
            self.assertTrue(torch.equal(from_rebound, first * 2.0))
            self.assertFalse(torch.equal(first, rebound))
            self.assertEqual(self.buffer.data(), address)
        self.assertEqual(LIBRARY.holdfast_generation(self.buffer.handle), 6)

    def test_first_finalize_under_capture_is_refused_and_the_capture_survives(self):
        weights = torch.ones(24, 4 * 64, device="cuda")
        out = torch.zeros(24, 4 * 64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with self.assertRaisesRegex(RuntimeError, "before capture"):
                self.buffer.finalize(weights, 4)
            out.copy_(weights)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(out, weights))
        self.assertIsNone(self.buffer.data())


if __name__ == "__main__":
    if torch is None:
        print("skipped: PyTorch is not installed")
        sys.exit(SKIPPED)
    if not torch.cuda.is_available():
        print("skipped: no usable GPU")
        sys.exit(1 if os.environ.get("HOLDFAST_REQUIRE_GPU") == "1" else SKIPPED)
    LIBRARY = ctypes.CDLL(sys.argv.pop(1))
    LIBRARY.holdfast_create.restype = ctypes.c_void_p
    LIBRARY.holdfast_data.restype = ctypes.c_void_p
    LIBRARY.holdfast_last_error.restype = ctypes.c_char_p
    LIBRARY.holdfast_generation.restype = ctypes.c_uint64
    unittest.main()
