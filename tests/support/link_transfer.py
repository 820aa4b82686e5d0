"""KV over a network whose rate is known: two namespaces with a shaped cable between them, the mover
beside a bare socket, in turns. Needs root, `ip` and `tc`.

    PYTHONPATH=tests python -m support.link_transfer [GBIT_PER_S ...]

What `headrace bench transfer` measures on one machine without a network is what two cores do;
here it is what a link leaves to be done.
"""

import subprocess
import sys
from contextlib import closing

import msgspec

from headrace.adapters.movers.mover import BETWEEN
from headrace.adapters.movers.pool import SharedPool
from headrace.bench.transfer import BLOCK_BYTES, NUM_BLOCKS, Way, measure_tcp
from support.namespaces import BOX, can_make_machines, run_in, two_machines

GBIT_PER_S = (2.0, 5.0, 8.0, 10.0)
NUM_ROUNDS = 5


def main(rates: tuple[float, ...]) -> None:
    if not can_make_machines():
        sys.exit("this needs root and ip(8)")
    print("| link Gbit/s | mover GB/s | bare socket GB/s | share |\n|---|---|---|---|")
    with two_machines() as (borrower, lender):
        for rate in rates:
            shape(lender, "box", rate)
            way = measure(borrower, lender)
            cells = f"{way.gb_per_s:.2f} | {way.limit_gb_per_s:.2f} | {100 * way.share:.0f} %"
            print(f"| {rate:g} | {cells} |", flush=True)


def shape(namespace: str, link: str, gbit_per_s: float) -> None:
    """What leaves there leaves at this rate."""
    bucket = ["rate", f"{gbit_per_s}gbit", "burst", "2mb", "latency", "10ms"]
    command = ["tc", "qdisc", "replace", "dev", link, "root", "tbf", *bucket]
    subprocess.run(["ip", "netns", "exec", namespace, *command], check=True)


def measure(borrower: str, lender: str) -> Way:
    words = ["-m", "headrace.bench.lender", str(NUM_BLOCKS), str(BLOCK_BYTES), BOX]
    pipe = subprocess.PIPE
    with run_in(lender, *words, stdin=pipe, stdout=pipe) as lending:
        try:
            assert lending.stdout is not None
            place, _, port = lending.stdout.readline().rpartition(" ")
            _, _, address = place.partition(BETWEEN)
            here = ["-m", "support.link_transfer", "--from", address, port.strip()]
            with run_in(borrower, *here, stdout=pipe) as measuring:
                answer, _ = measuring.communicate(timeout=300)
            return msgspec.json.decode(answer, type=Way)
        finally:
            lending.kill()


def measure_here(address: str, port: int) -> None:
    with closing(SharedPool(NUM_BLOCKS, BLOCK_BYTES)) as pool:
        way, _ = measure_tcp(address, (BOX, port), pool, NUM_ROUNDS)
    print(msgspec.json.encode(way).decode())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--from"]:
        measure_here(sys.argv[2], int(sys.argv[3]))
    else:
        main(tuple(map(float, sys.argv[1:])) or GBIT_PER_S)
