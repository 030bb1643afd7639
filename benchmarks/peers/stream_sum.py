# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch needs for the same sums, on the same GPU as holdfast.bench.stream_sum.

    python3 benchmarks/peers/stream_sum.py --json pytorch.json

For hidden 4096 and 7168, f32, 24 rows, 4 streams:

finalize  buf.copy_(w.view(24, 4, hidden).sum(1)), host clock, median: until the call returns, and until
          the stream is done (synchronised before each).
graph     the same in a replayed graph, and the sum alone (torch.sum(..., out=buf)): a chain of 200 of
          them over 4 matrices between two events, divided by 200, median.
refit     8 graphs (batches of 1 to 40 tokens) that read the sum are captured, new weights arrive,
          the sum is refitted and every graph replayed. `rebind` makes a new tensor, and the graphs go
          on reading the old one; `recapture` does too and captures all graphs again, with what
          torch.cuda.graph does around each capture (it synchronises, collects garbage and empties the
          allocator's cache); the others write in place. Host times as above.
copy      torch copy_ between two tensors of 2.2 GB: bytes read and written per second, median. Below
          4.0 TB/s the machine was disturbed and the run is void.

Each result is checked against the sum in stream order, bit for bit.
"""

import argparse
import json
import statistics
import sys
import time

ROWS, STREAMS = 24, 4
NODES, SETS = 200, 4
VOID_BELOW = 4.0e12


def in_order(torch, weight, hidden):
    """The sum over the streams, from +0.0 in stream order."""
    total = torch.zeros(ROWS, hidden, device=weight.device)
    for stream in range(STREAMS):
        total = total + weight.view(ROWS, STREAMS, hidden)[:, stream]
    return total


def same_bits(torch, a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def finalize(torch, weight, hidden, samples, enqueue):
    """Host times of one refit, until the call returns and until the stream is done."""
    buffer = torch.full((ROWS, hidden), float("nan"), device=weight.device)
    stream = torch.cuda.current_stream()
    calls, dones = [], []
    for sample in range(-500, samples):  # the first 500 warm up
        stream.synchronize()
        begin = time.perf_counter()
        enqueue(weight, buffer)
        returned = time.perf_counter()
        stream.synchronize()
        done = time.perf_counter()
        if sample >= 0:
            calls.append((returned - begin) * 1e6)
            dones.append((done - begin) * 1e6)
    right = same_bits(torch, buffer, in_order(torch, weight, hidden))
    return {
        "call_us": statistics.median(calls),
        "done_us": statistics.median(dones),
        "same_bits": right,
    }


def graph(torch, weights, hidden, samples, enqueue):
    buffers = [torch.full((ROWS, hidden), float("nan"), device=w.device) for w in weights]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight, buffer in zip(weights, buffers):  # warm up outside the capture
            enqueue(weight, buffer)
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            for node in range(NODES):
                enqueue(weights[node % SETS], buffers[node % SETS])
        for buffer in buffers:
            buffer.fill_(float("nan"))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for sample in range(-5, samples):
            captured.replay()  # keeps the GPU busy while the host enqueues the rest
            begin.record(stream)
            captured.replay()
            end.record(stream)
            stream.synchronize()
            if sample >= 0:
                times.append(begin.elapsed_time(end) * 1e3 / NODES)
    right = all(
        same_bits(torch, buffer, in_order(torch, weight, hidden))
        for weight, buffer in zip(weights, buffers)
    )
    return {"us": statistics.median(times), "same_bits": right}


class Engine:
    """Captured graphs, one for each batch size, whose output depends on the derived weight `buffer`."""

    BATCHES = (1, 2, 4, 8, 16, 24, 32, 40)

    def __init__(self, torch, weight, hidden):
        self.torch, self.hidden = torch, hidden
        self.x = torch.randn(max(self.BATCHES), hidden, device=weight.device)
        self.buffer = self.sum_of(weight)
        self.kept = []  # what was rebound: a stale graph then reads old numbers, not somebody else's
        self.stream = torch.cuda.Stream()
        self.warm_up()
        self.capture()

    def sum_of(self, weight):
        return weight.view(ROWS, STREAMS, self.hidden).sum(1)

    def read(self, batch, buffer):
        """What the first layer does with the weight, less its details: a projection of the tokens."""
        return (self.x[:batch, None, :] * buffer[None]).sum(-1)

    def warm_up(self):
        self.stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(self.stream):
            for batch in self.BATCHES:
                self.read(batch, self.buffer)
        self.torch.cuda.synchronize()

    def capture(self):
        self.graphs, self.outputs = [], []
        for batch in self.BATCHES:
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph, stream=self.stream):
                output = self.read(batch, self.buffer)
            self.graphs.append(graph)
            self.outputs.append(output)

    def rebind(self, weight):
        self.kept = self.kept[:1] + [self.buffer]
        self.buffer = self.sum_of(weight)

    def recapture(self, weight):
        self.rebind(weight)
        self.capture()

    def copy_(self, weight):
        self.buffer.copy_(self.sum_of(weight))

    def sum_out(self, weight):
        self.torch.sum(weight.view(ROWS, STREAMS, self.hidden), 1, out=self.buffer)

    def verdict(self, old, new):
        """fresh or STALE if every element of every graph's output is, else WRONG. The graph and the
        eager call run the same kernel on the same numbers, so the bits are the same."""
        verdicts = set()
        for batch, graph, output in zip(self.BATCHES, self.graphs, self.outputs):
            output.fill_(float("nan"))
            graph.replay()
            self.torch.cuda.synchronize()
            was, now = (self.read(batch, self.sum_of(weight)) for weight in (old, new))
            if bool((was == now).any()):
                return "WRONG"  # an element that could not tell
            if same_bits(self.torch, output, now):
                verdicts.add("fresh")
            elif same_bits(self.torch, output, was):
                verdicts.add("STALE")
            else:
                verdicts.add("WRONG")
        return verdicts.pop() if len(verdicts) == 1 else "WRONG"


def refit(torch, hidden, samples):
    """Each way to refit: what the graphs read after it, and what it costs."""
    old, new = (torch.randn(ROWS, STREAMS * hidden, device="cuda") for _ in range(2))
    stream = torch.cuda.current_stream()
    results = {}
    for way in ("rebind", "recapture", "copy_", "sum_out"):
        engine = Engine(torch, old, hidden)
        before = engine.verdict(new, old)  # the old weights are the right ones yet
        address = engine.buffer.data_ptr()
        getattr(engine, way)(new)
        stream.synchronize()
        kept = engine.buffer.data_ptr() == address
        verdict = engine.verdict(old, new) if before == "fresh" else "WRONG"
        slow = way == "recapture"
        calls, dones = [], []
        for sample in range(-2 if slow else -500, 11 if slow else samples):
            weight = new if sample % 2 else old
            stream.synchronize()
            begin = time.perf_counter()
            getattr(engine, way)(weight)
            returned = time.perf_counter()
            stream.synchronize()
            done = time.perf_counter()
            if sample >= 0:
                calls.append((returned - begin) * 1e6)
                dones.append((done - begin) * 1e6)
        results[way] = {
            "graphs_read": verdict,
            "must_read": "STALE" if way == "rebind" else "fresh",
            "address_kept": kept,
            "call_us": statistics.median(calls),
            "done_us": statistics.median(dones),
        }
    return results


def copy_rate(torch):
    count = 550_000_000
    source = torch.arange(count, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copies, rates = 10, []
    for sample in range(-3, 21):
        target.copy_(source)
        begin.record()
        for _ in range(copies):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        if sample >= 0:
            rates.append(copies * 2 * 4 * count / (begin.elapsed_time(end) * 1e-3))
    return {"bytes_per_second": statistics.median(rates), "same_bits": torch.equal(source, target)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    parser.add_argument("--samples", type=int, default=101, help="of each host time (default 101)")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("no usable GPU", file=sys.stderr)
        return 1

    device = torch.cuda.get_device_properties(0)
    results = {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "copy": copy_rate(torch),
        "hidden": {},
    }
    for name in ("device", "multiprocessors", "torch", "cuda_runtime"):
        print(f"{name:16} {results[name]}")
    rate = results["copy"]["bytes_per_second"]
    print(f"{'copy_':16} {rate * 1e-12:.2f} TB/s\n")
    print(f"{'hidden':>6} {'way':>16} {'call_us':>9} {'done_us':>9} {'graph node':>11}   bits")

    torch.manual_seed(0)
    right = results["copy"]["same_bits"]
    for hidden in (4096, 7168):
        weights = [torch.randn(ROWS, STREAMS * hidden, device="cuda") for _ in range(SETS)]
        views = {id(w): w.view(ROWS, STREAMS, hidden) for w in weights}
        ways = {
            "copy_(sum)": lambda w, out: out.copy_(views[id(w)].sum(1)),
            "sum(out=)": lambda w, out: torch.sum(views[id(w)], 1, out=out),
        }
        results["hidden"][hidden] = {}
        for way, enqueue in ways.items():
            host = finalize(torch, weights[0], hidden, arguments.samples, enqueue)
            node = graph(torch, weights, hidden, 101, enqueue)
            results["hidden"][hidden][way] = {"finalize": host, "graph_node": node}
            same = host["same_bits"] and node["same_bits"]
            right = right and same
            print(
                f"{hidden:6} {way:>16} {host['call_us']:9.2f} {host['done_us']:9.2f}"
                f" {node['us']:11.2f}   {'same' if same else 'DIFFERENT'}"
            )
    print(
        f"\n{'hidden':>6} {'refit':>16} {'graphs read':>12} {'address':>8}"
        f" {'call_us':>11} {'done_us':>11}"
    )
    results["refit"] = {}
    for hidden in (4096, 7168):
        results["refit"][hidden] = refit(torch, hidden, arguments.samples)
        for way, found in results["refit"][hidden].items():
            right = right and found["graphs_read"] == found["must_read"]
            print(
                f"{hidden:6} {way:>16} {found['graphs_read']:>12}"
                f" {'kept' if found['address_kept'] else 'new':>8}"
                f" {found['call_us']:11.2f} {found['done_us']:11.2f}"
            )
    results["void"] = rate < VOID_BELOW
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
            file.write("\n")
    if results["void"]:
        print("\nvoid: copy_ is below 4.0 TB/s (is the GPU shared, or not an H200?)", file=sys.stderr)
    return 0 if right and not results["void"] else 1


if __name__ == "__main__":
    sys.exit(main())
