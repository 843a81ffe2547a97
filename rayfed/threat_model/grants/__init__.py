"""Grants: knowledge of an attacker, one grant per file; `TABLE` lists the values of `knowledge`."""

TABLE: dict[str, str] = {
    "labels": "rayfed.threat_model.grants.labels:KnownLabels",
    "public": "rayfed.threat_model.grants.public:Public",
    "defence": "rayfed.threat_model.grants.defence:KnownDefence",
    "code": "rayfed.threat_model.grants.code:KnownCode",
    "candidates": "rayfed.threat_model.grants.candidates:Candidates",
    "activations": "rayfed.threat_model.grants.activations:Activations",
    "colluder": "rayfed.threat_model.grants.colluder:Colluder",
    "key": "rayfed.threat_model.grants.key:Key",
    "lock": "rayfed.threat_model.grants.lock:Lock",
    "lock_weights": "rayfed.threat_model.grants.lock_weights:LockWeights",
}
