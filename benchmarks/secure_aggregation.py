"""What a round of secure aggregation costs each client and the server, by clients and neighbours.

    python -m benchmarks.secure_aggregation [--values 15000] [--sizes 10:all 100:20]

A size is N:k, clients and the neighbours of each. A tenth of the clients drops out after it has shared, which is the
dear case: the server makes all of their masks again. One core; no Ray.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from time import process_time
from typing import Any

import torch

from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.over_channel import SumOverChannel
from rayfed.crypto.masking import Transcript
from rayfed.protections.secure_aggregation import Dropouts, Hosted, MaskedChannel, SecureAggregation
from rayfed.update import Update


def measured(values: int, count: int, neighbours: int | None) -> tuple[float, float, float]:
    """Seconds of a client and of the server, and bytes of a client beside its vector."""
    lost, members, spent = count // 10, list(range(count)), {"clients": 0.0, "server": 0.0}
    least = neighbours // 2 + 2 if neighbours else None  # the default loses rounds of hundreds to one unlucky client
    protection = SecureAggregation(neighbours=neighbours, threshold=least, dropouts=Dropouts(mask=lost))
    server = SumOverChannel.of(FedAvg(), protection, count, count)
    assert isinstance(server.channel, MaskedChannel)
    masks = server.channel
    g = torch.Generator().manual_seed(1)
    sent = [Update(c, 0, {"w": torch.rand(values, generator=g) - 0.5}, {}, 1, 0.0) for c in members]

    def by(who: str, act: Callable[..., Any], *arguments: Any) -> Any:
        began = process_time()
        result = act(*arguments)
        spent[who] += process_time() - began
        return result

    transcripts: dict[int, Transcript] = {}

    def consulted(known: Any) -> Any:
        hosted = Hosted(b"secret of the clients", None, members, transcripts=transcripts)
        clients = replace(masks, hosted=hosted)
        while question := by("server", known.request):
            said = {c: by("clients", clients.answer, question.payload, c, 0) for c in members}
            known = by("server", known.receive, said)
        return known

    session = consulted(server.begin_round(members, {}))
    clients = replace(masks, hosted=Hosted(b"secret of the clients", session.broadcast(), members))
    masked = [by("clients", clients.protect, update, 1) for update in sent]
    total = consulted(session.finalise(by("server", server.partial, masked)))
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
