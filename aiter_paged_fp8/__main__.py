"""``python -m aiter_paged_fp8 demo | doctor | inspect``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aiter_paged_fp8", description="FP8 attention over paged KV caches")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="attend a ragged batch over every cache layout and compare with the reference"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of the inputs (default 0)")
    commands.add_parser("doctor", help="versions, architecture, cache directory, and what would run here and why")
    inspect = commands.add_parser("inspect", help="resources and executed counts of a compiled kernel")
    inspect.add_argument("isa", nargs="*", help="ISA texts; none compiles and runs the example kernel")
    inspect.add_argument("--isa-coverage", action="store_true", help="which instructions the emulator implements")
    inspect.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.command == "inspect":
        from .inspection import inspect_kernels

        return inspect_kernels(args.isa, coverage=args.isa_coverage, as_json=args.json)
    if args.command == "demo":
        from .demo import demo as run_demo

        return run_demo(args.seed)
    from .doctor import doctor as run_doctor

    return run_doctor()


if __name__ == "__main__":
    sys.exit(main())
