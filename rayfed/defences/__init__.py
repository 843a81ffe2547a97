"""Defences, one a file; `TABLE` is what a scenario can name."""

TABLE: dict[str, str] = {
    "dldp_a": "rayfed.defences.dldp:DldpA",
    "dldp_b": "rayfed.defences.dldp:DldpB",
    "dp_fedavg": "rayfed.defences.dp_fedavg:DpFedAvg",
    "dp_sgd": "rayfed.defences.dp_sgd:DpSgd",
    "fed_cdp": "rayfed.defences.fed_cdp:FedCdp",
    "gaussian": "rayfed.defences.gaussian:Gaussian",
    "laplace": "rayfed.defences.laplace:Laplace",
    "prune": "rayfed.defences.prune:Prune",
    "quantise": "rayfed.defences.quantise:Quantise",
    "refiner": "rayfed.defences.refiner:Refiner",
}
