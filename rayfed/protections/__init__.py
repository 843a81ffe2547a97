"""Protections of updates, one per file; `TABLE` maps the names that a scenario can use to their classes."""

TABLE: dict[str, str] = {
    "paillier": "rayfed.protections.paillier:Paillier",
    "ckks": "rayfed.protections.ckks:Ckks",
    "bfv": "rayfed.protections.bfv:Bfv",
    "secure_aggregation": "rayfed.protections.secure_aggregation:SecureAggregation",
}
