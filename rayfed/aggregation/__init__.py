"""Aggregation rules, one per file; `TABLE` maps the names that a scenario can use to their classes."""

TABLE: dict[str, str] = {
    "fedavg": "rayfed.aggregation.fedavg:FedAvg",
    "fedasync": "rayfed.aggregation.fedasync:FedAsync",
    "fedboosting": "rayfed.aggregation.fedboosting:FedBoosting",
    "fedbuff": "rayfed.aggregation.fedbuff:FedBuff",
    "geometric_median": "rayfed.aggregation.geometric_median:GeometricMedian",
    "krum": "rayfed.aggregation.krum:Krum",
    "median": "rayfed.aggregation.median:Median",
    "norm_bounding": "rayfed.aggregation.norm_bounding:NormBounding",
    "trimmed_mean": "rayfed.aggregation.trimmed_mean:TrimmedMean",
}
