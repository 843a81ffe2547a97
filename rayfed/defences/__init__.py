"""Defences, one a file; `TABLE` is what a scenario can name."""

TABLE: dict[str, str] = {
    "dropout": "rayfed.defences.dropout:Dropout",
    "gaussian": "rayfed.defences.gaussian:Gaussian",
    "laplace": "rayfed.defences.laplace:Laplace",
    "precode": "rayfed.defences.precode:Precode",
    "prune": "rayfed.defences.prune:Prune",
    "quantise": "rayfed.defences.quantise:Quantise",
}
