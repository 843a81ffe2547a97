"""Grants: knowledge of an attacker, one grant per file; `TABLE` lists the values of `knowledge`."""

TABLE: dict[str, str] = {
    "labels": "rayfed.client.grants.labels:Labels",
    "public": "rayfed.client.grants.public:Public",
    "defence": "rayfed.client.grants.defence:KnownDefence",
    "code": "rayfed.client.grants.code:KnownCode",
    "candidates": "rayfed.client.grants.candidates:Candidates",
    "activations": "rayfed.client.grants.activations:Activations",
    "colluder": "rayfed.client.grants.colluder:Colluder",
    "key": "rayfed.client.grants.key:Key",
    "lock": "rayfed.client.grants.lock:Lock",
}
