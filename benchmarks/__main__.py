"""Run the benchmarks, one after the other, and write the docs' tables from their results.

    python -m benchmarks                  all of them: hours
    python -m benchmarks overhead fp8     these groups, or single ones
    python -m benchmarks --list           what there is
    python -m benchmarks --quick          small ones, to see that they work: results go elsewhere

Each writes `NAME.json`, with the versions and the machine that made it; those with pictures write
these, too. One that fails does not stop the others; the exit status is 1 if any did.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from benchmarks import _suite
from benchmarks._suite import ROOT

RESULTS, IMAGES = "benchmarks/results", "docs/images"
QUICK = ".cache/benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("names", nargs="*", metavar="NAME", help="a group or a benchmark")
    options.add_argument("--list", action="store_true", help="list them, and run nothing")
    options.add_argument(
        "--out", metavar="DIR", help=f"where JSON and pictures go ({RESULTS} and {IMAGES})"
    )
    options.add_argument(
        "--quick", action="store_true", help=f"small sizes; without --out into {QUICK}"
    )
    parsed = options.parse_args(argv)
    if parsed.list:
        print(_suite.listing())
        return 0
    try:
        benchmarks = _suite.chosen(parsed.names)
    except ValueError as error:
        options.error(str(error))
    out = parsed.out or (QUICK if parsed.quick else RESULTS)
    is_published = out == RESULTS
    images = IMAGES if is_published else out
    (ROOT / pathlib.Path(out)).mkdir(parents=True, exist_ok=True)
    failed = _suite.run(benchmarks, out, images, quick=parsed.quick)
    if is_published:
        from benchmarks import render

        render.main([])
    done = len(benchmarks) - len(failed)
    print(f"{done} of {len(benchmarks)} done, results in {out}.")
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
