# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch needs for the mHC operations, on the same GPU as holdfast.bench.mhc.

    python3 benchmarks/peers/mhc_torch.py --ours mhc.json --json mhc_torch.json
    python3 benchmarks/peers/mhc_torch.py --ops post,pre --hidden 4096 --tokens 1,64

The operations, names and shapes are those of holdfast.bench.mhc, written as their equations stand,
in f32 with TF32 off, for batches of bf16: pre, pre_norm (with RMSNorm), pre_broadcast (with RMSNorm
and residual_out), post, post_pre (with RMSNorm), head. Each runs as it is (eager) and through
torch.compile, for its shape alone; mixes are among its results.

us     one of 20 calls in a replayed graph, between two events, behind a first replay; the median.
       All calls use the same tensors (warm L2). `ratio` is the faster of the two by --ours, which
       names the JSON of holdfast.bench.mhc, whose times with warm L2 it takes.
error  of mixes, relative, root mean square, against f64 over the first 64 tokens. Those of post_pre
       are of the residual that it returned, in bf16; a compiled one may project what it had before
       it rounded, which shows here.

Compiling takes longer than all else, so --seconds bounds the run: eager comes first, then
torch.compile in the order of --tokens, every operation with the first, then with the next. A case
that cannot be compiled or run is reported as failed, with its reason; one for which no time was
left, as such. Each result must be within 1 % of f64 (root mean square), else it is WRONG.
copy_ must reach 4.0 TB/s, else the run is void.
"""

import argparse
import json
import statistics
import sys
import time

from stream_sum import VOID_BELOW, copy_rate

try:
    import torch
except ImportError:
    torch = None

STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
EPS = 1e-6
POST_MULT = 2.0
ITERATIONS = 20

CALLS = 20  # in one graph
COMPARED = 64  # tokens
TOLERANCE = 1e-2


# --- The operations. They compute in the type of fn, post and comb: f32, or f64 for reference.


def mixes_of(p, fn):
    """p [tokens, width], fn [rows, width]."""
    p = p.to(fn.dtype)
    rms = torch.rsqrt(p.square().mean(-1, keepdim=True) + EPS)
    return (p @ fn.t()) * rms


def sinkhorn(logits):
    comb = torch.softmax(logits, -1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return comb


def coefficients(mixes, scale, base):
    n = STREAMS
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + EPS
    post = POST_MULT * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n))
    return pre, post, comb


def collapse(pre, residual):
    return (pre.unsqueeze(-1) * residual.to(pre.dtype)).sum(1)


def norm(y, weight):
    rho = torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y.bfloat16().to(y.dtype) * rho * weight).bfloat16()


def mix(x, residual, post, comb):
    """The new streams [tokens, 4, hidden]."""
    out = post.unsqueeze(-1) * x.to(post.dtype).unsqueeze(1)
    for i in range(STREAMS):
        out = out + comb[:, i].unsqueeze(-1) * residual[:, i].to(post.dtype).unsqueeze(1)
    return out.bfloat16()


def run_pre(residual, fn, scale, base, norm_weight=None):
    mixes = mixes_of(residual.flatten(1), fn)
    pre, post, comb = coefficients(mixes, scale, base)
    y = collapse(pre, residual)
    return mixes, post, comb, y.bfloat16() if norm_weight is None else norm(y, norm_weight)


def run_pre_broadcast(x, fn_broadcast, scale, base, norm_weight):
    residual = x.unsqueeze(1).expand(-1, STREAMS, -1)
    mixes = mixes_of(x, fn_broadcast)
    pre, post, comb = coefficients(mixes, scale, base)
    return mixes, post, comb, norm(collapse(pre, residual), norm_weight), residual.contiguous()


def run_post(x, residual, post, comb):
    return (mix(x, residual, post, comb),)


def run_post_pre(x, residual, post, comb, fn, scale, base, norm_weight):
    residual_out = mix(x, residual, post, comb)
    return *run_pre(residual_out, fn, scale, base, norm_weight), residual_out


def run_head(residual, fn, scale, base):
    mixes = mixes_of(residual.flatten(1), fn)
    pre = torch.sigmoid(mixes * scale[0] + base) + EPS
    return mixes, collapse(pre, residual).bfloat16()


# Each with the names of its results.
OPS = {
    "pre": (run_pre, ("mixes", "post", "comb", "layer_input")),
    "pre_norm": (run_pre, ("mixes", "post", "comb", "layer_input")),
    "pre_broadcast": (
        run_pre_broadcast,
        ("mixes", "post", "comb", "layer_input", "residual_out"),
    ),
    "post": (run_post, ("residual_out",)),
    "post_pre": (run_post_pre, ("mixes", "post", "comb", "layer_input", "residual_out")),
    "head": (run_head, ("mixes", "hidden_states")),
}

# --- The measurement


def inputs_of(op, hidden, tokens):
    """The arguments of an operation, and how many of them, the first, have a row for each token."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    def batch(*shape):
        return normal(tokens, *shape).bfloat16()

    def weights(rows, width):
        scale = torch.tensor([0.5, 0.25, 1.0], device="cuda")
        return 0.02 * normal(rows, width), scale, normal(rows)

    norm_weight = (1 + 0.25 * normal(hidden)).bfloat16()
    if op in ("pre", "pre_norm"):
        norms = (norm_weight,) if op == "pre_norm" else ()
        return (batch(STREAMS, hidden), *weights(MIXES, STREAMS * hidden), *norms), 1
    if op == "pre_broadcast":
        return (batch(hidden), *weights(MIXES, hidden), norm_weight), 1
    if op == "head":
        return (batch(STREAMS, hidden), *weights(STREAMS, STREAMS * hidden)), 1
    post = POST_MULT * torch.sigmoid(normal(tokens, STREAMS))
    comb = sinkhorn(normal(tokens, STREAMS, STREAMS))
    of_tokens = (batch(hidden), batch(STREAMS, hidden), post, comb)
    if op == "post":
        return of_tokens, len(of_tokens)
    return (*of_tokens, *weights(MIXES, STREAMS * hidden), norm_weight), len(of_tokens)


def relative_rms(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def errors(op, inputs, of_tokens, results):
    """The relative error of each result over the first tokens, against f64."""
    first = [tensor[:COMPARED] for tensor in inputs[:of_tokens]]
    exact = [
        tensor.double() if tensor.dtype == torch.float32 else tensor
        for tensor in (*first, *inputs[of_tokens:])
    ]
    run, names = OPS[op]
    got = dict(zip(names, results))
    want = dict(zip(names, run(*exact)))
    if op == "post_pre":  # a residual that rounds the other way moves mixes more than f32 does
        want["mixes"] = mixes_of(got["residual_out"].flatten(1), exact[of_tokens])
    return {name: relative_rms(got[name], want[name]) for name in names}


def measure(call, inputs, samples):
    """Microseconds of one call, and the results of the last one for the first tokens."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and warms up outside the capture
            results = call(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                results = call(*inputs)
        for result in results:
            result.fill_(float("nan"))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for sample in range(-2, samples):
            graph.replay()  # keeps the GPU busy while the host enqueues the rest
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if sample >= 0:
                times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        results = [result[:COMPARED].clone() for result in results]
        stream.synchronize()
    return statistics.median(times), results


def run_case(way, case, samples):
    """What the table and the JSON say of one operation on one shape."""
    op, hidden, tokens = case
    call = OPS[op][0]
    try:
        inputs, of_tokens = inputs_of(op, hidden, tokens)
        if way == "compile":
            torch.compiler.reset()
            call = torch.compile(call, dynamic=False, fullgraph=True)
        us, results = measure(call, inputs, samples if tokens < 4096 else min(samples, 7))
    except Exception as error:  # whatever the compiler or the allocator may raise
        lines = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {lines[0]}"}
    found = errors(op, inputs, of_tokens, results)
    result = {"us": us, "right": all(error <= TOLERANCE for error in found.values())}
    if "mixes" in found:
        result["mixes_rel_rms"] = found["mixes"]
    return result


def read_ours(path):
    """The medians in the JSON of holdfast.bench.mhc, by case."""
    ours = {}
    with open(path, encoding="utf-8") as file:
        for run in json.load(file)["benchmarks"]:
            parts = run["run_name"].split("/")
            if run.get("aggregate_name") != "median" or parts[-1] != "l2:warm" or len(parts) != 4:
                continue
            hidden, tokens = (int(part.partition(":")[2]) for part in parts[1:3])
            ours[parts[0], hidden, tokens] = {"us": run["real_time"]}
            if "mixes_rel_rms" in run:
                ours[parts[0], hidden, tokens]["mixes_rel_rms"] = run["mixes_rel_rms"]
    return ours


def time_text(result):
    if result is None:
        return "-"
    if "us" not in result:
        return "failed" if "failed" in result else "no time"
    return f"{result['us']:.2f}" if result.get("right", True) else "WRONG"


def error_text(result):
    return f"{result['mixes_rel_rms']:.1e}" if result and "mixes_rel_rms" in result else "-"


def print_table(results):
    print(
        f"\n{'op':>13} {'hidden':>6} {'tokens':>6} {'eager us':>10} {'compile us':>10} {'ours us':>9}"
        f" {'ratio':>6} {'eager err':>10} {'compile err':>11} {'ours err':>9}"
    )
    for result in results:
        eager, compiled, ours = (result.get(way) for way in ("eager", "compile", "ours"))
        peers = [way["us"] for way in (eager, compiled) if way and way.get("right")]
        ratio = f"{min(peers) / ours['us']:.2f}" if peers and ours else "-"
        print(
            f"{result['op']:>13} {result['hidden']:6} {result['tokens']:6} {time_text(eager):>10}"
            f" {time_text(compiled):>10} {time_text(ours):>9} {ratio:>6} {error_text(eager):>10}"
            f" {error_text(compiled):>11} {error_text(ours):>9}"
        )
    for result in results:
        for way in ("eager", "compile"):
            reason = result.get(way, {}).get("failed")
            if reason:
                print(f"{way} {result['op']} {result['hidden']} {result['tokens']}: {reason}")


def parse_arguments():
    def numbers(text):
        return [int(number) for number in text.split(",")]

    def names(text):
        unknown = set(text.split(",")) - set(OPS)
        if unknown:
            raise argparse.ArgumentTypeError(f"no such op: {', '.join(sorted(unknown))}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=names, default=list(OPS), help="default all")
    parser.add_argument("--hidden", type=numbers, default=[4096, 7168], help="default 4096,7168")
    tokens = [1, 64, 1024, 16384, 8, 256, 4096]  # few and many first, in case time runs out
    parser.add_argument(
        "--tokens", type=numbers, default=tokens, help=f"default {','.join(map(str, tokens))}"
    )
    parser.add_argument("--samples", type=int, default=21, help="default 21; from 4096 tokens 7")
    parser.add_argument(
        "--seconds", type=float, default=150, help="no case begins after that (default 150)"
    )
    parser.add_argument("--ours", metavar="FILE", help="the JSON of holdfast.bench.mhc")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if torch is None:
        print("PyTorch is not installed", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("no usable GPU", file=sys.stderr)
        return 1
    begin = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    ours = read_ours(arguments.ours) if arguments.ours else {}

    device = torch.cuda.get_device_properties(0)
    copied = copy_rate(torch)
    document = {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "copy": copied,
        "void": copied["bytes_per_second"] < VOID_BELOW,
    }
    for name in ("device", "multiprocessors", "torch", "cuda_runtime"):
        print(f"{name:16} {document[name]}")
    print(f"{'copy_':16} {copied['bytes_per_second'] * 1e-12:.2f} TB/s", flush=True)
    if document["void"]:
        print("void: copy_ is below 4.0 TB/s (is the GPU shared, or not an H200?)", file=sys.stderr)
        return 1

    cases = [
        (op, hidden, tokens)
        for op in arguments.ops
        for hidden in arguments.hidden
        for tokens in sorted(arguments.tokens)
    ]
    found = {case: dict(zip(("op", "hidden", "tokens"), case)) for case in cases}
    for case in cases:
        if case in ours:
            found[case]["ours"] = ours[case]
    # All of eager first, which takes little; then of each operation a few tokens and then more, so
    # that no operation goes without when time runs out.
    in_turn = sorted(cases, key=lambda case: arguments.tokens.index(case[2]))
    for way, order in (("eager", cases), ("compile", in_turn)):
        for case in order:
            if time.monotonic() - begin > arguments.seconds:
                found[case][way] = {"no_time": True}
                continue
            found[case][way] = run_case(way, case, arguments.samples)
            torch.cuda.empty_cache()
        print(f"{way:16} done after {time.monotonic() - begin:.0f} s", flush=True)
    document["results"] = list(found.values())
    print_table(document["results"])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
    wrong = [
        result
        for result in document["results"]
        for way in ("eager", "compile")
        if not result[way].get("right", True)
    ]
    return 1 if wrong or not copied["same_bits"] else 0


if __name__ == "__main__":
    sys.exit(main())
