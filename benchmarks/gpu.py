"""One large GPU in under ten minutes: right numbers, share of its peak in training, of its bandwidth in decoding.

    python benchmarks/gpu.py                                  # a table, and gpu.json
    python benchmarks/gpu.py --device cpu --smoke             # the same code on tiny sizes

Every section runs in a process of its own with its own share of the time: one that fails or hangs costs the others
nothing. No network, no weights to download: the checks use the checkpoint that ships with the package, the rest
random weights in the shape of Ouro-1.4B.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

SECTIONS = {"agreement": 90, "training": 320, "decoding": 140}
"""Seconds for each, 550 in all."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check and measure looplm on one device.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a row in training")
    parser.add_argument("--peak-tflops", type=float, help="bf16 peak of a device that the table does not know")
    parser.add_argument("--bandwidth-gbs", type=float, help="memory bandwidth of such a device")
    parser.add_argument("--seconds", type=float, default=sum(SECTIONS.values()), help="time for all sections together")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of them, with commas")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where every figure is written")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the sections one after another and prints one table. 1 when a check or a section failed."""
    options = parse()
    if options.run_section is not None:
        return run_here(options)
    chosen = options.sections.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        print(f"There is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}.", file=sys.stderr)
        return 2
    began, figures = time.monotonic(), []
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        budget = options.seconds * SECTIONS[name] / sum(SECTIONS[name] for name in chosen)
        figures += run_section(name, budget)
    report = {"device": device_name(options.device), "seconds": time.monotonic() - began, "figures": figures}
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_table(report)
    print(f"\nEvery figure: {options.json}")
    return int(any(figure["verdict"] == "FAILED" for figure in figures))


def run_section(name: str, budget: float) -> list[dict[str, Any]]:
    """The figures of one section, and a failed one more if it did not come to its end in time."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run-section", name, "--seconds", str(budget)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=budget, env=environment)
        output, problem = done.stdout, f"ended with status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as stopped:
        output, problem = stopped.stdout or b"", f"stopped after {budget:.0f} seconds"
    figures = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    if problem is not None:
        figures.append({"section": name, "what": "the section itself", "value": problem, "verdict": "FAILED"})
    return figures


def run_here(options: argparse.Namespace) -> int:
    """One section in this process: a JSON object a line on stdout. An exception is told and is status 1."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not meet the figures
    try:
        for figure in section(options):
            print(json.dumps(asdict(figure)), file=pipe, flush=True)
    except Exception as error:  # whatever it is, the other sections go on
        failed = {"section": options.run_section, "what": type(error).__name__, "verdict": "FAILED"}
        print(json.dumps({**failed, "value": (str(error).splitlines() or [""])[0][:200]}), file=pipe, flush=True)
        raise
    return 0


def section(options: argparse.Namespace) -> Iterator[Any]:
    """The figures of `options.run_section`, as they come."""
    import torch

    from looplm.bench.devices import Peak, peak_of
    from looplm.bench.sizes import SMOKE, TrainSizes

    device = torch.device(options.device)
    until = time.monotonic() + 0.75 * options.seconds  # what is begun by then has time to end
    peak = peak_of(device_name(options.device))
    if options.peak_tflops is not None and options.bandwidth_gbs is not None:
        peak = Peak(options.peak_tflops, options.bandwidth_gbs)
    ouro = TrainSizes(
        hidden_size=2048, intermediate_size=5632, num_layers=24, num_loops=4, head_dim=128, vocab_size=49_152,
        seq_len=options.seq_len, batch_size=1, norm_placement="ouro",
    )  # fmt: skip
    few: dict[str, Any]
    sizes = replace(SMOKE, norm_placement="ouro") if options.smoke else ouro
    if options.run_section == "agreement":
        import looplm
        from looplm.bench.agreement import agreement
        from looplm.quickstart.shipped import shipped_directory

        tokens = looplm.load_tokenizer(shipped_directory()).encode(Path(ast.__file__).read_text(encoding="utf-8"))
        yield from agreement(shipped_directory(), tokens, device, seq_len=48 if options.smoke else 256)
    elif options.run_section == "training":
        from looplm.bench.utilisation import utilisation

        few = {"most_rows": 2, "choices": (("none", "layer"), ("blocks", "none"))} if options.smoke else {}
        yield from utilisation(sizes, device, peak, until=until, **few)
    else:
        from looplm.bench.decode import decode

        few = {"max_tokens": 4, "prompt_tokens": 3, "batch_sizes": (1, 3)} if options.smoke else {}
        yield from decode(replace(sizes, seq_len=16 if options.smoke else 1024), device, peak, until=until, **few)


def device_name(device: str) -> str:
    """What PyTorch calls it, or the processor calls itself."""
    from looplm.bench.train import Machine

    return Machine.here(device, 1).device


def print_table(report: dict[str, Any]) -> None:
    """All figures, section by section."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['device']}, {report['seconds']:.0f} seconds", title_justify="left", box=box.SIMPLE)
    for column in ("section", "what", "figure", ""):
        table.add_column(column, overflow="fold")
    last = None
    for figure in report["figures"]:
        style = "bold red" if figure["verdict"] == "FAILED" else None
        name = figure["section"] if figure["section"] != last else ""
        last = figure["section"]
        table.add_row(name, figure["what"], figure["value"], figure["verdict"], style=style)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
