"""Aggregation rules, one a file; `TABLE` is what a scenario can name."""

TABLE: dict[str, str] = {
    "fedavg": "rayfed.aggregation.fedavg:FedAvg",
    "fedboosting": "rayfed.aggregation.fedboosting:FedBoosting",
    "median": "rayfed.aggregation.median:Median",
}
