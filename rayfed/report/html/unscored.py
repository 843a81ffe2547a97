"""Page and table of reconstructions whose originals are not known, without scores and verdicts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from math import isnan
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.attacks.base import Reconstruction
from rayfed.evidence.rows import Row, group_rows
from rayfed.report.text.samples import NOT_SCORED
from rayfed.store.folder import RunFolder
from rayfed.store.images import encode_png

TABLE = "reconstructions.parquet"
_SCHEMA = pa.schema(
    [
        ("round", pa.int64()), ("client", pa.int64()), ("attack", pa.string()), ("sample", pa.int64()),
        ("label", pa.int64()), ("objective", pa.float64()), ("iterations", pa.int64()), ("status", pa.string()),
        ("message", pa.string()), ("image", pa.binary()),
    ]
)  # fmt: skip


def make_unscored_rows(round: int, client: int, attack: str, found: Reconstruction) -> list[dict[str, Any]]:
    """Return one row per reconstruction of an attack, or one row without a sample if the attack returned none."""
    key = {"round": round, "client": client, "attack": attack, "status": found.status, "message": found.message}
    key |= {"objective": None if isnan(found.loss) else found.loss, "iterations": found.iterations}
    nothing = found.status in ("not applicable", "failed")
    samples = [] if nothing else list(zip(found.images, found.labels.tolist(), strict=True))
    return [key | {"sample": i, "label": y, "image": encode_png(x)} for i, (x, y) in enumerate(samples)] or [key]


def write_unscored(folder: RunFolder, title: str, rows: Iterable[dict[str, Any]], remarks: Iterable[str]) -> str:
    """Write the table of unscored reconstructions and `report.html`; return the path or URL of the page."""
    table = pa.Table.from_pylist(list(rows), schema=_SCHEMA)
    buffer = BytesIO()
    pq.write_table(table, buffer)
    folder.write_bytes(TABLE, buffer.getvalue())
    notes = "".join(f"<p>{escape(remark)}</p>" for remark in remarks)
    body = "".join(map(_line, group_rows(table.to_pylist(), "round", "client", "attack").values()))
    folder.write_text(
        "report.html", _PAGE.format(title=escape(title), limits=escape(NOT_SCORED), notes=notes, body=body)
    )
    return f"{folder.url}/report.html"


def _line(rows: Sequence[Row]) -> str:
    one = rows[0]
    loss = "-" if one["objective"] is None else f"{one['objective']:.4g}"
    status = f"{one['status']}: {one['message']}" if one["message"] else one["status"]
    pictures = "".join(
        f'<img alt="reconstruction {row["sample"]}" title="label {row["label"]}" '
        f'src="data:image/png;base64,{b64encode(row["image"]).decode()}">'
        for row in rows
        if row["image"]
    )
    cells = (str(one["round"]), str(one["client"]), one["attack"], loss, status)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{pictures}</td></tr>\n"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>body{{font:16px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}}
td,th{{padding:.3rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid #ccc}}
img{{width:96px;image-rendering:pixelated;margin:2px}} strong{{color:#8a4b00}}</style></head>
<body><h1>{title}</h1><p><strong>{limits}</strong></p>{notes}
<table><thead><tr><th>round</th><th>client</th><th>attack</th><th>loss of the attack</th><th>status</th>
<th>reconstruction</th></tr></thead><tbody>
{body}</tbody></table></body></html>
"""
