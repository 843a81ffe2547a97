"""Defences, one a file; `TABLE` is what a scenario can name."""

TABLE: dict[str, str] = {
    "ats": "rayfed.defences.ats:Ats",
    "dcs2": "rayfed.defences.dcs2:Dcs2",
    "dldp_a": "rayfed.defences.dldp:DldpA",
    "dldp_b": "rayfed.defences.dldp:DldpB",
    "dp_fedavg": "rayfed.defences.dp_fedavg:DpFedAvg",
    "dp_sgd": "rayfed.defences.dp_sgd:DpSgd",
    "dropout": "rayfed.defences.dropout:Dropout",
    "fed_cdp": "rayfed.defences.fed_cdp:FedCdp",
    "gaussian": "rayfed.defences.gaussian:Gaussian",
    "grad_defense": "rayfed.defences.grad_defense:GradDefense",
    "instahide": "rayfed.defences.instahide:InstaHide",
    "laplace": "rayfed.defences.laplace:Laplace",
    "mixup": "rayfed.defences.mixup:Mixup",
    "outpost": "rayfed.defences.outpost:Outpost",
    "precode": "rayfed.defences.precode:Precode",
    "prune": "rayfed.defences.prune:Prune",
    "quantise": "rayfed.defences.quantise:Quantise",
    "refiner": "rayfed.defences.refiner:Refiner",
    "soteria": "rayfed.defences.soteria:Soteria",
    "top_k": "rayfed.defences.top_k:TopK",
}
