"""Protections of clients' updates with their channels, one a file; `TABLE` lists those that a scenario can name."""

TABLE: dict[str, str] = {
    "paillier": "rayfed.protections.paillier:Paillier",
    "ckks": "rayfed.protections.ckks:Ckks",
    "bfv": "rayfed.protections.bfv:Bfv",
    "secure_aggregation": "rayfed.protections.secure_aggregation:SecureAggregation",
}
