"""What a round of secure aggregation costs each client and the server, by clients and neighbours.

    python -m benchmarks.secure_aggregation [--values 15000] [--sizes 10:all 100:20]

A size is N:k, clients and the neighbours of each. A tenth of the clients drops out after it has shared, which is the
dear case: the server makes all of their masks again. One core; no Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch

from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.secure_sum import Hosted, SecureSum
from rayfed.crypto.masking import Transcript
from rayfed.crypto.session import Session
from rayfed.protections.secure_aggregation import Dropouts, SecureAggregation
from rayfed.update import Update


@dataclass(frozen=True)
class Client:
    """Who answers in round 0."""

    client: int
    round: int = 0

    def evaluate(self, *_: object) -> tuple[float, float]:
        """Is asked of nobody here."""
        raise NotImplementedError


def measured(values: int, count: int, neighbours: int | None) -> tuple[float, float, float]:
    """Seconds of a client and of the server, and bytes of a client beside its vector."""
    lost, members, spent = count // 10, list(range(count)), {"clients": 0.0, "server": 0.0}
    least = neighbours // 2 + 2 if neighbours else None  # the default loses rounds of hundreds to one unlucky client
    protection = SecureAggregation(neighbours=neighbours, threshold=least, dropouts=Dropouts(mask=lost))
    server = SecureSum.of(FedAvg(), protection, count, count)
    g = torch.Generator().manual_seed(1)
    sent = [Update(c, 0, {"w": torch.rand(values, generator=g) - 0.5}, {}, 1, 0.0) for c in members]

    def by(who: str, act: Callable[..., Any], *arguments: Any) -> Any:
        began = process_time()
        result = act(*arguments)
        spent[who] += process_time() - began
        return result

    transcripts: dict[int, Transcript] = {}

    def consulted(known: Session) -> Session:
        clients = server.at_clients(Hosted(b"secret of the clients", None, members, transcripts=transcripts))
        while question := by("server", server.asks, known):
            said = {c: by("clients", clients.answer, question.payload, Client(c)) for c in members}
            known = by("server", server.hears, known, said)
        return known

    session = consulted(server.opens(members, 0))
    clients = server.at_clients(Hosted(b"secret of the clients", server.told(session), members))
    masked = [by("clients", clients.sends, update) for update in sent]
    total = consulted(server.joins(session, by("server", server.partial, masked)))
    assert total.aborted is None, total.aborted
    step, _ = server.combine(total, torch.Generator())
    expected = torch.stack([update.tensors["w"] for update in sent[lost:]]).mean(0)
    torch.testing.assert_close(step["w"], expected, rtol=0, atol=1e-6)
    return spent["clients"] / count, spent["server"], total.protocol_bytes / count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=15_000)
    parser.add_argument("--sizes", nargs="+", default=["10:all", "30:all", "100:all", "100:20", "300:all", "300:20"])
    arguments = parser.parse_args()
    print("| clients N | neighbours k | client | server | keys, boxes, tags, shares of a client |")
    print("| --- | --- | --- | --- | --- |")
    for size in arguments.sizes:
        count, near = size.split(":")
        client, server, sent = measured(arguments.values, int(count), None if near == "all" else int(near))
        print(f"| {count} | {near} | {1000 * client:.0f} ms | {server:.2f} s | {sent / 1000:.1f} kB |", flush=True)


if __name__ == "__main__":
    main()
