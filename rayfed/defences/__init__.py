"""Defences, one a file; `TABLE` is what a scenario can name."""

TABLE: dict[str, str] = {
    "ats": "rayfed.defences.ats:Ats",
    "dropout": "rayfed.defences.dropout:Dropout",
    "gaussian": "rayfed.defences.gaussian:Gaussian",
    "instahide": "rayfed.defences.instahide:InstaHide",
    "laplace": "rayfed.defences.laplace:Laplace",
    "mixup": "rayfed.defences.mixup:Mixup",
    "outpost": "rayfed.defences.outpost:Outpost",
    "precode": "rayfed.defences.precode:Precode",
    "prune": "rayfed.defences.prune:Prune",
    "quantise": "rayfed.defences.quantise:Quantise",
}
