"""Partitions of samples among clients, each a component with `split(labels, clients, rng)`."""

TABLE: dict[str, str] = {
    "iid": "rayfed.data.partitions.iid:IID",
    "dirichlet": "rayfed.data.partitions.dirichlet:Dirichlet",
    "shards": "rayfed.data.partitions.shards:Shards",
    "quantity": "rayfed.data.partitions.quantity:Quantity",
    "resampled": "rayfed.data.partitions.resampled:Resampled",
    "blocks": "rayfed.data.partitions.blocks:Blocks",
}
